"""The framework's own kernels by family: a file here gives ``PEERS``, operation name to maker of a `Peer`.

Dropping a file in is all; `lucidnn.cli.peer.peer` finds it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


@functools.cache
def dropped_in() -> dict[str, Callable[[Any], Any]]:
    """Operation name to the function that makes its peer, from all files of this package."""
    found: dict[str, Callable[[Any], Any]] = {}
    for info in pkgutil.iter_modules(__path__, __name__ + "."):
        found |= importlib.import_module(info.name).PEERS
    return found
