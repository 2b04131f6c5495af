"""Ways to do an elementwise operation, one file each."""
