"""Dropout by Philox."""
