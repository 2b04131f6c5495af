"""``pool.unpool_tiled``: max unpooling on a GPU, any strides and type, both directions, in Triton.

Method: forward has to let the last of several values for one place win, whatever runs first. A program owns a block of
planes of y (channels that lie closest together, or one plane), and notes in the workspace for every place of these the
number of the value that comes there: a maximum over numbers, which atomics give in any order. Then it writes every
place once, from the value noted there or zero. It goes on to the next block with the same notes, so that these stay in
the second-level cache and x, index and y pass memory once. Backward is a gather.

Cost: the memory traffic, and one atomic a value in the cache. Limits: planes below 2^31 points; an index of 32 or 64
bits.
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
def max_unpool_fwd(
    x, index, y, notes, UNITS, C, POINTS, VALUES, XH, XW, YH, YW,
    xh_mul, xh_shift, xw_mul, xw_shift, yh_mul, yh_shift, yw_mul, yw_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    X_FLAT: tl.constexpr, I_FLAT: tl.constexpr, Y_FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    lane = tl.arange(0, BLOCK_C)[None, :]
    step = tl.arange(0, BLOCK_T)
    own = tl.program_id(0)
    if WIDE:
        own = own.to(tl.int64)
        lane = lane.to(tl.int64)
        step = step.to(tl.int64)
    own_notes = notes + own * POINTS * BLOCK_C
    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):
        n, c = unit // blocks, (unit % blocks) * BLOCK_C
        if WIDE:
            n = n.to(tl.int64)
            c = c.to(tl.int64)
        channel = c + lane
        for start in range(0, POINTS, BLOCK_T):
            k = (start + step)[:, None]
            tl.store(own_notes + (k * BLOCK_C + lane), tl.full((BLOCK_T, BLOCK_C), -1, tl.int32), mask=k < POINTS)
        tl.debug_barrier()
        for start in range(0, VALUES, BLOCK_T):
            v = start + step
            mask = (v < VALUES)[:, None] & (channel < C)
            at = _at(v, XH, XW, xh_mul, xh_shift, xw_mul, xw_shift, i_d_stride, i_h_stride, i_w_stride, I_FLAT, WIDE)
            at = n * i_n_stride + channel * i_c_stride + at[:, None]
            k = tl.load(index + at, mask=mask, other=-1)
            mask = mask & (k >= 0) & (k < POINTS)
            number = tl.broadcast_to(v.to(tl.int32)[:, None], (BLOCK_T, BLOCK_C))
            tl.atomic_max(own_notes + (k * BLOCK_C + lane), number, mask=mask, sem="relaxed")
        tl.debug_barrier()
        for start in range(0, POINTS, BLOCK_T):
            k = start + step
            mask = (k < POINTS)[:, None] & (channel < C)
            # Past the first-level cache, which does not see what atomics write.
            v = tl.load(own_notes + (k[:, None] * BLOCK_C + lane), mask=mask, other=-1, cache_modifier=".cg")
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
        for tile, warps in ((1024, 4), (2048, 8), (512, 4)):
            width = min(1 << (c - 1).bit_length(), 32) if c > 1 and s[1] < s[4] else 1
            points = math.prod(problem[small].shape[2:])
            along = max(1, min(tile // width, 1 << (points - 1).bit_length()))
            config = {"BLOCK_C": width, "BLOCK_T": along, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def _programs(self, problem: Problem, config: Config) -> int:
        """Programs of the forward kernel: so many that their notes stay in the cache, at least one a processor."""
        points = math.prod(problem["y"].shape[2:])
        most = max(problem.target.processors, min(8 * problem.target.processors, (24 << 20) // (4 * points)))
        return min(self._units(problem, config["BLOCK_C"]), most)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.op.name != "max_unpool_fwd":
            return 0
        return 4 * self._programs(problem, config) * config["BLOCK_C"] * math.prod(problem["y"].shape[2:])

    def cost(self, problem: Problem, config: Config) -> float:
        if problem.op.name == "max_unpool_bwd":
            return roofline(problem, flops=0.0, memory_efficiency=0.7)
        busy = min(1.0, self._programs(problem, config) / problem.target.processors)
        return roofline(problem, flops=0.0, memory_efficiency=0.5 * busy)

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
            args |= {"notes": Slice(0, "i32"), "UNITS": units}
        kernel = max_unpool_fwd if forward else max_unpool_bwd
        return [Launch(kernel, (programs,), args, constexprs, config["num_warps"], config["num_stages"])]
