"""Engines of local response and divisive normalization, one to a file."""
