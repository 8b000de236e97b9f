"""What every room uses: the store, the disk, output, records of runs, threads."""
