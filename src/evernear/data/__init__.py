"""Images in any source become a validated, hashed, sharded dataset."""
