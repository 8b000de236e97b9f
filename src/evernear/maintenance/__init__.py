"""The references in a store, its check and repair,
and the deletion of objects from it."""
