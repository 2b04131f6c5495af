"""Deep-neural-network primitives whose every kernel is Python that can be read, questioned and changed.

The public names load on first use (PEP 562), so that ``import lucidnn`` takes milliseconds and loads neither
torch nor triton nor numba; ``lucidnn.functional`` or ``lucidnn.Problem`` then brings in just what it needs.

Examples
--------
>>> import lucidnn
>>> problem = lucidnn.Problem.parse("conv_fprop x=f32[8,3,32,32] w=f32[32,3,3,3] padding=1 on=cuda:sm_90")
>>> problem["y"].shape
(8, 32, 32, 32)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backends, functional, nn, ops, testing, torch
    from .core.descriptor import TensorDescriptor
    from .core.engine import Engine
    from .core.errors import (
        DeviceUnavailable,
        EngineFailure,
        InvalidArgument,
        LucidnnError,
        NotSupported,
        ProblemSyntaxError,
        UnknownEngine,
    )
    from .core.operation import Epilogue, Operation
    from .core.plan import Plan, candidates, explain, find, observe, select
    from .core.problem import Problem
    from .core.settings import Settings, configure, using
    from .core.target import Target
    from .testing import read_problems

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "DeviceUnavailable",
    "Engine",
    "EngineFailure",
    "Epilogue",
    "InvalidArgument",
    "LucidnnError",
    "NotSupported",
    "Operation",
    "Plan",
    "Problem",
    "ProblemSyntaxError",
    "Settings",
    "Target",
    "TensorDescriptor",
    "UnknownEngine",
    "backends",
    "candidates",
    "configure",
    "explain",
    "find",
    "functional",
    "nn",
    "observe",
    "ops",
    "read_problems",
    "select",
    "testing",
    "torch",
    "using",
]

# Public name -> the module that defines it; None where the name is a submodule. The same names stand above for type
# checkers and editors, and a test keeps the three lists in step.
_PUBLIC: dict[str, str | None] = {
    "TensorDescriptor": "lucidnn.core.descriptor",
    "Engine": "lucidnn.core.engine",
    "DeviceUnavailable": "lucidnn.core.errors",
    "EngineFailure": "lucidnn.core.errors",
    "InvalidArgument": "lucidnn.core.errors",
    "LucidnnError": "lucidnn.core.errors",
    "NotSupported": "lucidnn.core.errors",
    "ProblemSyntaxError": "lucidnn.core.errors",
    "UnknownEngine": "lucidnn.core.errors",
    "Epilogue": "lucidnn.core.operation",
    "Operation": "lucidnn.core.operation",
    "Plan": "lucidnn.core.plan",
    "candidates": "lucidnn.core.plan",
    "explain": "lucidnn.core.plan",
    "find": "lucidnn.core.plan",
    "observe": "lucidnn.core.plan",
    "select": "lucidnn.core.plan",
    "Problem": "lucidnn.core.problem",
    "read_problems": "lucidnn.testing",
    "Settings": "lucidnn.core.settings",
    "configure": "lucidnn.core.settings",
    "using": "lucidnn.core.settings",
    "Target": "lucidnn.core.target",
    "backends": None,
    "functional": None,
    "nn": None,
    "ops": None,
    "testing": None,
    "torch": None,
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it and keep it for the next look-up."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lucidnn' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = _PUBLIC[name]
    value = import_module(f"lucidnn.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
