"""Measurements with committed results: `python -m benchmarks.run` writes, `docs/readme_table.py` shows them."""
