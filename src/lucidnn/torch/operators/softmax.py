"""The framework's softmax and log-softmax with their gradients, and its cross-entropy.

`softmax` and `log_softmax` come to ``_softmax`` and ``_log_softmax``. A cross-entropy is made of a log-softmax and a
loss by the framework; here the composite is taken over, so that no table of probabilities is written.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import functional
from ...core.descriptor import TensorDescriptor
from ...core.errors import InvalidArgument, NotSupported
from ...functional._library import Described, run
from ...functional.softmax import _bwd as described_bwd
from ...functional.softmax import _fwd as described_fwd
from .._override import override
from ._layout import shape_only


def _bwd(tensors: Any, attributes: Any) -> Described:
    """As in `functional`, in the strides that the framework's kernel gives: it is asked, by shapes alone."""
    op, given = described_bwd(tensors, attributes)
    y, dy, _ = (t if t is None else shape_only(t) for t in tensors)
    (axis,), _, _, dtype = attributes
    dx = torch.ops.aten._softmax_backward_data.default(dy, y, axis, dtype)
    given["tensors"]["dx"] = TensorDescriptor.of(dx)
    return op, given


def _fwd(tensors: Any, attributes: Any) -> Described:
    op, given = described_fwd(tensors, attributes)
    (axis,), _, _, dtype = attributes
    x = shape_only(tensors[0])
    y = torch.ops.aten._softmax.default(x, axis, False)
    given["tensors"]["y"] = TensorDescriptor.of(y.to(dtype))
    return op, given


def _axis(t: torch.Tensor, dim: int) -> tuple[int]:
    if t.ndim == 0:
        raise NotSupported("a tensor without axes")
    if not -t.ndim <= dim < t.ndim:
        raise InvalidArgument("dim", dim, f"an axis of {t.ndim}")
    return (dim % t.ndim,)


def _forward(input: torch.Tensor, dim: int, half_to_float: bool, log: bool) -> torch.Tensor:
    dtype = input.dtype
    if half_to_float:
        if not input.is_cuda or dtype != torch.float16:
            raise NotSupported(f"a conversion to float32 of {dtype}")
        dtype = torch.float32
    return run(_fwd, (input, None), (_axis(input, dim), log, False, dtype))


def _backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype, log: bool
) -> torch.Tensor:
    if grad_output.dtype != output.dtype:
        raise NotSupported(f"a gradient of {grad_output.dtype} beside an output of {output.dtype}")
    return run(_bwd, (output, grad_output, None), (_axis(output, dim), log, False, input_dtype))


@override("_softmax")
def _softmax(self, dim, half_to_float):
    return _forward(self, dim, half_to_float, False)


@override("_log_softmax")
def _log_softmax(self, dim, half_to_float):
    return _forward(self, dim, half_to_float, True)


@override("_softmax_backward_data")
def _softmax_backward_data(grad_output, output, dim, input_dtype):
    return _backward(grad_output, output, dim, input_dtype, False)


@override("_log_softmax_backward_data")
def _log_softmax_backward_data(grad_output, output, dim, input_dtype):
    return _backward(grad_output, output, dim, input_dtype, True)


_REDUCTIONS = ("none", "mean", "sum")


@override("cross_entropy_loss", composite=True)
def cross_entropy_loss(self, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    """The loss in one kernel, its gradient in another."""
    device = self.device.type
    if torch.is_autocast_enabled(device):
        if device != "cuda":
            raise NotSupported("a cross-entropy under autocast on a CPU, whose rules are those of its parts")
        self = self.float()  # as its parts would be
    if weight is not None and weight.dtype != self.dtype:
        raise NotSupported(f"an input of {self.dtype} beside a weight of {weight.dtype}")
    if weight is not None and weight.requires_grad:
        raise NotSupported("a gradient for the classes' weights")
    if reduction not in (0, 1, 2):
        raise InvalidArgument("reduction", reduction, "0, 1 or 2")
    return functional.cross_entropy(
        self, target, weight, None, ignore_index, None, _REDUCTIONS[reduction], label_smoothing
    )
