"""Find references in a store, check and repair the store, and delete objects from
it."""
