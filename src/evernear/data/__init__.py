"""Convert images from any source to a validated, hashed and sharded dataset."""
