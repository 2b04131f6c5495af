"""The switch that a user turns: `enable`, `disable`, and what was seen since: `calls`, `report`."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..core.errors import InvalidArgument
from . import operators
from ._override import OVERRIDES, Override

__all__ = ["calls", "disable", "enable", "enabled", "operators", "report", "reset_calls"]
F = TypeVar("F", bound=Callable[..., Any])


def _named(patterns: Iterable[str]) -> list[Override]:
    """The overrides that the patterns name; an error for a pattern that names none."""
    found: dict[str, Override] = {}
    for pattern in patterns:
        names = [n for n in OVERRIDES if fnmatch.fnmatchcase(n, pattern) or n.partition(".")[0] == pattern]
        if not names:
            raise InvalidArgument("operators", repr(pattern), f"names or patterns of {', '.join(sorted(OVERRIDES))}")
        found |= {name: OVERRIDES[name] for name in names}
    return list(found.values())


class enable:
    """Run the framework's operators on lucidnn, from now on, inside a ``with`` block or inside a function.

    Parameters
    ----------
    *operators : str
        Names or patterns (``"convolution*"``) of the framework's operators; all that lucidnn does if left out.
    time_device : bool
        Also time what the calls take on the GPU, for `report`. It costs two events a call.

    Notes
    -----
    Called by itself it stays in force until `disable`. Used in a ``with`` statement, the operators that it switched
    on are switched off again at the block's end; used as a decorator (``@enable()``), around each call. The
    framework has one table of operators, so that it holds for all threads of the process.

    What lucidnn refuses runs as before; `report` says what and why. With the setting ``no_fallback``
    (``LUCIDNN_NO_FALLBACK=1``) that is an error.

    Examples
    --------
    >>> import torch
    >>> with enable("convolution"):
    ...     y = torch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
    >>> y.item()
    9.0

    >>> @enable()
    ... def step(x):
    ...     return torch.conv2d(x, torch.ones(1, 1, 3, 3))
    >>> enabled()
    []
    """

    def __init__(self, *operators: str, time_device: bool = False):
        self._arguments = {"operators": operators, "time_device": time_device}
        self._mine = [o for o in _named(operators or ("*",)) if not o.enabled]
        for one in self._mine:
            one.time_device = time_device
            one.enable()

    def __enter__(self) -> enable:
        return self

    def __exit__(self, *error: Any) -> None:
        for one in self._mine:
            one.disable()

    def __call__(self, function: F) -> F:
        """Wrap a function; what the making of this object had switched on is off again until the function runs."""
        self.__exit__()
        operators, time_device = self._arguments["operators"], self._arguments["time_device"]

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with enable(*operators, time_device=time_device):
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


def disable(*operators: str) -> None:
    """Let the framework's own kernels run again, for all operators or for those named.

    Examples
    --------
    >>> _ = enable(); disable("convolution_backward"); "convolution_backward" in enabled()
    False
    >>> disable(); enabled()
    []
    """
    for one in _named(operators or ("*",)):
        one.disable()


def enabled() -> list[str]:
    """Names of the operators that run on lucidnn now."""
    return sorted(name for name, one in OVERRIDES.items() if one.enabled)


def calls() -> dict[str, dict[str, Any]]:
    """What became of the framework's calls, as plain data: an entry for each operator that was called.

    Returns
    -------
    dict
        Operator to ``{"taken": number of calls, "fallen": {reason: number of calls}, "host_seconds": float,
        "device_seconds": float or None}``. The host's time is spent inside our kernel, launches included (and the
        choice and the compilation, the first time); the device's is there if `enable` was asked to time it.

    Examples
    --------
    >>> import torch
    >>> reset_calls()
    >>> with enable():
    ...     y = torch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
    >>> calls()["convolution"]["taken"], calls()["convolution"]["fallen"]
    (1, {})
    """
    found = {name: one.counted() for name, one in sorted(OVERRIDES.items())}
    return {
        name: {
            "taken": c.taken,
            "fallen": dict(c.fallen),
            "host_seconds": c.host_seconds,
            "device_seconds": c.device_seconds,
        }
        for name, c in found.items()
        if c.taken or c.fallen
    }


def reset_calls() -> None:
    """Start `calls` and `report` anew."""
    for one in OVERRIDES.values():
        one.reset()


def report() -> str:
    """Table of `calls` as text: operators, calls taken, fallen through and why, time.

    Examples
    --------
    >>> reset_calls(); print(report())
    no calls of the framework's operators were seen; is lucidnn.torch enabled?
    """
    seen = calls()
    if not seen:
        return "no calls of the framework's operators were seen; is lucidnn.torch enabled?"
    lines = [f"{'operator':34} {'taken':>8} {'fallen':>8} {'host':>10} {'device':>10}"]
    for name, c in seen.items():
        each = f"{c['host_seconds'] / c['taken'] * 1e6:.1f} us" if c["taken"] else ""
        device = "" if c["device_seconds"] is None else f"{c['device_seconds'] / max(c['taken'], 1) * 1e6:.1f} us"
        lines.append(f"{name:34} {c['taken']:8} {sum(c['fallen'].values()):8} {each:>10} {device:>10}")
        lines += [f"    {count} x {reason.splitlines()[0]}" for reason, count in c["fallen"].items()]
    return "\n".join(lines)
