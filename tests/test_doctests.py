"""Every example in a docstring runs.

Modules are walked by file, so that an engine whose compiler is missing is reported as such and does not keep
the others from being collected.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

import lucidnn

SOURCE = Path(lucidnn.__file__).parent
MODULES = sorted(
    ".".join(("lucidnn", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of(name):
    try:
        module = importlib.import_module(name)
    except ImportError:
        # Only an engine may do without its compiler, and only where that compiler is not installed at all.
        if name.startswith("lucidnn.engines.") and importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        raise
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
