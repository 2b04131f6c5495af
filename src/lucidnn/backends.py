"""Switches that hold for all of lucidnn, under the names of ``torch.backends.cudnn``; by default they follow those.

``torch.backends.cudnn.benchmark = True`` therefore means for lucidnn what it means for cuDNN, and so do
``deterministic``, ``enabled``, ``benchmark_limit`` and the precision of float32. The framework's flags for cuDNN are
flags for a GPU: they change calls on CUDA tensors. ``torch.use_deterministic_algorithms(True)`` changes all calls. A
value that is set here holds for all calls on every device, and None goes back to following.

=================== ========================================================================================
``enabled``         whether the framework's operators run on lucidnn while `lucidnn.torch` is enabled
``benchmark``       whether engines are timed when a problem is met for the first time (policy "find")
``benchmark_limit`` how many of the engines that look best by estimate are timed; 0 for all of them
``deterministic``   whether only engines with the same result in every run are used
``allow_tf32``      whether float32 may be rounded to TF32 on a GPU's matrix units, in convolutions
``fp32_precision``  the same in words: "tf32", "ieee", or "none" to follow the framework
=================== ========================================================================================

>>> import torch, lucidnn
>>> lucidnn.backends.deterministic
False
>>> torch.use_deterministic_algorithms(True); lucidnn.backends.deterministic
True
>>> torch.use_deterministic_algorithms(False)
>>> with lucidnn.backends.flags(benchmark=True):
...     lucidnn.backends.benchmark
True
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from . import __version__
from .core.errors import InvalidArgument
from .core.settings import Settings, configure, current

_get_enabled, _get_benchmark = torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark
_get_deterministic, _get_algorithms = torch._C._get_cudnn_deterministic, torch._C._get_deterministic_algorithms
_set: dict[str, Any] = dict.fromkeys(("enabled", "benchmark", "benchmark_limit", "deterministic"))
_effective: dict[tuple[Settings, bool, bool], Settings] = {}
_TF32 = {"tf32": True, "ieee": False, "none": None}
_NAMES = (*_set, "allow_tf32", "fp32_precision")


def effective(cuda: bool, settings: Settings | None = None) -> Settings:
    """Settings as these switches change them, for calls on CUDA tensors or for those on the CPU's."""
    settings = settings or current()
    timed, fixed = _set["benchmark"], _set["deterministic"]
    if timed is None:
        timed = cuda and _get_benchmark()
    if fixed is None:
        fixed = _get_algorithms() or (cuda and _get_deterministic())
    if not timed and not fixed:
        return settings
    key = settings, timed, fixed
    found = _effective.get(key)
    if found is None:
        policy = "find" if timed and settings.policy == "heuristic" else settings.policy
        found = dataclasses.replace(settings, policy=policy, deterministic=fixed or settings.deterministic)
        _effective[key] = found
    return found


def is_enabled(cuda: bool) -> bool:
    """Whether the framework's operators may run on lucidnn: a word of the user's, or for CUDA the framework's flag."""
    if _set["enabled"] is not None:
        return _set["enabled"]
    return not cuda or _get_enabled()


def limit() -> int:
    """How many candidates a search times; 0 for all."""
    if _set["benchmark_limit"] is not None:
        return _set["benchmark_limit"]
    found = torch.backends.cudnn.benchmark_limit
    return 10 if found is None else found


def version() -> int:
    """Version as one number, 10,000 for a major release, 100 for a minor one.

    >>> version() >= 100
    True
    """
    major, minor, patch = (int(part) for part in __version__.split(".")[:3])
    return major * 10_000 + minor * 100 + patch


def is_available(device: str = "cpu") -> bool:
    """Whether lucidnn has what it needs for tensors on a device: a compiler of kernels, and for "cuda" a GPU.

    >>> is_available()
    True
    """
    if device == "cpu":
        return True
    if device != "cuda":
        raise InvalidArgument("device", repr(device), "'cpu' or 'cuda'")
    import importlib.util

    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def is_acceptable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that lucidnn computes with: dense, of floating point, on a CPU or a GPU.

    >>> is_acceptable(torch.ones(2)), is_acceptable(torch.ones(2, dtype=torch.int64))
    (True, False)
    """
    cuda = tensor.device.type == "cuda"
    known = tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    dense = tensor.layout == torch.strided and not tensor.is_nested
    placed = tensor.device.type in ("cpu", "cuda") and is_available(tensor.device.type)
    return known and dense and placed and is_enabled(cuda)


@contextlib.contextmanager
def flags(**changes: Any) -> Iterator[None]:
    """Other values inside a ``with`` block, by name; those that are not named stay.

    >>> with flags(deterministic=True, benchmark_limit=3):
    ...     effective(cuda=False).deterministic
    True
    """
    if unknown := sorted(changes.keys() - set(_NAMES)):
        raise InvalidArgument("flags", ", ".join(unknown), ", ".join(_NAMES))
    module = sys.modules[__name__]
    before, tf32 = dict(_set), current().allow_tf32
    try:
        for name, value in changes.items():
            setattr(module, name, value)
        yield
    finally:
        _set.update(before)
        configure(allow_tf32=tf32)


def _allows_tf32() -> bool:
    allowed = current().allow_tf32
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32" if allowed is None else allowed


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True, False, or None to follow the framework")
    return value


class _Backends(types.ModuleType):
    """The module as an object, so that its switches can be properties."""

    @property
    def enabled(self) -> bool:
        return is_enabled(cuda=True)

    @enabled.setter
    def enabled(self, value: bool | None) -> None:
        _set["enabled"] = _flag("enabled", value)

    @property
    def benchmark(self) -> bool:
        return effective(cuda=True).policy == "find"

    @benchmark.setter
    def benchmark(self, value: bool | None) -> None:
        _set["benchmark"] = _flag("benchmark", value)

    @property
    def benchmark_limit(self) -> int:
        return limit()

    @benchmark_limit.setter
    def benchmark_limit(self, value: int | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise InvalidArgument("benchmark_limit", repr(value), "a whole number >= 0, or None")
        _set["benchmark_limit"] = value

    @property
    def deterministic(self) -> bool:
        return effective(cuda=True).deterministic

    @deterministic.setter
    def deterministic(self, value: bool | None) -> None:
        _set["deterministic"] = _flag("deterministic", value)

    @property
    def allow_tf32(self) -> bool:
        return _allows_tf32()

    @allow_tf32.setter
    def allow_tf32(self, value: bool | None) -> None:
        configure(allow_tf32=_flag("allow_tf32", value))

    @property
    def fp32_precision(self) -> str:
        return "tf32" if _allows_tf32() else "ieee"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        if value not in _TF32:
            raise InvalidArgument("fp32_precision", repr(value), ", ".join(_TF32))
        configure(allow_tf32=_TF32[value])


sys.modules[__name__].__class__ = _Backends
