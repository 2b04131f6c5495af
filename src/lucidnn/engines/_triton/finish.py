"""The pass that finishes sums on a GPU: ``y = act(alpha * v + beta * z + bias)``, any strides, any type.

For methods that leave plain sums in scratch memory. A block takes channels by pixels of one image; the compiler
turns the tile in shared memory where sums and result have different axes innermost.
"""

import triton
import triton.language as tl

from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.convolution import five_strides, three
from .epilogue import finish
from .index import INT32
from .launch import Argument, Launch, Slice, blend
from .split import named


@triton.jit
def conv_finish(
    src, bias, z, dst, alpha, beta, parameter, CHANNELS, H, W, PIXELS,
    src_n_stride, src_c_stride, src_d_stride, src_h_stride, src_w_stride, bias_stride,
    z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    WIDE: tl.constexpr, ACT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    blocks_p = tl.cdiv(PIXELS, BLOCK_P)
    blocks_c = tl.cdiv(CHANNELS, BLOCK_C)
    pid = tl.program_id(0)
    tile_p = pid % blocks_p
    rest = pid // blocks_p
    tile_c = rest % blocks_c
    n = rest // blocks_c
    if WIDE:
        tile_p = tile_p.to(tl.int64)
        tile_c = tile_c.to(tl.int64)
        n = n.to(tl.int64)
    pixel = tile_p * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = (c < CHANNELS)[:, None] & (pixel < PIXELS)[None, :]
    line = pixel // W
    w = pixel - line * W
    d = line // H
    h = line - d * H
    at = n * src_n_stride + d * src_d_stride + h * src_h_stride + w * src_w_stride
    v = tl.load(src + (c * src_c_stride)[:, None] + at[None, :], mask=ok, other=0.0)
    z_tile = None
    if z is not None:
        at = n * z_n_stride + d * z_d_stride + h * z_h_stride + w * z_w_stride
        z_tile = tl.load(z + (c * z_c_stride)[:, None] + at[None, :], mask=ok, other=0.0)
    bias_tile = None
    if bias is not None:
        bias_tile = tl.load(bias + c * bias_stride, mask=c < CHANNELS, other=0.0)[:, None]
    result = finish(v, z_tile, bias_tile, alpha, beta, parameter, ACT)
    at = n * dst_n_stride + d * dst_d_stride + h * dst_h_stride + w * dst_w_stride
    tl.store(dst + (c * dst_c_stride)[:, None] + at[None, :], result.to(dst.dtype.element_ty), mask=ok)


def finishing(problem: Problem, source: Slice, strides: tuple[int, ...]) -> Launch:
    """The launch that finishes sums in the workspace, whose five strides (N, C, D, H, W) are given."""
    out = problem[problem.outputs[0]]
    z, bias = problem.tensors.get("z"), problem.tensors.get("bias")
    n, channels, (d, h, w) = out.shape[0], out.shape[1], three(out.shape[2:], 1)
    pixels = d * h * w
    block_c = min(32, triton.next_power_of_2(channels))
    block_p = max(16, min(1024, triton.next_power_of_2(pixels), 2048 // block_c))
    args: dict[str, Argument] = {
        **blend(problem), "src": source, "bias": "bias", "z": "z", "dst": problem.outputs[0],
        "CHANNELS": channels, "H": h, "W": w, "PIXELS": pixels, **named("src", "ncdhw", strides),
        **named("z", "ncdhw", five_strides(z) if z else (None,) * 5), **named("dst", "ncdhw", five_strides(out)),
        "bias_stride": bias.strides[0] if bias else None,
    }  # fmt: skip
    span = max(n * strides[0], *(t.span for _, t in problem.items))
    constexprs = {
        "WIDE": span + 4096 > INT32, "ACT": ACTIVATIONS[problem.epilogue.activation].code,
        "BLOCK_C": block_c, "BLOCK_P": block_p,
    }  # fmt: skip
    blocks = n * -(-channels // block_c) * -(-pixels // block_p)
    return Launch(conv_finish, (blocks,), args, constexprs, 4, 2)
