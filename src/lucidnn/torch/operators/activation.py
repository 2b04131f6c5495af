"""The framework's activations, their in-place forms and their gradients: rows of two tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...core.descriptor import TensorDescriptor
from ...core.errors import NotSupported
from ...functional import pointwise
from ...functional._library import Described, last, run
from .._override import override
from ._layout import shape_only

Named = tuple[str, float]
"""An activation of `lucidnn.ops.activation` and its parameter."""


def _fwd(tensors: Any, attributes: Any) -> Described:
    return pointwise._fwd((tensors[0], None, None), (1.0, 0.0, *attributes))


def _fwd_in_place(tensors: Any, attributes: Any) -> Described:
    op, given = _fwd(tensors, attributes)
    given["tensors"]["y"] = TensorDescriptor.of(tensors[0])
    return op, given


def _bwd(tensors: Any, attributes: Any) -> Described:
    """The strides of a result of two tensors are the framework's to choose: it is asked, by shapes alone.

    The order of its operands decides where the two disagree; relu's has the gradient last.
    """
    op, given = pointwise._bwd(tensors, (1.0, *attributes))
    dy, x = map(shape_only, tensors)
    first, second = (x, dy) if attributes[0] == "relu" else (dy, x)
    given["tensors"]["dx"] = TensorDescriptor.of(torch.ops.aten.silu_backward.default(first, second))
    return op, given


def _from_output(tensors: Any, attributes: Any) -> Described:
    op, given = _bwd(tensors, attributes)
    return dataclasses.replace(op, from_output=True), given


def _elu(alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Named:
    if scale != 1 or input_scale != 1:
        raise NotSupported(f"elu with scale {scale} and input scale {input_scale}; 1 and 1 are supported")
    return "elu", float(alpha)


def _hardtanh(min_val: float = -1, max_val: float = 1) -> Named:
    if min_val != 0 or not max_val >= 0:
        raise NotSupported(f"hardtanh from {min_val} to {max_val}; from 0 to a number >= 0 is supported")
    return "clipped_relu", float(max_val)


def _softplus(beta: float = 1, threshold: float = 20) -> Named:
    if beta != 1 or not threshold >= 20:
        raise NotSupported(f"softplus with beta {beta} and threshold {threshold}; 1 and 20 or more are supported")
    return "softplus", 0.0


def _gelu(approximate: str = "none") -> Named:
    return ("gelu" if approximate == "none" else "gelu_tanh"), 0.0


def _leaky(negative_slope: float = 0.01) -> Named:
    return "leaky_relu", float(negative_slope)


_FORWARD: dict[str, Callable[..., Named]] = {
    "relu": lambda: ("relu", 0.0),
    "leaky_relu": _leaky,
    "elu": _elu,
    "hardtanh": _hardtanh,
    "sigmoid": lambda: ("sigmoid", 0.0),
    "tanh": lambda: ("tanh", 0.0),
    "silu": lambda: ("silu", 0.0),
    "gelu": _gelu,
    "softplus": _softplus,
    "hardswish": lambda: ("hardswish", 0.0),
    "hardsigmoid": lambda: ("hardsigmoid", 0.0),
    "mish": lambda: ("mish", 0.0),
}


def _declare_forward(name: str, named: Callable[..., Named]) -> None:
    def forward(input: torch.Tensor, *numbers: Any, **words: Any) -> torch.Tensor:
        return run(_fwd, (input,), named(*numbers, **words))

    def in_place(input: torch.Tensor, *numbers: Any, **words: Any) -> torch.Tensor:
        attributes = named(*numbers, **words)
        if not (input.is_contiguous() or last(input)):
            raise NotSupported("in place on a tensor that is neither contiguous nor channels-last")
        run(_fwd_in_place, (input,), attributes, into=(input,))
        return input

    override(name)(forward)
    if name != "softplus":
        override(f"{name}_")(in_place)


for _name, _named in _FORWARD.items():
    _declare_forward(_name, _named)


def _gradient(
    grad_output: torch.Tensor, input: torch.Tensor, activation: str, parameter: float, describe: Any = _bwd
) -> torch.Tensor:
    if grad_output.dtype != input.dtype:
        raise NotSupported(f"a gradient of {grad_output.dtype} beside an input of {input.dtype}")
    return run(describe, (grad_output, input), (activation, parameter))


@override("threshold_backward")
def threshold_backward(grad_output, self, threshold):
    """The gradient of relu, which the framework takes from its output."""
    if threshold != 0:
        raise NotSupported(f"a threshold of {threshold}; 0 is supported")
    return _gradient(grad_output, self, "relu", 0.0)


@override("leaky_relu_backward")
def _leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    return _gradient(grad_output, self, "leaky_relu", float(negative_slope))


@override("elu_backward")
def _elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    return _gradient(grad_output, self_or_result, *_elu(alpha, scale, input_scale), _from_output if is_result else _bwd)


@override("sigmoid_backward")
def _sigmoid_backward(grad_output, output):
    return _gradient(grad_output, output, "sigmoid", 0.0, _from_output)


@override("tanh_backward")
def _tanh_backward(grad_output, output):
    return _gradient(grad_output, output, "tanh", 0.0, _from_output)


@override("hardtanh_backward")
def _hardtanh_backward(grad_output, self, min_val, max_val):
    return _gradient(grad_output, self, *_hardtanh(min_val, max_val))


@override("softplus_backward")
def _softplus_backward(grad_output, self, beta, threshold):
    return _gradient(grad_output, self, *_softplus(beta, threshold))


@override("gelu_backward")
def _gelu_backward(grad_output, self, *, approximate="none"):
    return _gradient(grad_output, self, *_gelu(approximate))


def _declare_backward(name: str) -> None:
    override(f"{name}_backward")(lambda grad_output, self: _gradient(grad_output, self, name, 0.0))


for _name in ("silu", "hardswish", "hardsigmoid", "mish"):
    _declare_backward(_name)
