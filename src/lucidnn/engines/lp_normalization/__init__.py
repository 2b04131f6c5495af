"""Engines of normalization by an L_p norm, one to a file."""
