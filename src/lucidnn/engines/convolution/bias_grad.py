"""Bias gradient on a CPU: dy summed over images and space, in any layout, the same bits on every run.

Method. Runs of at most 1024 elements are summed in the accumulation type, in vector lanes, and the runs' sums in
float64: the error stays near that of one short run however many elements there are. With channels first a run is a
piece of one channel's plane; with channels last a run is some pixels, for all channels side by side. Parts take fixed
shares of images or pixels, and their sums are added in order.

Cost: dy read once. Limits: none but the four data types.
"""

from __future__ import annotations

import functools
import math

import torch

from ...core.engine import Engine, Refusals
from ...core.heuristics import roofline
from .. import _numba as nb
from .._numba.jit import kernel
from .._numba.memory import accumulator, cast, load, pointer, store

RUN = 1024  # elements of a channel summed before float64 takes over
PIXELS = 256  # the same with channels last, where each lane sums one channel
(
    N, K, D, H, W, S_N, S_K, S_D, S_H, S_W, N_PARTS, K_PARTS, LINES, OUT_K,
) = range(14)  # fmt: skip


@kernel
def _channels_first(part, parts, table, dy, sums, like):
    """A share of the channels and of the images: ``sums[n_part, k]``."""
    t, x, total = pointer(table, 0), pointer(dy, like), pointer(sums, 0.0)
    n_part, k_part = part % t[N_PARTS], part // t[N_PARTS]
    n0, n1 = t[N] * n_part // t[N_PARTS], t[N] * (n_part + 1) // t[N_PARTS]
    step = t[S_W]
    for k in range(t[K] * k_part // t[K_PARTS], t[K] * (k_part + 1) // t[K_PARTS]):
        result = 0.0
        for n in range(n0, n1):
            for d in range(t[D]):
                for h in range(t[H]):
                    at = n * t[S_N] + k * t[S_K] + d * t[S_D] + h * t[S_H]
                    for w0 in range(0, t[W], RUN):
                        run = accumulator(like)
                        if step == 1:
                            for w in range(w0, min(w0 + RUN, t[W])):
                                run += load(x, at + w)
                        else:
                            for w in range(w0, min(w0 + RUN, t[W])):
                                run += load(x, at + w * step)
                        result += run
        total[n_part * t[K] + k] = result


@kernel
def _channels_last(part, parts, table, dy, sums, runs, like):
    """A share of the lines (n, d, h), all channels: ``sums[part, k]``; ``runs[part, k]`` is scratch."""
    t, x, total = pointer(table, 0), pointer(dy, like), pointer(sums, 0.0)
    run = pointer(runs, accumulator(like))
    channels, mine = t[K], part * t[K]
    for k in range(mine, mine + channels):
        total[k] = 0.0
        run[k] = accumulator(like)
    held = 0
    for line in range(t[LINES] * part // parts, t[LINES] * (part + 1) // parts):
        h, rest = line % t[H], line // t[H]
        d, n = rest % t[D], rest // t[D]
        at = n * t[S_N] + d * t[S_D] + h * t[S_H]
        step, w = t[S_W], 0
        while w < t[W]:
            # Eight pixels at a time: one update of the sums in memory for eight reads.
            if w + 8 <= t[W]:
                for k in range(channels):
                    i = at + k
                    left = load(x, i) + load(x, i + step) + (load(x, i + 2 * step) + load(x, i + 3 * step))
                    i += 4 * step
                    right = load(x, i) + load(x, i + step) + (load(x, i + 2 * step) + load(x, i + 3 * step))
                    run[mine + k] += left + right
                w += 8
                at += 8 * step
                held += 8
            else:
                for k in range(channels):
                    run[mine + k] += load(x, at + k)
                w += 1
                at += step
                held += 1
            if held >= PIXELS:
                held = 0
                for k in range(mine, mine + channels):
                    total[k] += run[k]
                    run[k] = accumulator(like)
    for k in range(mine, mine + channels):
        total[k] += run[k]


@kernel
def _bias_gradient(table, dy, db, sums, runs, parts, threads, last, like, out):
    t, total, result = pointer(table, 0), pointer(sums, 0.0), pointer(db, out)
    rows = parts
    if last:
        nb.launch(_channels_last, parts, threads, (table, dy, sums, runs, like))
    else:
        nb.launch(_channels_first, parts, threads, (table, dy, sums, like))
        rows = t[N_PARTS]
    for k in range(t[K]):
        value = total[k]
        for i in range(1, rows):
            value += total[i * t[K] + k]
        store(result, k * t[OUT_K], cast(value, accumulator(out)))


class _Plan:
    def __init__(self, problem):
        dy = problem["dy"]
        batch, channels = dy.shape[:2]
        space = [(n, s) for n, s in zip(dy.shape[2:], dy.strides[2:], strict=True) if n > 1]
        self.last = dy.strides[1] == 1 and (channels > 1 or not space)
        # Neighbouring axes that step through memory as one are one.
        joined: list[tuple[int, int]] = []
        for size, stride in space:
            if joined and joined[-1][1] == size * stride:
                size *= joined.pop()[0]
            joined.append((size, stride))
        while len(joined) < 3:
            joined.insert(0, (1, 0))
        sizes, strides = zip(*joined, strict=True)
        lines = batch * sizes[0] * sizes[1]
        wanted = 4 * nb.worthwhile(20 * dy.numel, problem.target.processors)
        wanted = 1 if wanted == 4 else wanted
        if self.last and lines < wanted and sizes[1] == 1 and sizes[2] >= wanted:
            # One long line an image: cut it so that there is something to share out.
            cut = math.gcd(sizes[2], 1 << 10) if sizes[2] % 2 == 0 else 1
            sizes = (sizes[0], cut, sizes[2] // cut)
            strides = (strides[0], sizes[2] * strides[2], strides[2])
            lines = batch * sizes[0] * sizes[1]
        if self.last:
            self.parts = max(1, min(lines, wanted))
            n_parts, k_parts = self.parts, 1
        else:
            k_parts = min(channels, wanted)
            n_parts = max(1, min(batch, wanted // k_parts))
            self.parts = n_parts * k_parts
        values = [batch, channels, *sizes, *dy.strides[:2], *strides, n_parts, k_parts, lines]
        values += problem["db"].strides
        self.table = torch.tensor(values, dtype=torch.int64)
        self.rows = n_parts
        self.channels = channels

    @property
    def workspace(self) -> int:
        return 64 + self.rows * self.channels * 16


_plan = functools.lru_cache(maxsize=256)(_Plan)


class BiasGrad(Engine):
    """Sum of dy over batch and space."""

    name = "conv.bias_grad"
    operations = ("conv_bgrad",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem):
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        r.require_tensors(problem.items, ("f64", "f32", "f16", "bf16"))
        return r

    def workspace_size(self, problem, config):
        return _plan(problem).workspace

    def cost(self, problem, config):
        return roofline(problem)

    def build(self, problem, config):
        plan = _plan(problem)
        like, out = nb.token(problem["dy"].dtype), nb.token(problem["db"].dtype)
        table, threads, last, parts = plan.table, nb.threads, plan.last, plan.parts
        at, half = table.data_ptr(), plan.rows * plan.channels * 8

        def run(tensors, workspace, keep=table):
            sums = (workspace.data_ptr() + 63) & -64
            dy, db = tensors
            _bias_gradient(at, dy.data_ptr(), db.data_ptr(), sums, sums + half, parts, threads(), last, like, out)

        return run
