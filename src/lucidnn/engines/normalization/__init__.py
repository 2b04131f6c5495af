"""Ways to normalize: batches, layers, groups, responses. One file an engine; files that start with ``_`` are shared."""
