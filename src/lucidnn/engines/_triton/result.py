"""The end of a kernel that computed a tile of pixels by channels: the epilogue and the store, wherever the result lies.

`store_pixels` is for tensors with five strides (N, C, D, H, W; D only where `HAS_D`); `places` gives its arguments.
"""

import triton
import triton.language as tl

from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.convolution import five_strides
from .epilogue import finish
from .launch import Argument, blend


@triton.jit
def store_pixels(
    acc, z, bias, dst, alpha, beta, parameter, n, o, p, q, ok_m, channel, ok_k,
    bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    HAS_D: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """``act(alpha * acc + beta * z + bias)`` for pixels (n, o, p, q) and channels, both vectors, where both are ok."""
    ok = ok_m[:, None] & ok_k[None, :]
    z_tile = None
    if z is not None:
        z_row = n * z_n_stride + p * z_h_stride + q * z_w_stride
        if HAS_D:
            z_row += o * z_d_stride
        z_tile = tl.load((z + z_row)[:, None] + (channel * z_c_stride)[None, :], mask=ok, other=0.0)
    bias_tile = None
    if bias is not None:
        bias_tile = tl.load(bias + channel * bias_stride, mask=ok_k, other=0.0)[None, :]
    result = finish(acc, z_tile, bias_tile, alpha, beta, parameter, ACT)
    dst_row = n * dst_n_stride + p * dst_h_stride + q * dst_w_stride
    if HAS_D:
        dst_row += o * dst_d_stride
    tl.store((dst + dst_row)[:, None] + (channel * dst_c_stride)[None, :], result.to(dst.dtype.element_ty), mask=ok)


def places(problem: Problem) -> tuple[dict[str, Argument], dict[str, object]]:
    """Arguments and constexprs of a kernel that ends in `store_pixels`."""
    out, z, bias = problem[problem.outputs[0]], problem.tensors.get("z"), problem.tensors.get("bias")
    args: dict[str, Argument] = {
        "dst": problem.outputs[0], "z": "z", "bias": "bias", **blend(problem),
        "bias_stride": bias.strides[0] if bias else None,
    }  # fmt: skip
    for name, values in (("z", five_strides(z) if z else (None,) * 5), ("dst", five_strides(out))):
        args.update({f"{name}_{axis}_stride": value for axis, value in zip("ncdhw", values)})
    return args, {"HAS_D": out.ndim == 5, "ACT": ACTIVATIONS[problem.epilogue.activation].code}
