"""Deep-neural-network primitives whose every kernel is Python that can be read, questioned and changed.

The public names load on first use (PEP 562), so that ``import lucidnn`` takes milliseconds and loads neither
torch nor triton nor numba; ``lucidnn.conv2d`` or ``lucidnn.Problem`` then brings in just what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it. None marks a submodule that is a public name itself.
_PUBLIC: dict[str, str | None] = {
    "functional": None,
    "ops": None,
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it and keep it for the next look-up."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lucidnn' has no attribute {name!r}; public names: {', '.join(__all__)}")
    home = _PUBLIC[name]
    value = import_module(f"lucidnn.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
