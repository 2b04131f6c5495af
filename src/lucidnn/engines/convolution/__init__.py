"""Ways to do a convolution, one file each."""
