"""The framework's own kernels as the peer of a problem: the same question asked of torch, in a type of choice.

Only tests ask the peer; no engine may. Asymmetric padding is written out as a padded tensor; everything else goes into
the framework's own arguments, so that the two definitions of stride, padding, dilation and groups meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from lucidnn.core.problem import Problem

ACTIVATIONS = {
    "identity": lambda v, p: v,
    "relu": lambda v, p: F.relu(v),
    "clipped_relu": lambda v, p: F.hardtanh(v, 0.0, p) if p > 0 else v * 0,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "sigmoid": lambda v, p: torch.sigmoid(v),
    "tanh": lambda v, p: torch.tanh(v),
    "silu": lambda v, p: F.silu(v),
    "gelu": lambda v, p: F.gelu(v),
    "gelu_tanh": lambda v, p: F.gelu(v, approximate="tanh"),
    "softplus": lambda v, p: F.softplus(v, threshold=700.0),
    "hardswish": lambda v, p: F.hardswish(v),
    "hardsigmoid": lambda v, p: (v + 3).clamp(0, 6) / 6,  # the framework's has a sixth in single precision
    "mish": lambda v, p: F.mish(v),
}


@contextlib.contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """TF32 inside the block or not: without it the peer is the best it can be."""
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv


def answer(
    problem: Problem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float64, tf32: bool = False
) -> dict[str, torch.Tensor]:
    """Outputs by role, computed in `dtype` by the framework."""
    whole = problem.op.name.startswith("conv_")  # int8 is computed with, other whole numbers are positions
    given = {r: t.to(dtype) if t.is_floating_point() or whole else t for r, t in inputs.items()}
    with precision(tf32):
        return FAMILIES[problem.op.name](problem, given)


def _finish(problem: Problem, value: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    e = problem.epilogue
    value = value if e.alpha == 1.0 else e.alpha * value
    if "scale" in given:
        value = value * given["scale"].reshape(1, -1, *[1] * (value.ndim - 2))
    if "z" in given:
        value = value + e.beta * given["z"]
    if "bias" in given:
        value = value + given["bias"].reshape(1, -1, *[1] * (value.ndim - 2))
    return ACTIVATIONS[e.activation](value, e.parameter)


def _pads(op) -> list[int]:
    return [n for before, after in reversed(op.padding) for n in (before, after)]


def _convolution(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Forward by the framework's function, gradients by its autograd, through whatever pads and turns around it."""
    op, (out,) = problem.op, problem.outputs
    dtype, device = given[problem.inputs[0]].dtype, given[problem.inputs[0]].device
    if problem.is_empty:  # some of the framework's kernels refuse these; the sum has no term
        value = torch.zeros(problem[out].shape, dtype=dtype, device=device)
        return {out: _finish(problem, value, given)}
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(op.stride) - 1]
    even = all(before == after for before, after in op.padding) and op.padding_mode == "zeros"
    padding = [before for before, _ in op.padding] if even else [0] * len(op.stride)
    mode = "constant" if op.padding_mode == "zeros" else op.padding_mode

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x if even else F.pad(x, _pads(op), mode)
        w = w.flip(*range(2, w.ndim)) if op.flip else w
        return conv(x, w, None, op.stride, padding, op.dilation, op.groups)

    if out == "y":
        return {out: _finish(problem, forward(given["x"], given["w"]), given)}
    x, w = (given.get(role, torch.zeros(problem[out].shape, dtype=dtype, device=device)) for role in ("x", "w"))
    wanted = (x if out == "dx" else w).requires_grad_()
    with torch.enable_grad():
        (value,) = torch.autograd.grad(forward(x, w), wanted, given["dy"])
    return {out: _finish(problem, value, given)}


def _bias_gradient(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dy = given["dy"]
    return {"db": dy.sum([axis for axis in range(dy.ndim) if axis != 1])}


def _pointwise_forward(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": _finish(problem, given["x"], given)}


def _pointwise_backward(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    e = problem.epilogue
    if problem.op.from_output and e.activation in ("sigmoid", "tanh", "elu"):
        words = (e.parameter, 1.0, 1.0, True) if e.activation == "elu" else ()
        dx = getattr(torch.ops.aten, f"{e.activation}_backward")(given["dy"], *words, given["x"])
        return {"dx": e.alpha * dx}
    x = given["x"].detach().clone().requires_grad_()
    with torch.enable_grad():
        value = ACTIVATIONS[e.activation](x, e.parameter)
    (dx,) = torch.autograd.grad(value, x, given["dy"], materialize_grads=True)
    return {"dx": e.alpha * dx}


def _pool_forward(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    op = problem.op
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(op.window) - 1]
    padding = [before for before, _ in op.padding]
    y, index = pool(given["x"], op.window, op.stride, padding, op.dilation, op.ceil_mode, True)
    return {"y": y, "index": index}


def _pool_backward(problem: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dy, shape = given["dy"], problem["dx"].shape
    dx = torch.zeros(*shape[:2], problem["dx"].numel // max(shape[0] * shape[1], 1), dtype=dy.dtype)
    dx = dx.to(dy.device).scatter_add_(2, given["index"].flatten(2).long(), dy.flatten(2))
    return {"dx": dx.reshape(shape)}


FAMILIES = {
    "conv_fprop": _convolution,
    "conv_dgrad": _convolution,
    "conv_wgrad": _convolution,
    "conv_bgrad": _bias_gradient,
    "pointwise_fwd": _pointwise_forward,
    "pointwise_bwd": _pointwise_backward,
    "max_pool_fwd": _pool_forward,
    "max_pool_bwd": _pool_backward,
}
