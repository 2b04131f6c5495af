"""Memory for plans: new tensors by the shortest way there is, and workspaces that are kept from call to call.

Below `lucidnn.core`; knows the framework only. A small CPU call takes a few microseconds, of which ``torch.empty`` and
its like would be one or two for each tensor. The framework's compiled graphs have something better: half a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

BYTES = torch.uint8
SPARE = 65536  # bytes of a workspace that is kept
Looks = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and type."""

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_quick_gpu = getattr(_guards, "_empty_strided_cuda", None)
_idle: list[torch.Tensor] = []  # kept workspaces, as many as there ever were calls at one time

quick_cpu: Callable[[Any, Any, torch.dtype], torch.Tensor] | None = getattr(_guards, "_empty_strided_cpu", None)
"""``quick_cpu(shape, strides, dtype)``: an uninitialised tensor on the CPU; None where the framework lacks it."""


def empties(looks: Sequence[Looks], device: torch.device) -> list[torch.Tensor]:
    """Uninitialised tensors, from the framework's allocators: ordered by stream, safe under graph capture."""
    if device.type == "cpu":
        quick = quick_cpu
    else:  # it knows the current device only
        quick = _quick_gpu if device.type == "cuda" and _current_device and _current_device() == device.index else None
    if quick:
        return [quick(*one) for one in looks]
    return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in looks]


def lend(size: int, device: torch.device, run: Callable[[Any, torch.Tensor], None], tensors: Any) -> None:
    """``run(tensors, workspace)`` with `size` bytes or more that nobody else uses meanwhile.

    A GPU's workspace is new: when the call is over the kernels have only been started. So is a large one on a CPU.
    """
    if size > SPARE or device.type != "cpu":
        run(tensors, empties([((size,), (1,), BYTES)], device)[0])
        return
    try:
        workspace = _idle.pop()
    except IndexError:
        with torch.inference_mode(False):  # it outlives this call
            workspace = torch.empty(SPARE, dtype=BYTES, device=device)
    try:
        run(tensors, workspace)
    finally:
        _idle.append(workspace)
