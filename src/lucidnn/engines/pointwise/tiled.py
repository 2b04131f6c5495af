"""``pointwise.tiled``: every elementwise problem on a GPU, any types, strides and activation, in Triton.

Method: axes are merged first (``_loops.py``), so dense tensors of one layout are one long run of memory. What is left
is a tile: lanes along the loop that is innermost in the output, rows over the others, which only the rows pay
divisions for. Arithmetic is in float32, or float64 where a tensor has that type. A bias that is the same for a whole
row or a whole column of the tile is read once for it.

Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: the memory traffic; every tensor is read or
written once. Limits: at most five loops after merging, which all tensors of up to five axes keep to.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .._triton.epilogue import activate_grad, convert, finish
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, TritonEngine
from .._triton.loops import indices, nest_arguments, offset
from ._loops import OUTPUT, Loops, code_of, merged

TYPES = ("f64", "f32", "f16", "bf16")
LOOPS = 5
_OUTPUT = tl.constexpr(OUTPUT)


@triton.jit
def _grad(v, dy, ACT: tl.constexpr, p):
    """`activate_grad`, of an output from `OUTPUT` on."""
    if ACT == _OUTPUT + 4:
        r = tl.where(v > 0, dy, dy * (v + p))
    elif ACT == _OUTPUT + 5:
        r = dy * (v * (1.0 - v))
    elif ACT == _OUTPUT + 6:
        r = dy * (1.0 - v * v)
    else:
        r = activate_grad(v, dy, ACT, p)
    return r


@triton.jit
def pointwise(
    x, z, bias, dy, out, alpha, beta, parameter, ROWS, LANES,
    S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift,
    x_stride, x_0_stride, x_1_stride, x_2_stride, x_3_stride,
    z_stride, z_0_stride, z_1_stride, z_2_stride, z_3_stride,
    b_stride, b_0_stride, b_1_stride, b_2_stride, b_3_stride,
    dy_stride, dy_0_stride, dy_1_stride, dy_2_stride, dy_3_stride,
    out_stride, out_0_stride, out_1_stride, out_2_stride, out_3_stride,
    OUTER: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, FLOAT64: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // grid_lanes
    lane_block = tl.program_id(0) % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    i0, i1, i2, i3 = indices(row, S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift, OUTER, WIDE)
    in_rows = (row < ROWS)[:, None]
    in_lanes = (lane < LANES)[None, :]
    ok = in_rows & in_lanes
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    rows = offset(i0, i1, i2, i3, x_0_stride, x_1_stride, x_2_stride, x_3_stride, OUTER)
    v = convert(tl.load(x + (rows[:, None] + (lane * x_stride)[None, :]), mask=ok, other=0.0), FLOAT)
    if GRAD:
        rows = offset(i0, i1, i2, i3, dy_0_stride, dy_1_stride, dy_2_stride, dy_3_stride, OUTER)
        g = convert(tl.load(dy + (rows[:, None] + (lane * dy_stride)[None, :]), mask=ok, other=0.0), FLOAT)
        r = _grad(v, g, ACT, parameter)
        if alpha is not None:
            r = r * alpha
    else:
        zz = None
        if z is not None:
            rows = offset(i0, i1, i2, i3, z_0_stride, z_1_stride, z_2_stride, z_3_stride, OUTER)
            zz = convert(tl.load(z + (rows[:, None] + (lane * z_stride)[None, :]), mask=ok, other=0.0), FLOAT)
        bb = None
        if bias is not None:
            rows = offset(i0, i1, i2, i3, b_0_stride, b_1_stride, b_2_stride, b_3_stride, OUTER)
            if BIAS == 0:  # one for a row
                bb = tl.load(bias + rows[:, None], mask=in_rows, other=0.0)
            elif BIAS == 1:  # one for a lane
                bb = tl.load(bias + (lane * b_stride)[None, :], mask=in_lanes, other=0.0)
            else:
                bb = tl.load(bias + (rows[:, None] + (lane * b_stride)[None, :]), mask=ok, other=0.0)
            bb = convert(bb, FLOAT)
        r = finish(v, zz, bb, alpha, beta, parameter, ACT)
    rows = offset(i0, i1, i2, i3, out_0_stride, out_1_stride, out_2_stride, out_3_stride, OUTER)
    tl.store(out + (rows[:, None] + (lane * out_stride)[None, :]), convert(r, out.dtype.element_ty), mask=ok)


class Tiled(TritonEngine):
    name = "pointwise.tiled"
    operations = ("pointwise_fwd", "pointwise_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            loops = merged(problem)
            axes = len(loops.sizes)
            r.require(axes <= LOOPS, f"at most {LOOPS} axes after merging those that are one run of memory", axes)
            tiles = min(math.prod(_grid(loops, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        loops = merged(problem)
        lanes = loops.sizes[-1]
        # Sixteen bytes a thread and access, some of them under way at once.
        smallest = min(t.itemsize for role, t in problem.items if role != "bias")
        found = []
        for elements, warps in ((4096 // smallest, 4), (8192 // smallest, 4), (16384 // smallest, 8)):
            widest = min(triton.next_power_of_2(lanes), elements)
            # The block of lanes that wastes least; of equals the widest.
            blocks = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= widest]
            block = min(blocks, default=widest, key=lambda n: (-(-lanes // n) * n, -n))
            if lanes >= 4 * elements:
                block = elements
            height = max(1, min(elements // block, triton.next_power_of_2(loops.rows)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        loops = merged(problem)
        tiles = math.prod(_grid(loops, config))
        tile = config["BLOCK_R"] * config["BLOCK_L"]
        waste = tiles * tile / (loops.rows * loops.sizes[-1])
        # A tensor whose steps along the lanes are not 1 moves a whole sector of 32 bytes an element.
        moved = sum(t.nbytes * (1 if loops.strides[role][-1] <= 1 else 32 // t.itemsize) for role, t in problem.items)
        busy = min(1.0, tiles / problem.target.processors)
        efficiency = 0.85 * busy / max(1.0, waste**0.5)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        loops = merged(problem)
        tensors, epilogue = problem.tensors, problem.epilogue
        lanes, outer = loops.sizes[-1], loops.sizes[-2::-1]
        wide_float = any(t.dtype == "f64" for t in tensors.values())
        real = "f64" if wide_float else "f32"
        activation = ACTIVATIONS[epilogue.activation]
        grad = problem.op.name == "pointwise_bwd"
        args: dict[str, Argument] = {
            "x": "x", "z": "z", "bias": "bias", "dy": "dy", "out": problem.outputs[0],
            "ROWS": loops.rows, "LANES": lanes,
            "alpha": None if epilogue.alpha == 1.0 else Real(epilogue.alpha, real),
            "beta": None if epilogue.beta in (0.0, 1.0) else Real(epilogue.beta, real),
            "parameter": None if activation.parameter is None else Real(epilogue.parameter, real),
        }  # fmt: skip
        args |= nest_arguments("s", outer)
        for name, role in (("x", "x"), ("z", "z"), ("b", "bias"), ("dy", "dy"), ("out", problem.outputs[0])):
            strides = loops.strides.get(role)
            args[f"{name}_stride"] = strides[-1] if strides else None
            for i in range(LOOPS - 1):
                args[f"{name}_{i}_stride"] = strides[-2 - i] if strides and i < len(outer) else None
        bias = loops.strides.get("bias", (0,))
        edge = config["BLOCK_R"] + config["BLOCK_L"]
        widest = max(loops.rows + edge, lanes + edge, *(t.span for t in tensors.values()))
        constexprs = {
            "OUTER": len(outer), "BIAS": 0 if bias[-1] == 0 else 1 if not any(bias[:-1]) else 2,
            "ACT": code_of(problem), "GRAD": grad, "FLOAT64": wide_float, "WIDE": widest > INT32,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        grid = (math.prod(_grid(loops, config)),)
        return [Launch(pointwise, grid, args, constexprs, config["num_warps"], config["num_stages"])]


def _grid(loops: Loops, config: Config) -> tuple[int, int]:
    return -(-loops.rows // config["BLOCK_R"]), -(-loops.sizes[-1] // config["BLOCK_L"])
