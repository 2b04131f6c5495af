"""Bias gradient, db[k] = sum of dy over batch and space, in Triton: two steps, the same result from run to run.

Each block of the first step sums some channels over a part of the pixels, in float32 (float64 for float64), along
whichever axis is contiguous; the second step adds the parts in a fixed order.  With few pixels there is one part and
no second step. Any strides; 64-bit offsets where dy reaches past 2^31 elements.  Cost: dy is read once, and that is
all there is to it.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32, columns, divide, pixels_first, reciprocal, rows
from .._triton.launch import Launch, Slice, TritonEngine

DTYPES = ("f64", "f32", "f16", "bf16")
MOST_PARTS = 1024


@triton.jit
def conv_bias_grad(
    dy, out, PIXELS, O, P, Q, K, TRIPS, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    dy_n_stride, dy_k_stride, dy_d_stride, dy_h_stride, dy_w_stride, out_part_stride, out_k_stride,
    HAS_D: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    grid_k = tl.cdiv(K, BLOCK_C)
    tile_k = tl.program_id(0) % grid_k
    part = tl.program_id(0) // grid_k
    k = tile_k * BLOCK_C + tl.arange(0, BLOCK_C)
    start = part * TRIPS
    if WIDE:
        k = k.to(tl.int64)
        start = start.to(tl.int64)
    dy_columns = columns(dy + k * dy_k_stride, TURNED)
    ok_columns = columns(k < K, TURNED)
    ACC: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((BLOCK_C, BLOCK_P) if TURNED else (BLOCK_P, BLOCK_C), dtype=ACC)
    trips = tl.minimum(TRIPS, tl.cdiv(PIXELS, BLOCK_P) - start).to(tl.int32)
    for trip in range(trips):
        m = (start + trip) * BLOCK_P + tl.arange(0, BLOCK_P)
        if WIDE:
            line = m // Q
            plane = line // P
        else:
            line = divide(m, q_mul, q_shift)
            plane = divide(line, p_mul, p_shift)
        shift = (m - line * Q) * dy_w_stride + (line - plane * P) * dy_h_stride
        if HAS_D:
            if WIDE:
                image = plane // O
            else:
                image = divide(plane, o_mul, o_shift)
            shift += image * dy_n_stride + (plane - image * O) * dy_d_stride
        else:
            shift += plane * dy_n_stride
        ok = rows(m < PIXELS, TURNED) & ok_columns
        acc += tl.load(dy_columns + rows(shift, TURNED), mask=ok, other=0.0).to(ACC)
    total = tl.sum(acc, axis=1 if TURNED else 0)
    tl.store(out + part * out_part_stride + k * out_k_stride, total.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def conv_bias_grad_sum(parts, db, PARTS, K, db_stride, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK_S, BLOCK), dtype=parts.dtype.element_ty)
    for first in range(0, PARTS, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        ok = (part < PARTS)[:, None] & (k < K)[None, :]
        acc += tl.load(parts + part[:, None] * K + k[None, :], mask=ok, other=0.0)
    tl.store(db + k * db_stride, tl.sum(acc, axis=0).to(db.dtype.element_ty), mask=k < K)


class _View(NamedTuple):
    n: int
    k: int
    size: tuple[int, int, int]
    strides: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, problem: Problem) -> "_View":
        dy = problem["dy"]
        missing = 5 - dy.ndim
        size = (1,) * missing + dy.shape[2:]
        strides = (*dy.strides[:2], *(0,) * missing, *dy.strides[2:])
        return cls(dy.shape[0], dy.shape[1], size, strides)

    @property
    def pixels(self) -> int:
        return self.n * math.prod(self.size)

    def trips(self, config: Config) -> int:
        return -(-self.steps(config) // config["SPLIT_K"])

    def parts(self, config: Config) -> int:
        return -(-self.steps(config) // self.trips(config))

    def steps(self, config: Config) -> int:
        return -(-self.pixels // config["BLOCK_P"])


class BiasGradTriton(TritonEngine):
    """Sum over batch and space."""

    name = "conv.bias_grad_triton"
    operations = ("conv_bgrad",)

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        view = _View.of(problem)
        found = []
        for elements in (2048, 4096):
            if pixels_first(view.strides, view.k):
                pixels = min(elements, max(32, triton.next_power_of_2(view.size[1] * view.size[2])))
                channels = min(elements // pixels, triton.next_power_of_2(view.k))
            else:
                channels = min(128, triton.next_power_of_2(view.k))
                pixels = elements // channels
            config = {"BLOCK_P": pixels, "BLOCK_C": channels, "num_warps": 4, "num_stages": 2}
            blocks = -(-view.k // channels)
            split = min(4 * problem.target.processors // blocks, view.steps({**config}) // 4, MOST_PARTS)
            config["SPLIT_K"] = max(split, 1)
            if config not in found:
                found.append(config)
        return found

    def workspace_size(self, problem: Problem, config: Config) -> int:
        view = _View.of(problem)
        parts = view.parts(config)
        return 0 if parts == 1 else parts * view.k * (8 if problem["dy"].dtype == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        view = _View.of(problem)
        parts = view.parts(config)
        blocks = parts * -(-view.k // config["BLOCK_C"])
        busy = min(1.0, blocks / problem.target.processors)
        return roofline(problem, memory_efficiency=0.8 * busy, launches=1 if parts == 1 else 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v = _View.of(problem)
        parts = v.parts(config)
        part_type = "f64" if problem["dy"].dtype == "f64" else "f32"
        db_stride = problem["db"].strides[0]
        args = {
            "dy": "dy", "out": "db" if parts == 1 else Slice(0, part_type),
            "PIXELS": v.pixels, "K": v.k, "TRIPS": v.trips(config), **dict(zip("OPQ", v.size)),
            **{f"dy_{axis}_stride": stride for axis, stride in zip("nkdhw", v.strides)},
            "out_part_stride": v.k, "out_k_stride": db_stride if parts == 1 else 1,
        }  # fmt: skip
        for axis, size in zip("opq", v.size):
            args[f"{axis}_mul"], args[f"{axis}_shift"] = reciprocal(size)
        constexprs = {
            "HAS_D": v.size[0] > 1, "TURNED": pixels_first(v.strides, v.k),
            "WIDE": problem["dy"].span > INT32 or v.pixels + config["BLOCK_P"] > INT32,
            "BLOCK_P": config["BLOCK_P"], "BLOCK_C": config["BLOCK_C"],
        }  # fmt: skip
        grid = (-(-v.k // config["BLOCK_C"]) * parts,)
        found = [Launch(conv_bias_grad, grid, args, constexprs, config["num_warps"], config["num_stages"])]
        if parts > 1:
            block_s = min(triton.next_power_of_2(parts), 64)
            block = min(triton.next_power_of_2(v.k), 2048 // block_s)
            args = {"parts": Slice(0, part_type), "db": "db", "PARTS": parts, "K": v.k, "db_stride": db_stride}
            grid = (-(-v.k // block),)
            found.append(Launch(conv_bias_grad_sum, grid, args, {"BLOCK_S": block_s, "BLOCK": block}, 4, 2))
        return found
