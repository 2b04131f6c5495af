"""``fold.copies_tiled``: shuffles of channels and pixels on a GPU, any strides and types, in Triton.

Method: a program takes a tile. Its lanes are the innermost loops of the result, as many as it takes for enough
neighbours in memory; its rows are the others. Where an element comes from is the sum of a number for its row and one
for its lane, so that the divisions are paid once a row and once a lane. Cost: the memory traffic.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.folding import Loop, loops
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine

TYPES = ("f64", "f32", "f16", "bf16")
INNER, OUTER = 3, 6  # most loops of lanes, of rows
ENOUGH = 128  # lanes


@triton.jit
def _next(rest, x_stride, y_stride, SIZE, multiplier, shift, WIDE: tl.constexpr):
    """What is left after a loop, and how far its turn leads in x and in y."""
    quotient, turn = split(rest, SIZE, multiplier, shift, WIDE)
    return quotient, turn * x_stride, turn * y_stride


@triton.jit
def shuffle_copy(
    x, y, ROWS, LANES,
    l0_size, l0_mul, l0_shift, l0_x_stride, l0_y_stride,
    l1_size, l1_mul, l1_shift, l1_x_stride, l1_y_stride,
    l2_x_stride, l2_y_stride,
    r0_size, r0_mul, r0_shift, r0_x_stride, r0_y_stride,
    r1_size, r1_mul, r1_shift, r1_x_stride, r1_y_stride,
    r2_size, r2_mul, r2_shift, r2_x_stride, r2_y_stride,
    r3_size, r3_mul, r3_shift, r3_x_stride, r3_y_stride,
    r4_size, r4_mul, r4_shift, r4_x_stride, r4_y_stride,
    r5_x_stride, r5_y_stride,
    LANE_LOOPS: tl.constexpr, ROW_LOOPS: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // grid_lanes
    lane_block = tl.program_id(0) % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    # ---- lanes: the innermost loop is l0, the outermost takes what is left
    left = lane
    lane_x = lane * 0
    lane_y = lane * 0
    if LANE_LOOPS > 1:
        left, in_x, in_y = _next(left, l0_x_stride, l0_y_stride, l0_size, l0_mul, l0_shift, WIDE)
        lane_x += in_x
        lane_y += in_y
    if LANE_LOOPS > 2:
        left, in_x, in_y = _next(left, l1_x_stride, l1_y_stride, l1_size, l1_mul, l1_shift, WIDE)
        lane_x += in_x
        lane_y += in_y
    lane_x += left * l2_x_stride
    lane_y += left * l2_y_stride
    if DENSE:
        lane_y = lane
    # ---- rows
    rest = row
    row_x = row * 0
    row_y = row * 0
    if ROW_LOOPS > 1:
        rest, in_x, in_y = _next(rest, r0_x_stride, r0_y_stride, r0_size, r0_mul, r0_shift, WIDE)
        row_x += in_x
        row_y += in_y
    if ROW_LOOPS > 2:
        rest, in_x, in_y = _next(rest, r1_x_stride, r1_y_stride, r1_size, r1_mul, r1_shift, WIDE)
        row_x += in_x
        row_y += in_y
    if ROW_LOOPS > 3:
        rest, in_x, in_y = _next(rest, r2_x_stride, r2_y_stride, r2_size, r2_mul, r2_shift, WIDE)
        row_x += in_x
        row_y += in_y
    if ROW_LOOPS > 4:
        rest, in_x, in_y = _next(rest, r3_x_stride, r3_y_stride, r3_size, r3_mul, r3_shift, WIDE)
        row_x += in_x
        row_y += in_y
    if ROW_LOOPS > 5:
        rest, in_x, in_y = _next(rest, r4_x_stride, r4_y_stride, r4_size, r4_mul, r4_shift, WIDE)
        row_x += in_x
        row_y += in_y
    row_x += rest * r5_x_stride
    row_y += rest * r5_y_stride
    ok = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    v = tl.load(x + (row_x[:, None] + lane_x[None, :]), mask=ok, other=0.0)
    tl.store(y + (row_y[:, None] + lane_y[None, :]), v, mask=ok)


def _halves(problem: Problem) -> tuple[list[Loop], list[Loop], bool]:
    """Loops of the rows and of the lanes, innermost first, and whether the lanes are one run of the result."""
    found = loops(problem)[::-1]
    count = 1
    while count < min(INNER, len(found)) and math.prod(one.size for one in found[:count]) < ENOUGH:
        count += 1
    lanes, rows = found[:count], found[count:] or [Loop(1, 0, 0)]
    step, dense = 1, True
    for one in lanes:
        dense = dense and one.y == step
        step *= one.size
    return rows, lanes, dense


class CopiesTiled(TritonEngine):
    name = "fold.copies_tiled"
    operations = ("shuffle",)

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            tiles = min(self._tiles(problem, c) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        rows, lanes, _ = _halves(problem)
        count, width = math.prod(one.size for one in rows), math.prod(one.size for one in lanes)
        widest = min(triton.next_power_of_2(width), 1024)
        fitting = (n for n in (16, 32, 64, 128, 256, 512, 1024) if n <= widest)
        block = min(fitting, default=widest, key=lambda n: -(-width // n) * (n + 16))
        found = []
        for elements, warps in ((2048, 4), (1024, 4), (4096, 8)):
            height = max(1, min(elements // block, triton.next_power_of_2(count)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def _tiles(self, problem: Problem, config: Config) -> int:
        rows, lanes, _ = _halves(problem)
        count, width = math.prod(one.size for one in rows), math.prod(one.size for one in lanes)
        return -(-count // config["BLOCK_R"]) * -(-width // config["BLOCK_L"])

    def cost(self, problem: Problem, config: Config) -> float:
        busy = min(1.0, self._tiles(problem, config) / problem.target.processors)
        return roofline(problem, flops=0.0, memory_efficiency=0.75 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        rows, lanes, dense = _halves(problem)
        count, width = math.prod(one.size for one in rows), math.prod(one.size for one in lanes)
        args: dict[str, Argument] = {"x": "x", "y": "y", "ROWS": count, "LANES": width}
        for name, found, most in (("l", lanes, INNER), ("r", rows, OUTER)):
            for i in range(most - 1):  # the outermost loop is the last parameter, and needs no size
                one = found[i] if i < len(found) - 1 else None
                args[f"{name}{i}_size"] = one.size if one else None
                args[f"{name}{i}_mul"], args[f"{name}{i}_shift"] = reciprocal(one.size) if one else (None, None)
                args[f"{name}{i}_x_stride"], args[f"{name}{i}_y_stride"] = (one.x, one.y) if one else (None, None)
            last = found[-1]
            args[f"{name}{most - 1}_x_stride"], args[f"{name}{most - 1}_y_stride"] = last.x, last.y
        edge = config["BLOCK_R"] + config["BLOCK_L"]
        widest = max(count + edge, width + edge, *(t.span for _, t in problem.items))
        constexprs = {
            "LANE_LOOPS": len(lanes), "ROW_LOOPS": len(rows), "DENSE": dense, "WIDE": widest > INT32,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        grid = (self._tiles(problem, config),)
        return [Launch(shuffle_copy, grid, args, constexprs, config["num_warps"], config["num_stages"])]
