"""Convert images from any source to a validated, hashed and sharded dataset, and export its
snapshots (`export`)."""
