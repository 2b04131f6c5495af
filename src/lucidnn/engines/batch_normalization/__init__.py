"""Ways to do a batch normalization, one file each."""
