"""Ways to write images out as columns, to add them up again, and to shuffle channels and pixels, one file each."""
