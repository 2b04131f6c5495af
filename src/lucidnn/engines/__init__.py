"""The engines, grouped by operation; a file dropped in here registers itself (see `lucidnn.core.registry`)."""
