"""The framework's own switches, as lucidnn reads them: what `lucidnn.backends` sets, or else the framework's flag.

The flags for cuDNN steer calls on CUDA tensors; ``torch.use_deterministic_algorithms`` steers all calls.
"""

from __future__ import annotations

import dataclasses

import torch

from ..core.settings import Settings, current

_get_enabled, _get_benchmark = torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark
_get_deterministic, _get_algorithms = torch._C._get_cudnn_deterministic, torch._C._get_deterministic_algorithms


@dataclasses.dataclass
class Flags:
    """What was set by hand; None follows the framework."""

    enabled: bool | None = None
    benchmark: bool | None = None
    deterministic: bool | None = None


flags = Flags()
_effective: dict[tuple[Settings, bool, bool], Settings] = {}


def enabled() -> bool:
    """Whether CUDA calls of the framework's own operators may run on lucidnn."""
    return _get_enabled() if flags.enabled is None else flags.enabled


def benchmark(cuda: bool) -> bool:
    """Whether the best engines are to be timed for a problem that was not met before."""
    return (cuda and _get_benchmark()) if flags.benchmark is None else flags.benchmark


def deterministic(cuda: bool) -> bool:
    """Whether only engines with the same result in every run may be used."""
    if flags.deterministic is not None:
        return flags.deterministic
    return _get_algorithms() or (cuda and _get_deterministic())


def effective(cuda: bool, settings: Settings | None = None) -> Settings:
    """Settings as these flags change them for calls on CUDA tensors or on the CPU's."""
    settings = settings or current()
    timed, fixed = benchmark(cuda), deterministic(cuda)
    if not timed and not fixed:
        return settings
    key = settings, timed, fixed
    found = _effective.get(key)
    if found is None:
        policy = "find" if timed and settings.policy == "heuristic" else settings.policy
        found = dataclasses.replace(settings, policy=policy, deterministic=fixed or settings.deterministic)
        _effective[key] = found
    return found
