"""Ways to do a pooling, one file each."""
