"""Ways to do arithmetic point by point, one file each."""
