"""What a call costs the host once its plan exists: functions on tiny tensors, lucidnn's and the framework's in turn.

On a CPU the (tiny) kernel is part of the time. On a GPU only the host's side is timed: a burst of calls short enough
that the queue never fills, then a wait that is not counted. ``grad`` rows record for a backward pass, ``backward`` rows
run it too.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as theirs

from benchmarks.context import Context
from lucidnn import functional as ours
from lucidnn.core.timing import Timing

CALLS = 100  # in a burst; a GPU's queue takes about a thousand launches
BURSTS = 41
Call = Callable[..., Any]


def _cases(device: Any) -> dict[str, tuple[tuple[torch.Tensor, ...], Call]]:
    """For one hot call of each family: the tensors that take a gradient, and the call on a face and on them."""
    x, v = torch.randn(1, 8, 8, 8, device=device), torch.randn(4, 8, device=device)
    w, m, b = (torch.randn(shape, device=device) for shape in ((8, 8, 3, 3), (8, 8), (8,)))
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
    grid, target = torch.rand(1, 4, 4, 2, device=device) - 0.5, torch.tensor([1, 0, 3, 2], device=device)

    def batch_norm(training: bool) -> Call:
        return lambda f, x, w, b: f.batch_norm(x, mean, var, w, b, training)

    return {
        "conv2d": ((x, w, b), lambda f, x, w, b: f.conv2d(x, w, b, padding=1)),
        "linear": ((v, m), lambda f, v, m: f.linear(v, m)),
        "relu": ((x,), lambda f, x: f.relu(x)),
        "gelu": ((x,), lambda f, x: f.gelu(x)),
        "max_pool2d": ((x,), lambda f, x: f.max_pool2d(x, 2)),
        "avg_pool2d": ((x,), lambda f, x: f.avg_pool2d(x, 2)),
        "adaptive_avg_pool2d": ((x,), lambda f, x: f.adaptive_avg_pool2d(x, 2)),
        "batch_norm": ((x, b, b.clone()), batch_norm(False)),
        "batch_norm, training": ((x, b, b.clone()), batch_norm(True)),
        "layer_norm": ((v, b, b.clone()), lambda f, v, w, b: f.layer_norm(v, (8,), w, b)),
        "group_norm": ((x, b, b.clone()), lambda f, x, w, b: f.group_norm(x, 2, w, b)),
        "softmax": ((v,), lambda f, v: f.softmax(v, 1)),
        "cross_entropy": ((v,), lambda f, v: f.cross_entropy(v, target)),
        "dropout": ((x,), lambda f, x: f.dropout(x, 0.5, True)),
        "mean": ((x,), lambda f, x: (torch if f is theirs else f).mean(x, 1)),
        "interpolate": ((x,), lambda f, x: f.interpolate(x, scale_factor=2)),
        "grid_sample": ((x,), lambda f, x: f.grid_sample(x, grid, align_corners=False)),
        "unfold": ((x,), lambda f, x: f.unfold(x, 2)),
    }


def results(context: Context) -> Iterator[dict[str, Any]]:
    device = context.device
    for name, (tensors, call) in _cases(device).items():
        wanting = tuple(t.clone().requires_grad_() for t in tensors)
        for mode in ("no grad", "grad", "backward"):
            given = tensors if mode == "no grad" else wanting
            if mode == "backward":
                faces = [_backward(call(f, *given), given) for f in (ours, theirs)]
            else:
                faces = [functools.partial(call, f, *given) for f in (ours, theirs)]
            mine, peer = _timed(faces[0], faces[1], device, 5 if context.quick else BURSTS)
            yield {
                "name": f"host time of {name}" + f", {mode}" * (mode != "no grad"),
                "call": name,
                "mode": mode,
                "seconds": mine.median,
                "spread": round(mine.spread, 4),
                "peer_seconds": peer.median,
                "peer_spread": round(peer.spread, 4),
                "ratio": peer.median / mine.median,
            }


def _backward(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def _timed(mine: Callable[[], Any], peer: Callable[[], Any], device: Any, bursts: int) -> tuple[Timing, Timing]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samples: tuple[list[float], list[float]] = ([], [])
    for call in (mine, peer):
        for _ in range(10):
            call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(bursts):
            for which in (0, 1) if turn % 2 else (1, 0):
                call = (mine, peer)[which]
                wait()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[which].append((time.perf_counter() - start) / CALLS)
    finally:
        if collecting:
            gc.enable()
    wait()
    return Timing.of(samples[0]), Timing.of(samples[1])
