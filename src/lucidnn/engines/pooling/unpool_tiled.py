"""``pool.unpool_tiled``: max unpooling on a GPU, any strides and type, both directions, in Triton.

Method: forward has to let the last of several values for one place win, whatever runs first. A program owns a block of
planes of y (channels that lie closest together, or one plane). Where y is a whole number of times as large as x along
every axis, each value has a **cell** of y, and an index that comes from pooling without overlap points into it: the
program writes every cell from its one value and notes on the way whether some index points elsewhere. Only then, and
where there are no cells, it goes the long way: it notes in the workspace for every place the number of the value that
comes there, a maximum over numbers, which atomics give in any order, and writes every place once, from the value noted
there or zero. Programs take one block after another with the same notes, so that these stay in the second-level cache.
Backward is a gather.

Cost: the memory traffic; the long way one atomic a value in the cache more. Limits: planes below 2^31 points; an index
of 32 or 64 bits.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, Slice, TritonEngine

TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def _at(k, H, W, h_mul, h_shift, w_mul, w_shift, d_stride, h_stride, w_stride, FLAT: tl.constexpr, WIDE: tl.constexpr):
    """Where point k of a plane is."""
    if FLAT:
        at = k * w_stride
    else:
        rest, w = split(k, W, w_mul, w_shift, WIDE)
        d, h = split(rest, H, h_mul, h_shift, WIDE)
        at = d * d_stride + h * h_stride + w * w_stride
    return at


@triton.jit
def _fill_cells(
    x, index, y, n, channel, C, POINTS, VALUES, XH, XW, YH, YW, xh_mul, xh_shift, xw_mul, xw_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    CELL_D: tl.constexpr, CELL_H: tl.constexpr, CELL_W: tl.constexpr, PAIRS: tl.constexpr,
    X_FLAT: tl.constexpr, I_FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every cell from its value; whether some index points out of its own cell."""
    step = tl.arange(0, BLOCK_T)
    strays = tl.zeros((BLOCK_T, BLOCK_C), tl.int32)
    for start in tl.range(0, VALUES, BLOCK_T, num_stages=STAGES):
        v = start + step
        if WIDE:
            v = v.to(tl.int64)
        mask = (v < VALUES)[:, None] & (channel < C)
        at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, i_d_stride, i_h_stride, i_w_stride, I_FLAT, WIDE)
        k = tl.load(index + (n * i_n_stride + channel * i_c_stride + at[:, None]), mask=mask, other=-1)
        at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, x_d_stride, x_h_stride, x_w_stride, X_FLAT, WIDE)
        value = tl.load(x + (n * x_n_stride + channel * x_c_stride + at[:, None]), mask=mask, other=0.0)
        k = tl.where((k >= 0) & (k < POINTS), k, -1).to(tl.int32)
        rest, w = split(v, XW, xw_mul, xw_shift, WIDE)
        d, h = split(rest, XH, xh_mul, xh_shift, WIDE)
        first = ((d * CELL_D * YH + h * CELL_H) * YW + w * CELL_W).to(tl.int32)[:, None]
        corner = d * (CELL_D * y_d_stride) + h * (CELL_H * y_h_stride) + w * (CELL_W * y_w_stride)
        corner = y + (n * y_n_stride + channel * y_c_stride + corner[:, None])
        found = k < 0
        nothing = tl.zeros_like(value)
        for i in tl.static_range(CELL_D):
            for j in tl.static_range(CELL_H):
                line = first + (i * YH + j) * YW
                to = corner + (i * y_d_stride + j * y_h_stride)
                if PAIRS:  # two columns of a cell are neighbours in memory
                    both = tl.join(tl.where(k == line, value, nothing), tl.where(k == line + 1, value, nothing))
                    found = found | (k == line) | (k == line + 1)
                    tl.store(to[:, :, None] + tl.arange(0, 2)[None, None, :], both, mask=mask[:, :, None])
                else:
                    for e in tl.static_range(CELL_W):
                        here = k == line + e
                        found = found | here
                        tl.store(to + e * y_w_stride, tl.where(here, value, nothing), mask=mask)
        strays = tl.maximum(strays, tl.where(found, 0, 1))
    return tl.max(tl.max(strays, axis=1), axis=0)


@triton.jit
def _fill_by_notes(
    x, index, y, notes, n, channel, C, POINTS, VALUES, XH, XW, YH, YW,
    xh_mul, xh_shift, xw_mul, xw_shift, yh_mul, yh_shift, yw_mul, yw_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    X_FLAT: tl.constexpr, I_FLAT: tl.constexpr, Y_FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Every place from the last value that comes there, or zero."""
    lane = tl.arange(0, BLOCK_C)[None, :]
    step = tl.arange(0, BLOCK_T)
    if WIDE:
        lane = lane.to(tl.int64)
        step = step.to(tl.int64)
    for start in range(0, POINTS, BLOCK_T):
        k = (start + step)[:, None]
        tl.store(notes + (k * BLOCK_C + lane), tl.full((BLOCK_T, BLOCK_C), -1, tl.int32), mask=k < POINTS)
    tl.debug_barrier()
    for start in range(0, VALUES, BLOCK_T):
        v = start + step
        mask = (v < VALUES)[:, None] & (channel < C)
        at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, i_d_stride, i_h_stride, i_w_stride, I_FLAT, WIDE)
        at = n * i_n_stride + channel * i_c_stride + at[:, None]
        k = tl.load(index + at, mask=mask, other=-1)
        mask = mask & (k >= 0) & (k < POINTS)
        number = tl.broadcast_to(v.to(tl.int32)[:, None], (BLOCK_T, BLOCK_C))
        tl.atomic_max(notes + (k * BLOCK_C + lane), number, mask=mask, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, POINTS, BLOCK_T):
        k = start + step
        mask = (k < POINTS)[:, None] & (channel < C)
        # Past the first-level cache, which does not see what atomics write.
        v = tl.load(notes + (k[:, None] * BLOCK_C + lane), mask=mask, other=-1, cache_modifier=".cg")
        there = mask & (v >= 0)
        if WIDE:
            v = v.to(tl.int64)
        v = tl.maximum(v, 0)
        at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, x_d_stride, x_h_stride, x_w_stride, X_FLAT, WIDE)
        value = tl.load(x + (n * x_n_stride + channel * x_c_stride + at), mask=there, other=0.0)
        at = _at(k, YH, YW, yh_mul, yh_shift, yw_mul, yw_shift, y_d_stride, y_h_stride, y_w_stride, Y_FLAT, WIDE)
        tl.store(y + (n * y_n_stride + channel * y_c_stride + at[:, None]), value, mask=mask)
    tl.debug_barrier()


@triton.jit
def max_unpool_fwd(
    x, index, y, notes, UNITS, C, POINTS, VALUES, XH, XW, YH, YW,
    xh_mul, xh_shift, xw_mul, xw_shift, yh_mul, yh_shift, yw_mul, yw_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    CELL_D: tl.constexpr, CELL_H: tl.constexpr, CELL_W: tl.constexpr, PAIRS: tl.constexpr,
    X_FLAT: tl.constexpr, I_FLAT: tl.constexpr, Y_FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    lane = tl.arange(0, BLOCK_C)[None, :]
    own = tl.program_id(0)
    if WIDE:
        own = own.to(tl.int64)
        lane = lane.to(tl.int64)
    own_notes = notes + own * POINTS * BLOCK_C
    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):
        n, c = unit // blocks, (unit % blocks) * BLOCK_C
        if WIDE:
            n = n.to(tl.int64)
            c = c.to(tl.int64)
        channel = c + lane
        if CELL_W > 0:
            strays = _fill_cells(
                x, index, y, n, channel, C, POINTS, VALUES, XH, XW, YH, YW, xh_mul, xh_shift, xw_mul, xw_shift,
                x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
                i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
                y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
                CELL_D, CELL_H, CELL_W, PAIRS, X_FLAT, I_FLAT, WIDE, BLOCK_C, BLOCK_T, STAGES,
            )  # fmt: skip
        else:
            strays = 1
        if strays > 0:
            _fill_by_notes(
                x, index, y, own_notes, n, channel, C, POINTS, VALUES, XH, XW, YH, YW,
                xh_mul, xh_shift, xw_mul, xw_shift, yh_mul, yh_shift, yw_mul, yw_shift,
                x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
                i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
                y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
                X_FLAT, I_FLAT, Y_FLAT, WIDE, BLOCK_C, BLOCK_T,
            )  # fmt: skip


@triton.jit
def max_unpool_bwd(
    dy, index, dx, C, POINTS, VALUES, XH, XW, YH, YW,
    xh_mul, xh_shift, xw_mul, xw_shift, yh_mul, yh_shift, yw_mul, yw_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    X_FLAT: tl.constexpr, I_FLAT: tl.constexpr, Y_FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    blocks, steps = tl.cdiv(C, BLOCK_C), tl.cdiv(VALUES, BLOCK_T)
    pid = tl.program_id(0)
    start = (pid % steps) * BLOCK_T
    n = pid // steps // blocks
    c = (pid // steps % blocks) * BLOCK_C
    if WIDE:
        n = n.to(tl.int64)
        c = c.to(tl.int64)
        start = start.to(tl.int64)
    channel = c + tl.arange(0, BLOCK_C)[None, :]
    v = start + tl.arange(0, BLOCK_T)
    mask = (v < VALUES)[:, None] & (channel < C)
    at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, i_d_stride, i_h_stride, i_w_stride, I_FLAT, WIDE)
    k = tl.load(index + (n * i_n_stride + channel * i_c_stride + at[:, None]), mask=mask, other=-1)
    there = mask & (k >= 0) & (k < POINTS)
    k = tl.where(there, k, 0)
    if WIDE:
        k = k.to(tl.int64)
    else:
        k = k.to(tl.int32)
    at = _at(k, YH, YW, yh_mul, yh_shift, yw_mul, yw_shift, y_d_stride, y_h_stride, y_w_stride, Y_FLAT, WIDE)
    value = tl.load(dy + (n * y_n_stride + channel * y_c_stride + at), mask=there, other=0.0)
    at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, x_d_stride, x_h_stride, x_w_stride, X_FLAT, WIDE)
    tl.store(dx + (n * x_n_stride + channel * x_c_stride + at[:, None]), value, mask=mask)


class UnpoolTiled(TritonEngine):
    name = "pool.unpool_tiled"
    operations = ("max_unpool_fwd", "max_unpool_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        small, large = self._roles(problem)
        points = max(math.prod(problem[role].shape[2:]) for role in (small, large))
        r.require(points <= INT32, "planes of less than 2^31 points", points)
        if not r:
            blocks = self._units(problem, self.configs(problem)[0]["BLOCK_C"]) * points
            r.require(blocks <= INT32 or problem.op.name == "max_unpool_fwd", f"at most {INT32} tiles", blocks)
        return r

    def _roles(self, problem: Problem) -> tuple[str, str]:
        return ("x", "y") if problem.op.name == "max_unpool_fwd" else ("dx", "dy")

    def _units(self, problem: Problem, width: int) -> int:
        n, c = problem["index"].shape[:2]
        return n * -(-c // width)

    def configs(self, problem: Problem) -> list[Config]:
        small, large = self._roles(problem)
        c, s = problem[large].shape[1], five_strides(problem[large])
        found: list[Config] = []
        forward = problem.op.name == "max_unpool_fwd"
        cells = 1 if forward and _cells(problem) else 0
        ways = ((1024, 4, 0), (2048, 8, 0), (512, 4, 0))
        if cells:
            ways = ((2048, 8, 1), (1024, 4, 1), (1024, 4, 0))
        for tile, warps, cell in ways:
            width = min(1 << (c - 1).bit_length(), 32) if c > 1 and s[1] < s[4] else 1
            points = math.prod(problem[small].shape[2:])
            along = max(1, min(tile // width, 1 << (points - 1).bit_length()))
            config = {"BLOCK_C": width, "BLOCK_T": along, "num_warps": warps, "num_stages": 1}
            if forward:
                steps = -(-points // along)
                config |= {"CELLS": cell, "num_stages": 3 if cell and steps > 3 else 1}
            if config not in found:
                found.append(config)
        return found

    def _programs(self, problem: Problem, config: Config) -> int:
        """Programs of the forward kernel: so many that their notes stay in the cache, at least one a processor.

        Cells need none of the notes as a rule, so then memory is what is spared.
        """
        notes = 4 * config["BLOCK_C"] * math.prod(problem["y"].shape[2:])
        processors = problem.target.processors
        least = 2 * processors if config["CELLS"] else processors
        most = max(least, min(8 * processors, (24 << 20) // notes))
        return min(self._units(problem, config["BLOCK_C"]), most)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.op.name != "max_unpool_fwd":
            return 0
        return 4 * self._programs(problem, config) * config["BLOCK_C"] * math.prod(problem["y"].shape[2:])

    def cost(self, problem: Problem, config: Config) -> float:
        if problem.op.name == "max_unpool_bwd":
            return roofline(problem, flops=0.0, memory_efficiency=0.7)
        busy = min(1.0, self._programs(problem, config) / problem.target.processors)
        return roofline(problem, flops=0.0, memory_efficiency=(0.75 if config["CELLS"] else 0.4) * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        small, large = self._roles(problem)
        sizes = {"X": three(problem[small].shape[2:], 1), "Y": three(problem[large].shape[2:], 1)}
        width, along = config["BLOCK_C"], config["BLOCK_T"]
        values, points = math.prod(sizes["X"]), math.prod(sizes["Y"])
        args: dict[str, Argument] = {"C": problem["index"].shape[1], "POINTS": points, "VALUES": values}
        for name, (_, h, w) in sizes.items():
            for axis, size in (("H", h), ("W", w)):
                args[name + axis] = size
                key = (name + axis).lower()
                args[f"{key}_mul"], args[f"{key}_shift"] = reciprocal(size)
        constexprs: dict[str, Any] = {"BLOCK_C": width, "BLOCK_T": along}
        for name, role, plane in (("X", small, "X"), ("I", "index", "X"), ("Y", large, "Y")):
            s, (d, h, w) = five_strides(problem[role]), sizes[plane]
            args |= {f"{name.lower()}_{axis}_stride": step for axis, step in zip("ncdhw", s, strict=True)}
            args[role] = role
            constexprs[f"{name}_FLAT"] = (h == 1 or s[3] == w * s[4]) and (d == 1 or s[2] == h * w * s[4])
        units = self._units(problem, width)
        forward = problem.op.name == "max_unpool_fwd"
        programs = self._programs(problem, config) if forward else units * -(-values // along)
        noted = programs * width * points if forward else 0
        edge = 2 * (width + along)
        spans = (t.span for _, t in problem.items)
        constexprs["WIDE"] = max(noted, units + edge, points + edge, values + edge, *spans) >= 2**31 - edge
        if forward:
            cell = _cells(problem) if config["CELLS"] else (0, 0, 0)
            constexprs |= dict(zip(("CELL_D", "CELL_H", "CELL_W"), cell, strict=True))
            constexprs |= {"PAIRS": cell[2] == 2 and args["y_w_stride"] == 1, "STAGES": config["num_stages"]}
            args |= {"notes": Slice(0, "i32"), "UNITS": units}
        kernel = max_unpool_fwd if forward else max_unpool_bwd
        return [Launch(kernel, (programs,), args, constexprs, config["num_warps"], 1)]


def _cells(problem: Problem) -> tuple[int, ...]:
    """How many times as large as x y is along D, H and W; nothing where that is no whole number, or a large one."""
    sizes = [three(problem[role].shape[2:], 1) for role in "xy"]
    whole = all(b % a == 0 for a, b in zip(*sizes, strict=True))
    times = tuple(b // a for a, b in zip(*sizes, strict=True))
    return times if whole and math.prod(times) <= 16 else ()
