"""``resample.tiled``: resampling on a GPU, every mode, stride and type, both directions, in Triton.

Method: a program takes a tile of outputs: pixels of several channels where W is innermost in memory, channels of
several pixels where C is. What depends on the pixel only is worked out once for all its channels: where it starts to
read along each axis, and with which weights. Both come from small tables (`lucidnn.ops._axis_map`) that stay in the
first-level cache. The gradient is the same with the transposed tables: each dx gathers, is written once and summed in
one order in float32 (float64 for float64), without atomics. A weight of 0 takes no part: what is there is not read.

Cost: the memory traffic; (taps along D) x (along H) x (along W) reads an output, of which the neighbours' come from
the first-level cache. Offsets are 64-bit where a tensor reaches past 2^31 elements.
"""

import math
from typing import Any

import numpy as np
import triton
import triton.language as tl

from ...core.engine import Config, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.resampling import Resampling
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine
from .._triton.tables import NOWHERE, Addresses, TabledProgram

TYPES = ("f64", "f32", "f16", "bf16")
UNROLLED = 32  # taps up to which the loops over them are written out


@triton.jit
def _weight(table, place, tap, SIZE, ok, PICK: tl.constexpr):
    """The weights of one tap for several places of an axis; a map that only picks has none to read."""
    if PICK:
        w = tl.where(ok, 1.0, 0.0).to(table.dtype.element_ty)
    else:
        w = tl.load(table + tap * SIZE + place, mask=ok, other=0.0)
    return w


@triton.jit
def resample(
    source, result, starts, weights, ROWS, LANES, C, O, P, Q,
    c_mul, c_shift, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    TAPS_D: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    PICK_D: tl.constexpr, PICK_H: tl.constexpr, PICK_W: tl.constexpr,
    PIXELS: tl.constexpr, DENSE: tl.constexpr, HAS_D: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    pid = tl.program_id(0)
    row_block = pid // grid_lanes
    lane_block = pid % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    # ---- pixels as lanes: rows are (n, c), lanes (o, p, q); channels as lanes: rows are (n, o, p, q), lanes c
    pixel = lane if PIXELS else row
    ok = lane < LANES if PIXELS else row < ROWS
    rest, q = split(pixel, Q, q_mul, q_shift, WIDE)
    n, p = split(rest, P, p_mul, p_shift, WIDE)
    o = n * 0
    if HAS_D:
        n, o = split(n, O, o_mul, o_shift, WIDE)
    # ---- the tables of the axes, one behind another
    first_d = starts.to(tl.pointer_type(tl.int32))
    first_h = first_d + O
    first_w = first_h + P
    weight_d = weights.to(tl.pointer_type(SUM))
    weight_h = weight_d + TAPS_D * O
    weight_w = weight_h + TAPS_H * P
    from_h = tl.load(first_h + p, mask=ok, other=0)
    from_w = tl.load(first_w + q, mask=ok, other=0)
    if WIDE:
        from_h = from_h.to(tl.int64)
        from_w = from_w.to(tl.int64)
    at_x = from_h * x_h_stride + from_w * x_w_stride
    at_y = p * y_h_stride + q * y_w_stride
    if HAS_D:
        from_d = tl.load(first_d + o, mask=ok, other=0)
        if WIDE:
            from_d = from_d.to(tl.int64)
        at_x += from_d * x_d_stride
        at_y += o * y_d_stride
    if PIXELS:
        image, c = split(row, C, c_mul, c_shift, WIDE)
        if DENSE:
            at_y = lane
        base = source + ((image * x_n_stride + c * x_c_stride)[:, None] + at_x[None, :])
        to = result + ((image * y_n_stride + c * y_c_stride)[:, None] + at_y[None, :])
        exists = (row < ROWS)[:, None] & ok[None, :]
    else:
        base = source + ((n * x_n_stride + at_x)[:, None] + (lane * x_c_stride)[None, :])
        to = result + ((n * y_n_stride + at_y)[:, None] + (lane * y_c_stride)[None, :])
        exists = ok[:, None] & (lane < LANES)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_L), SUM)
    if PICK_D and PICK_H and PICK_W:
        total = tl.load(base, mask=exists, other=0.0).to(SUM)
    elif UNROLL:
        for i in tl.static_range(TAPS_D):
            for j in tl.static_range(TAPS_H):
                w_row = _weight(weight_h, p, j, P, ok, PICK_H)
                if HAS_D:
                    w_row *= _weight(weight_d, o, i, O, ok, PICK_D)
                for k in tl.static_range(TAPS_W):
                    w = w_row * _weight(weight_w, q, k, Q, ok, PICK_W)
                    jump = j * x_h_stride + k * x_w_stride
                    if HAS_D:
                        jump += i * x_d_stride
                    w = w[None, :] if PIXELS else w[:, None]
                    total += tl.load(base + jump, mask=exists & (w != 0), other=0.0).to(SUM) * w
    else:
        for tap in range(TAPS_D * TAPS_H * TAPS_W):
            k = tap % TAPS_W
            j = tap // TAPS_W % TAPS_H
            i = tap // (TAPS_W * TAPS_H)
            w = _weight(weight_h, p, j, P, ok, PICK_H) * _weight(weight_w, q, k, Q, ok, PICK_W)
            jump = j * x_h_stride + k * x_w_stride
            if HAS_D:
                w *= _weight(weight_d, o, i, O, ok, PICK_D)
                jump += i * x_d_stride
            w = w[None, :] if PIXELS else w[:, None]
            total += tl.load(base + jump, mask=exists & (w != 0), other=0.0).to(SUM) * w
    tl.store(to, total.to(result.dtype.element_ty), mask=exists)


class Tiled(TritonEngine):
    name = "resample.tiled"
    operations = ("resample_fwd", "resample_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        if not r and not problem.is_empty:
            tiles = min(math.prod(_grid(problem, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        if problem.is_empty:
            return [{"BLOCK_R": 1, "BLOCK_L": 16, "num_warps": 4, "num_stages": 1}]
        rows, lanes, _ = _shape(problem)
        widest = min(triton.next_power_of_2(lanes), 256)
        # The block of lanes that wastes least, with a price for narrow ones: their accesses are short.
        block = min(
            (n for n in (16, 32, 64, 128, 256) if n <= widest), default=widest, key=lambda n: -(-lanes // n) * (n + 16)
        )
        found = []
        for elements, warps in ((1024, 4), (2048, 4), (512, 4), (2048, 8)):
            height = max(1, min(elements // block, triton.next_power_of_2(rows)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        if problem.is_empty:
            return roofline(problem, flops=0.0)
        rows, lanes, pixels = _shape(problem)
        taps = math.prod(m.taps for m in Resampling.of(problem).maps)
        tiles = math.prod(_grid(problem, config))
        waste = tiles * config["BLOCK_R"] * config["BLOCK_L"] / (rows * lanes)
        busy = min(1.0, tiles / problem.target.processors)
        # A tap costs a load from the first-level cache; with pixels as lanes each thread reads single elements.
        each = problem.items[0][1].itemsize * (0.05 if not pixels else 0.15)
        moved = problem.bytes + each * waste * taps * rows * lanes
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.85 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        if problem.is_empty:  # then the result is, too: neither of its spatial sizes may be 0
            return []
        return self._launches(problem, config, {"starts": NOWHERE, "weights": NOWHERE})

    def build(self, problem: Problem, config: Config) -> Run:
        if problem.is_empty:
            return super().build(problem, config)
        maps = Resampling.of(problem).maps
        real = np.float64 if problem.items[0][1].dtype == "f64" else np.float32
        tables = {
            "starts": np.concatenate([m.first for m in maps]).astype(np.int32),
            "weights": np.concatenate([m.weights.T.ravel() for m in maps]).astype(real),
        }
        return TabledProgram(problem, tables, lambda addresses: self._launches(problem, config, addresses))

    def _launches(self, problem: Problem, config: Config, addresses: Addresses) -> list[Launch]:
        r = Resampling.of(problem)
        rows, lanes, pixels = _shape(problem)
        (source, _), (result, _) = problem.items
        sizes = dict(zip("COPQ", (r.C, *r.out_size), strict=True))
        args: dict[str, Argument] = {"source": source, "result": result, "ROWS": rows, "LANES": lanes}
        args |= {**addresses, **sizes}
        for name, size in sizes.items():
            args[f"{name.lower()}_mul"], args[f"{name.lower()}_shift"] = reciprocal(size)
        for name, strides in (("x", r.in_strides), ("y", r.out_strides)):
            args |= {f"{name}_{axis}_stride": s for axis, s in zip("ncdhw", strides, strict=True)}
        constexprs: dict[str, Any] = {}
        for axis, m in zip("DHW", r.maps, strict=True):
            constexprs |= {f"TAPS_{axis}": m.taps, f"PICK_{axis}": m.is_pick}
        edge = config["BLOCK_R"] + config["BLOCK_L"]
        reach = [sum(s * m.taps for s, m in zip(r.in_strides[2:], r.maps, strict=True)) + r.source.span, r.result.span]
        d, h, w = r.out_strides[2:]
        _, p, q = r.out_size
        dense = w == 1 and (p == 1 or h == q) and (r.out_size[0] == 1 or d == p * q)
        constexprs |= {
            "PIXELS": pixels, "DENSE": dense, "HAS_D": r.in_size[0] > 1 or r.out_size[0] > 1,
            "UNROLL": math.prod(m.taps for m in r.maps) <= UNROLLED,
            "WIDE": max(rows + edge, lanes + edge, *reach) > INT32,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        grid = (math.prod(_grid(problem, config)),)
        return [Launch(resample, grid, args, constexprs, config["num_warps"], config["num_stages"])]


def _shape(problem: Problem) -> tuple[int, int, bool]:
    """Rows and lanes of the whole problem, and whether lanes are pixels."""
    r = Resampling.of(problem)
    pixels = math.prod(r.out_size)
    if r.lanes_are_columns:
        return r.N * r.C, pixels, True
    return r.N * pixels, r.C, False


def _grid(problem: Problem, config: Config) -> tuple[int, int]:
    rows, lanes, _ = _shape(problem)
    return -(-rows // config["BLOCK_R"]), -(-lanes // config["BLOCK_L"])
