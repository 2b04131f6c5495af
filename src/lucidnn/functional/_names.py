"""Errors in the caller's words: an operation names its own roles and attributes, a function its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.errors import InvalidArgument


def renamed(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    """The same error about the argument that `names` has for the operation's word.

    Examples
    --------
    >>> print(renamed(InvalidArgument("axes", [3], "axes from -2 to 1"), {"axes": "dim"}))
    dim: found [3]; accepted: axes from -2 to 1
    """
    return InvalidArgument(names.get(error.argument, error.argument), error.found, error.accepted)
