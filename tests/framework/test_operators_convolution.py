"""Convolutions of the framework's operator database under lucidnn."""

from __future__ import annotations

import pytest
from operator_database import Case, check, check_errors, parameters

BOTH = ("convolution", "convolution_backward")
CASES = {f"nn.functional.conv{kind}{n}d": Case(BOTH) for kind in ("", "_transpose") for n in (1, 2, 3)}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if "transpose" not in name])
def test_errors(name):
    check_errors(name)
