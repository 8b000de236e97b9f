"""Find references in a store, check and repair the store, and delete unneeded objects."""
