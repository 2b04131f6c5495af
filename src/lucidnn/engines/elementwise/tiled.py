"""``elementwise.tiled``: the modes on a GPU, any types, broadcasting and strides, in Triton.

Method: the axes are merged first (``_loops.py``); a tile has lanes along the loop that is innermost in y and rows over
the others, which alone pay divisions. The mode is a constant of the kernel. Floating-point values are computed in
float32, or float64 where a tensor has that type; a power of float32 goes through float64. Whole numbers are 64-bit.

Cost: the memory traffic; every tensor is read or written once. Limits: four loops beside the lanes after merging; a
remainder only of whole quotients that float64 holds (float16), powers but of float64.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import MODES, TYPES, WHOLE
from .._triton.epilogue import convert
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, TritonEngine
from .._triton.loops import NEST, indices, nest_arguments, offset, stride_arguments
from ._loops import INDEX, Loops
from ._stores import LIMITS, cut_of, exact, store

LOADED = ("x", "b", "t", "z")


@triton.jit
def _scaled(v, factor):
    r = v
    if factor is not None:
        r = v * factor
    return r


@triton.jit
def _truth(v):
    return tl.where(v, 1.0, 0.0)


@triton.jit
def _two(x, b, t, lower, upper, slope, MODE: tl.constexpr):
    """Modes that read two tensors or three, by the codes of `lucidnn.ops.elementwise`."""
    if MODE == 1:
        r = x + b
    elif MODE == 2:
        r = x + b * b
    elif MODE == 3:
        r = x - b
    elif MODE == 4:
        r = x * b
    elif MODE == 5:
        r = x / b
    elif MODE == 6:
        r = tl.where((x < b) | (x != x), x, b)
    elif MODE == 7:
        r = tl.where((x > b) | (x != x), x, b)
    elif MODE == 8:
        p = x.to(tl.float64)
        q = tl.abs(b.to(tl.float64))
        whole = tl.floor(tl.abs(p) / q)
        rest = tl.abs(p) - whole * q
        rest = tl.where(rest < 0, rest + q, rest)
        rest = tl.where(rest >= q, rest - q, rest)
        rest = tl.where((q == float("inf")) & (tl.abs(p) < float("inf")), tl.abs(p), rest)
        r = tl.where(p < 0, -rest, rest)
    elif MODE == 9:
        p = x.to(tl.float64)
        q = b.to(tl.float64)
        size = tl.exp(q * tl.log(tl.abs(p)))
        odd = (q == tl.floor(q)) & (tl.floor(q * 0.5) * 2.0 != q)
        negative = tl.where(q == tl.floor(q), tl.where(odd, -size, size), float("nan"))
        r = tl.where(p < 0, negative, size)
        r = tl.where((q == 0) | (p == 1), 1.0, r)
    elif MODE == 26:
        r = _truth((x != 0) & (b != 0))
    elif MODE == 27:
        r = _truth((x != 0) | (b != 0))
    elif MODE == 28:
        r = _truth(x == b)
    elif MODE == 29:
        r = _truth(x != b)
    elif MODE == 30:
        r = _truth(x > b)
    elif MODE == 31:
        r = _truth(x >= b)
    elif MODE == 32:
        r = _truth(x < b)
    elif MODE == 33:
        r = _truth(x <= b)
    elif MODE == 37:
        below = tl.zeros_like(x)
        if slope is not None:
            below = x * slope
        r = tl.where(b <= lower, below, x)
        r = tl.where(b >= upper, 0.0, r)
    else:
        tl.static_assert(MODE == 34, "unknown mode of two tensors")
        r = tl.where(t != 0, x, b)
    return r


@triton.jit
def _one(x, lower, upper, slope, MODE: tl.constexpr):
    if MODE == 0:
        r = x
    elif MODE == 10:
        r = tl.abs(x)
    elif MODE == 11:
        r = tl.ceil(x)
    elif MODE == 12:
        r = tl.floor(x)
    elif MODE == 13:
        r = 1.0 / tl.sqrt(x)
    elif MODE == 14:
        r = tl.sqrt(x)
    elif MODE == 15:
        r = tl.exp(x)
    elif MODE == 16:
        r = tl.log(x)
    elif MODE == 17:
        r = -x
    elif MODE == 18:
        r = tl.sin(x)
    elif MODE == 19:
        r = tl.cos(x)
    elif MODE == 20:
        r = tl.sin(x) / tl.cos(x)
    elif MODE == 21:
        r = tl.erf(x)
    elif MODE == 22:
        r = 1.0 / x
    elif MODE == 23:
        r = 1 - x
    elif MODE == 24:
        r = tl.where(x > upper, upper, x)
        r = tl.where(r < lower, lower, r)
    elif MODE == 36:
        below = tl.zeros_like(x) + lower
        if slope is not None:
            below = lower + (x - lower) * slope
        r = tl.where(x <= lower, below, x)
        r = tl.where(x >= upper, upper, r)
    else:
        tl.static_assert(MODE == 25, "unknown mode of one tensor")
        r = _truth(x == 0)
    return r


@triton.jit
def elementwise(
    x, b, t, z, y, alpha1, alpha2, beta, lower, upper, slope, low, high, ROWS, LANES,
    S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift,
    x_lane_stride, x0_stride, x1_stride, x2_stride, x3_stride,
    b_lane_stride, b0_stride, b1_stride, b2_stride, b3_stride,
    t_lane_stride, t0_stride, t1_stride, t2_stride, t3_stride,
    z_lane_stride, z0_stride, z1_stride, z2_stride, z3_stride,
    y_lane_stride, y0_stride, y1_stride, y2_stride, y3_stride,
    n_lane_stride, n0_stride, n1_stride, n2_stride, n3_stride,
    LOOPS: tl.constexpr, MODE: tl.constexpr, TYPE: tl.constexpr, CUT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    FORM: tl.constexpr = tl.int64 if TYPE == "i64" else (tl.float64 if TYPE == "f64" else tl.float32)
    lane_blocks = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // lane_blocks
    lane_block = tl.program_id(0) % lane_blocks
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = (lane_block * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    ok = (row < ROWS)[:, None] & (lane < LANES)
    i0, i1, i2, i3 = indices(row, S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift, LOOPS, WIDE)
    if MODE == 35:
        at = offset(i0, i1, i2, i3, n0_stride, n1_stride, n2_stride, n3_stride, LOOPS)[:, None] + lane * n_lane_stride
        r = at.to(tl.int64)
    else:
        at = offset(i0, i1, i2, i3, x0_stride, x1_stride, x2_stride, x3_stride, LOOPS)[:, None] + lane * x_lane_stride
        v = _scaled(exact(tl.load(x + at, mask=ok), FORM), alpha1)
        if b is not None:
            at = offset(i0, i1, i2, i3, b0_stride, b1_stride, b2_stride, b3_stride, LOOPS)[:, None]
            w = _scaled(exact(tl.load(b + (at + lane * b_lane_stride), mask=ok), FORM), alpha2)
            u = w
            if t is not None:
                at = offset(i0, i1, i2, i3, t0_stride, t1_stride, t2_stride, t3_stride, LOOPS)[:, None]
                u = tl.load(t + (at + lane * t_lane_stride), mask=ok)
                if u.dtype.is_floating():
                    u = convert(u, tl.float32 if u.dtype != tl.float64 else tl.float64)
                else:
                    u = u.to(tl.int64)
            r = _two(v, w, u, lower, upper, slope, MODE)
        else:
            r = _one(v, lower, upper, slope, MODE)
    if z is not None:
        at = offset(i0, i1, i2, i3, z0_stride, z1_stride, z2_stride, z3_stride, LOOPS)[:, None] + lane * z_lane_stride
        r = r + _scaled(exact(tl.load(z + at, mask=ok), FORM), beta)
    at = offset(i0, i1, i2, i3, y0_stride, y1_stride, y2_stride, y3_stride, LOOPS)[:, None] + lane * y_lane_stride
    store(y + at, r, ok, low, high, CUT)


class ElementwiseTiled(TritonEngine):
    name = "elementwise.tiled"
    operations = ("elementwise_fwd",)

    def refusals(self, problem: Problem) -> list[str]:
        op: Any = problem.op
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            axes = len(Loops.of(problem).sizes)
            r.require(axes <= NEST + 1, f"at most {NEST + 1} axes after merging those that are one run", axes)
        types = ", ".join(dict.fromkeys(problem[role].dtype for role in ("x", "b") if role in problem.tensors))
        r.require(op.mode != "mod" or types == "f16", "type f16 for mod", types)
        r.require(op.mode != "pow" or "f64" not in types, "types but f64 for pow", types)
        floats = not op.is_whole(problem.tensors)
        r.require(not (floats and problem["y"].dtype == "i64" and op.mode == "identity"), "y but of i64", "i64")
        whole = op.is_whole(problem.tensors)
        r.require(not (op.mode == "gen_index" and "z" in problem.inputs), "no z for gen_index", "z")
        fits = not whole or all(abs(f) < 2**24 for f in (op.alpha1, op.alpha2, problem.epilogue.beta))
        r.require(fits, "factors of whole numbers below 2^24", f"{op.alpha1}, {op.alpha2}, {problem.epilogue.beta}")
        return r

    def configs(self, problem: Problem) -> list[Config]:
        loops = Loops.of(problem)
        lanes = loops.sizes[-1]
        smallest = min(t.itemsize for _, t in problem.items)
        found: list[Config] = []
        for bytes, warps in ((4096, 4), (8192, 4), (16384, 8)):
            elements = bytes // smallest
            widest = min(triton.next_power_of_2(lanes), elements)
            blocks = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) if n <= widest]
            block = min(blocks, default=widest, key=lambda n: (-(-lanes // n) * n, -n))
            if lanes >= 4 * elements:
                block = elements
            height = max(1, min(elements // block, triton.next_power_of_2(loops.rows)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        loops = Loops.of(problem)
        tiles = -(-loops.rows // config["BLOCK_R"]) * -(-loops.sizes[-1] // config["BLOCK_L"])
        waste = tiles * config["BLOCK_R"] * config["BLOCK_L"] / max(problem["y"].numel, 1)
        # A step other than 1 between lanes moves a whole sector of 32 bytes an element.
        moved = 0.0
        for role, t in problem.items:
            moved += t.nbytes * (1 if loops.strides.get(role, (1,))[-1] <= 1 else 32 // t.itemsize)
        busy = min(1.0, tiles / problem.target.processors)
        efficiency = 0.85 * busy / max(1.0, waste**0.5)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        op: Any = problem.op
        loops, tensors = Loops.of(problem), problem.tensors
        wide = any(t.dtype == "f64" for t in tensors.values())
        whole = op.is_whole(tensors) and (op.mode != "identity" or tensors["y"].dtype in WHOLE)
        form = "i64" if whole else "f64" if wide or op.is_whole(tensors) else "f32"
        real = "f64" if form == "f64" else "f32"
        to = tensors["y"].dtype
        (low, high), cut = LIMITS.get(to, (0, 0)), cut_of(to)

        def factor(value: float) -> Argument:
            if value == 1.0:
                return None
            # An integer 1 would be a constant of another kind, and 1 is left out.
            return int(value) if form == "i64" else Real(value, real)

        clip, slope = op.mode in ("clip", "relu", "relu_bwd"), op.slope
        outer = loops.sizes[-2::-1]
        args: dict[str, Argument] = {
            **{role: role if role in loops.strides else None for role in LOADED}, "y": "y",
            "alpha1": factor(op.alpha1), "alpha2": factor(op.alpha2),
            "beta": factor(problem.epilogue.beta) if "z" in tensors else None,
            "lower": Real(op.lower, real) if clip else None, "upper": Real(op.upper, real) if clip else None,
            "slope": Real(slope, real) if slope else None,
            "low": Real(low, "f64") if cut == 1 else None, "high": Real(high, "f64") if cut == 1 else None,
            "ROWS": loops.rows, "LANES": loops.sizes[-1], **nest_arguments("s", outer),
        }  # fmt: skip
        for name, role in (*((role, role) for role in (*LOADED, "y")), ("n", INDEX)):
            strides = loops.strides.get(role)
            args[f"{name}_lane_stride"] = strides[-1] if strides else None
            args |= stride_arguments(name, strides[-2::-1] if strides else None)
        span = max(*(max(t.span, t.numel) for t in tensors.values()), 0)
        constexprs = {
            "LOOPS": len(outer), "MODE": MODES[op.mode].code, "TYPE": form, "CUT": cut,
            "WIDE": span + (1 << 16) > INT32, "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        grid = math.prod((-(-loops.rows // config["BLOCK_R"]), -(-loops.sizes[-1] // config["BLOCK_L"])))
        return [Launch(elementwise, (grid,), args, constexprs, config["num_warps"], 1)]
