"""What a call costs the host once its plan exists: functions on tiny tensors, lucidnn's and the framework's in turn.

On a CPU the (tiny) kernel is part of the time. On a GPU only the host's side is timed: a burst of calls short enough
that the queue never fills, then a wait that is not counted. ``grad`` rows record for a backward pass, ``backward`` rows
run it too.
"""

from __future__ import annotations

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


def results(context: Context) -> Iterator[dict[str, Any]]:
    device = context.device
    x = torch.randn(1, 8, 8, 8, device=device)
    w, b = torch.randn(8, 8, 3, 3, device=device), torch.randn(8, device=device)
    m, v = torch.randn(8, 8, device=device), torch.randn(4, 8, device=device)
    wg, bg, xg = (t.clone().requires_grad_() for t in (w, b, x))
    cases: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "conv2d": ("no grad", lambda f: lambda: f.conv2d(x, w, b, padding=1)),
        "conv2d, grad": ("grad", lambda f: lambda: f.conv2d(x, wg, bg, padding=1)),
        "conv2d, backward": ("backward", lambda f: _backward(f.conv2d(x, wg, bg, padding=1), (wg, bg))),
        "max_pool2d": ("no grad", lambda f: lambda: f.max_pool2d(x, 2)),
        "max_pool2d, grad": ("grad", lambda f: lambda: f.max_pool2d(xg, 2)),
        "relu": ("no grad", lambda f: lambda: f.relu(x)),
        "relu, grad": ("grad", lambda f: lambda: f.relu(xg)),
        "linear": ("no grad", lambda f: lambda: f.linear(v, m)),
    }
    for name, (mode, make) in cases.items():
        with torch.set_grad_enabled(mode != "no grad"):
            mine, peer = _timed(make(ours), make(theirs), device, 5 if context.quick else BURSTS)
        yield {
            "name": f"host time of {name}",
            "call": name.partition(",")[0],
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
