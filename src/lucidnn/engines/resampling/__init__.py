"""Ways to resample images, one file each."""
