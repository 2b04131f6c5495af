"""How an operator of the framework comes to run on lucidnn, and goes back: one mechanism for all of them.

The framework's dispatcher holds, for every operator and backend, one kernel. An `Override` puts a Python kernel of
ours in its place (``torch.library``, one library object an operator, so that each can be taken out by itself) and
keeps the one that stood there. Everything above that place stays the framework's own: autograd with its
saved-tensor checks, autocast, vmap and the other transforms, fake tensors, tracing, compilation. What is below is the
same road as everywhere in this library: problem, engines, choice, plan, launch.

What no engine takes goes to the kernel that stood there before, and the reason is kept with a count. So does what
the framework would call ill-formed: its own kernel then raises its own error.

Cost: the dispatcher's step into Python takes about a microsecond a call, on top of what the face itself takes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import backends
from ..core import settings as choices
from ..core.errors import InvalidArgument, NotSupported
from ..core.settings import Settings
from ..functional._library import unseen

REASONS_KEPT = 64  # different reasons kept for one operator; a program whose shapes never repeat makes more


@dataclasses.dataclass
class Calls:
    """What became of the calls of one operator since it was switched on (or since `reset_calls`)."""

    taken: int = 0
    fallen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    host_seconds: float = 0.0  # inside our kernel, launches included, of the calls that were taken
    device_seconds: float | None = None  # of the calls that were taken, where `enable` was asked to time the device


class Override:
    """One operator of the framework as lucidnn does it.

    Parameters
    ----------
    name : str
        The operator's name below ``aten::``, with the overload's name where it has one.
    function : callable
        Takes what the dispatcher hands over (arguments that have their default may be left out, as in the operator's
        schema) and gives what the operator gives. It raises `NotSupported` for what it does not do and
        `InvalidArgument` for what is ill-formed.
    composite : bool
        The framework makes this operator of others, above autograd. The function then has to be differentiable.
    devices : sequence of str
        The kinds of device on which it is taken over: "CPU", "CUDA".
    """

    def __init__(
        self, name: str, function: Callable[..., Any], composite: bool = False, devices: Sequence[str] = ("CPU", "CUDA")
    ):
        self.name, self.function, self.composite, self.devices = name, function, composite, devices
        self.calls = Calls()
        self.time_device = False
        self._library: torch.library.Library | None = None
        self._lock = threading.Lock()
        self._events: list[tuple[Any, Any]] = []

    def __repr__(self) -> str:
        return f"<Override of aten::{self.name}, {'on' if self._library else 'off'}>"

    @property
    def enabled(self) -> bool:
        """Whether the framework's operator runs on lucidnn now."""
        return self._library is not None

    def enable(self) -> None:
        """Put our kernel in the place of the framework's."""
        natives = {}  # all of them before the first is replaced: what a composite's keys lead to depends on the others
        for device in self.devices:
            if device == "CUDA" and not torch.backends.cuda.is_built():
                continue
            for key in (device, f"Autograd{device}") if self.composite else (device,):
                with contextlib.suppress(RuntimeError):  # the framework has no such kernel for this kind of device
                    natives[key] = torch.library.get_kernel(f"aten::{self.name}", key), device == "CUDA"
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel.*")
            for key, native in natives.items():
                library.impl(self.name, self._kernel(*native), key, with_keyset=True)
        self._library = library

    def disable(self) -> None:
        """Put the framework's kernel back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def reset(self) -> None:
        """Forget the calls so far."""
        with self._lock:
            self.calls, self._events = Calls(), []

    def counted(self) -> Calls:
        """The calls so far; waits for the device if it was timed."""
        with self._lock:
            events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
            seconds = sum(start.elapsed_time(end) for start, end in events) * 1e-3
            with self._lock:
                self.calls.device_seconds = (self.calls.device_seconds or 0.0) + seconds
        with self._lock:
            return dataclasses.replace(self.calls, fallen=self.calls.fallen.copy())

    def _kernel(self, native: Any, cuda: bool) -> Callable[..., Any]:
        function, composite, override = self.function, self.composite, choices._override

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            # What traces a call is to see its parts, which come here in turn.
            if composite and not unseen([t for t in args if isinstance(t, torch.Tensor)]):
                return native.call_boxed(keyset, *args, **kwargs)
            start = time.perf_counter()
            base = choices.current()
            # An engine of last resort is slower than the framework's kernel, which is there to be called.
            token = override.set(_strict(base))
            try:
                if not backends.is_enabled(cuda):
                    raise NotSupported("lucidnn.backends.enabled is False")
                if cuda and self.time_device:
                    result = self._timed(function, args, kwargs)
                else:
                    result = function(*args, **kwargs)
            except (NotSupported, InvalidArgument) as refusal:
                if base.no_fallback:
                    raise
                reason = str(refusal)
            else:
                with self._lock:
                    calls = self.calls
                    calls.taken += 1
                    calls.host_seconds += time.perf_counter() - start
                return result
            finally:
                override.reset(token)
            result = native.call_boxed(keyset, *args, **kwargs)
            with self._lock:
                fallen = self.calls.fallen
                fallen[reason if reason in fallen or len(fallen) < REASONS_KEPT else "other reasons"] += 1
            return result

        return kernel

    def _timed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():  # events of a graph tell no time
            return function(*args, **kwargs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function(*args, **kwargs)
        end.record()
        with self._lock:
            self._events.append((start, end))
        return result


_last: tuple[Settings | None, Settings] = None, Settings()


def _strict(settings: Settings) -> Settings:
    """The same settings, under which an engine of last resort is a refusal."""
    global _last
    known, strict = _last
    if known is not settings:  # the last ones are nearly always those of now
        strict = dataclasses.replace(settings, no_fallback=True)
        _last = settings, strict
    return strict


OVERRIDES: dict[str, Override] = {}
"""Every operator of the framework that lucidnn does, by name; the modules of `lucidnn.torch.operators` fill it."""


def override(*names: str, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare that the function below is what lucidnn does for these operators; `Override` has the parameters."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OVERRIDES[name] = Override(name, function, **how)
        return function

    return declare
