"""Softmax and log-softmax over any axes."""
