"""``fold.windows_tiled``: windows of images as columns, and columns added up, on a GPU, any strides, in Triton.

Method: a program takes a tile of the result. Forward its rows are (image, channel, window point) and its lanes the
windows; backward its rows are (image, channel), its lanes pixels, and each pixel asks every point of the window which
column has it there. So every element is written once and summed in one order, in float32 (float64 for float64),
without atomics. Cost: the memory traffic of the columns; of an image, what its rows share comes from the caches.
"""

from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, TritonEngine

TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def unfold_windows(
    x, y, ROWS, LANES, C, H, W, Q,
    x_n_stride, x_c_stride, x_h_stride, x_w_stride, y_n_stride, y_k_stride, y_l_stride,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
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
    s = row % S
    r = row // S % R
    c = row // (S * R) % C
    n = row // (S * R) // C
    down = r * DILATION_H - PAD_H
    right = s * DILATION_W - PAD_W
    p = lane // Q
    q = lane - p * Q
    h = (p * STRIDE_H)[None, :] + down[:, None]
    w = (q * STRIDE_W)[None, :] + right[:, None]
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    inside = exists & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    row_x = n * x_n_stride + c * x_c_stride + down * x_h_stride + right * x_w_stride
    lane_x = p * STRIDE_H * x_h_stride + q * STRIDE_W * x_w_stride
    v = tl.load(x + (row_x[:, None] + lane_x[None, :]), mask=inside, other=0.0)
    k = (c * R + r) * S + s
    row_y = n * y_n_stride + k * y_k_stride
    tl.store(y + (row_y[:, None] + (lane * y_l_stride)[None, :]), v, mask=exists)


@triton.jit
def fold_windows(
    dy, dx, ROWS, LANES, C, W, P, Q,
    x_n_stride, x_c_stride, x_h_stride, x_w_stride, y_n_stride, y_k_stride, y_l_stride,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // grid_lanes
    lane_block = tl.program_id(0) % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    n = row // C
    c = row - n * C
    h = lane // W
    w = lane - h * W
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    base = dy + (n * y_n_stride + c * (R * S) * y_k_stride)[:, None]
    total = tl.zeros((BLOCK_R, BLOCK_L), SUM)
    for point in range(R * S):
        from_h = h + PAD_H - point // S * DILATION_H
        from_w = w + PAD_W - point % S * DILATION_W
        p = from_h // STRIDE_H
        q = from_w // STRIDE_W
        ok = (from_h >= 0) & (from_w >= 0) & (p * STRIDE_H == from_h) & (q * STRIDE_W == from_w) & (p < P) & (q < Q)
        at = base + (point * y_k_stride + (p * Q + q) * y_l_stride)[None, :]
        total += tl.load(at, mask=exists & ok[None, :], other=0.0).to(SUM)
    row_x = n * x_n_stride + c * x_c_stride
    lane_x = h * x_h_stride + w * x_w_stride
    tl.store(dx + (row_x[:, None] + lane_x[None, :]), total.to(dx.dtype.element_ty), mask=exists)


def _shape(problem: Problem) -> tuple[int, int]:
    """Rows and lanes of the whole problem."""
    if problem.op.name == "unfold_fwd":
        n, k, blocks = problem["y"].shape
        return n * k, blocks
    n, c, h, w = problem["dx"].shape
    return n * c, h * w


class WindowsTiled(TritonEngine):
    name = "fold.windows_tiled"
    operations = ("unfold_fwd", "unfold_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            tiles = min(self._tiles(problem, c) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        rows, lanes = _shape(problem)
        widest = min(triton.next_power_of_2(lanes), 256)
        fitting = (n for n in (16, 32, 64, 128, 256) if n <= widest)
        block = min(fitting, default=widest, key=lambda n: -(-lanes // n) * (n + 16))
        found = []
        for elements, warps in ((1024, 4), (2048, 4), (2048, 8)):
            height = max(1, min(elements // block, triton.next_power_of_2(rows)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def _tiles(self, problem: Problem, config: Config) -> int:
        rows, lanes = _shape(problem)
        return -(-rows // config["BLOCK_R"]) * -(-lanes // config["BLOCK_L"])

    def cost(self, problem: Problem, config: Config) -> float:
        busy = min(1.0, self._tiles(problem, config) / problem.target.processors)
        return roofline(problem, flops=0.0, memory_efficiency=0.7 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        op: Any = problem.op
        forward = op.name == "unfold_fwd"
        x, y = (problem["x"], problem["y"]) if forward else (problem["dx"], problem["dy"])
        rows, lanes = _shape(problem)
        blocks = op.blocks(x.shape[2:])
        args: dict[str, Argument] = {"ROWS": rows, "LANES": lanes, "C": x.shape[1], "W": x.shape[3], "Q": blocks[1]}
        args |= {"x": "x", "y": "y", "H": x.shape[2]} if forward else {"dy": "dy", "dx": "dx", "P": blocks[0]}
        args |= {f"x_{axis}_stride": s for axis, s in zip("nchw", x.strides, strict=True)}
        args |= {f"y_{axis}_stride": s for axis, s in zip("nkl", y.strides, strict=True)}
        constexprs: dict[str, Any] = dict(zip("RS", op.window, strict=True))
        for name, values in (("STRIDE", op.stride), ("PAD", op.padding), ("DILATION", op.dilation)):
            constexprs |= {f"{name}_H": values[0], f"{name}_W": values[1]}
        edge = config["BLOCK_R"] + config["BLOCK_L"]
        margin = sum((p + d * r) * s for p, d, r, s in zip(op.padding, op.dilation, op.window, x.strides[2:]))
        widest = max(rows + edge, lanes + edge, x.span + margin, y.span)
        constexprs |= {"WIDE": widest > INT32, "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"]}
        kernel = unfold_windows if forward else fold_windows
        grid = (self._tiles(problem, config),)
        return [Launch(kernel, grid, args, constexprs, config["num_warps"], config["num_stages"])]
