"""Ways to do a reduction, one file each."""
