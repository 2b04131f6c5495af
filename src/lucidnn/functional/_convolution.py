"""The convolutions' operators and their gradients; `lucidnn.functional.convolution` has the functions for users.

The three directions are the three derivatives of one trilinear form in x, w and dy, so each one's gradient is made of
the other two: differentiation never leaves the library, to any order. Padding modes and flipped filters change the
form, not that it is trilinear; an epilogue is taken off first.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.descriptor import TensorDescriptor, short_dtype
from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..core.settings import current
from ..ops.convolution import ConvBgrad, ConvDgrad, ConvFprop, ConvWgrad, output_layout, output_size
from ._library import Described, Op, Planned, dense, last, new_empty
from .pointwise import from_output_suffices, pointwise_bwd

_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups, str padding_mode, bool flip"
_EPILOGUE = "float alpha, float beta, str activation, float parameter, ScalarType? dtype, str? engine"
PLAIN = (1.0, 0.0, "identity", 0.0, None, None)  # the epilogue's arguments where there is none


def pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    """Flat (before, after, before, after, ...) as pairs."""
    return tuple(zip(padding[::2], padding[1::2], strict=True))


def _math(t: torch.Tensor) -> str:
    """Whether float32 may be rounded to TF32: the framework's own flag for convolutions, unless a setting says."""
    if not t.is_cuda or t.dtype != torch.float32:
        return "ieee"
    allowed = current().allow_tf32
    if allowed is None:
        # Right whichever of the framework's two interfaces was used, and ten times as fast as the public one.
        allowed = torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"
    return "tf32" if allowed else "ieee"


def _named(stride: Any, padding: Any, dilation: Any, groups: int, padding_mode: str, flip: bool) -> dict[str, Any]:
    named = {"stride": tuple(stride), "padding": pairs(padding), "dilation": tuple(dilation), "groups": groups}
    return named | {"padding_mode": padding_mode, "flip": flip}


def _fprop(tensors: Any, attributes: Any) -> Described:
    *geometry, alpha, beta, activation, parameter, dtype, engine = attributes
    op = ConvFprop(**_named(*geometry))
    given: dict[str, Any] = dict(zip(op.inputs + op.optional, tensors, strict=True))
    if dtype is not None:
        x, w = (TensorDescriptor.of(t) for t in tensors[:2])
        shape = op.infer({"x": x, "w": w})["y"].shape
        given["y"] = TensorDescriptor.make(short_dtype(dtype), shape, output_layout(shape, x, w))
    return op, {"tensors": given, "epilogue": Epilogue(alpha, beta, activation, parameter), "engine": engine}


def _dgrad(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *geometry, alpha, beta, activation, parameter, dtype, engine = attributes
    op = ConvDgrad(**_named(*geometry))
    given: dict[str, Any] = dict(zip(op.inputs + op.optional, tensors, strict=True))
    given["dx"] = dense(tensors[0], shape, channels_last, dtype)
    epilogue = Epilogue(alpha, beta, activation, parameter)
    return op, {"tensors": given, "epilogue": epilogue, "engine": engine}


def _wgrad(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *geometry, alpha = attributes
    x, dy = tensors
    given = {"x": x, "dy": dy, "dw": dense(x, shape, channels_last)}
    return ConvWgrad(**_named(*geometry)), {"tensors": given, "epilogue": Epilogue(alpha)}


def _bgrad(tensors: Any, attributes: Any) -> Described:
    return ConvBgrad(), {"tensors": {"dy": tensors[0]}}


def _fprop_fake(x, w, bias, z, scale, stride, padding, dilation, groups, mode, flip, *epilogue):
    axes = zip(x.shape[2:], w.shape[2:], stride, pairs(padding), dilation, strict=True)
    dtype = epilogue[-2] or (torch.int32 if x.dtype == torch.int8 else None)
    return new_empty(x, (x.shape[0], w.shape[0], *(output_size(*axis) for axis in axes)), last(x) or last(w), dtype)


def _dgrad_fake(dy, w, bias, z, scale, shape, channels_last, *attributes):
    return new_empty(dy, shape, channels_last, attributes[-2])


def _wgrad_fake(x, dy, shape, channels_last, *attributes):
    return new_empty(x, shape, channels_last)


def _through_epilogue(needs, plain, tensors, attributes, outputs, grad, dtype):
    """The gradient before the epilogue, and a function for those of bias and z; `plain` computes without activation."""
    _, _, bias, z, scale = tensors
    _, beta, activation, parameter, _, _ = attributes[-6:]
    if needs[4]:
        raise InvalidArgument("scale", "a tensor that requires a gradient", "one that does not: it is no parameter")
    if activation != "identity":
        # The activation's input is computed again where its output does not tell the slope.
        source = outputs[0] if outputs else plain(*tensors, *attributes[:-4], "identity", 0.0, attributes[-2], None)
        grad = pointwise_bwd(grad, source, 1.0, activation, parameter)
    before = grad
    if scale is not None:
        # In the wider of the two types: it is rounded once, below.
        before = grad * scale.reshape(1, -1, *[1] * (grad.ndim - 2))

    def rest():
        db = conv_bgrad(grad).to(bias.dtype) if needs[2] else None
        return db, (beta * grad).to(z.dtype) if needs[3] else None

    return before.to(dtype), rest


def _fprop_backward(needs, args, outputs, grads):
    (x, w, *_), geometry, alpha = args[:5], args[5:11], args[11]
    dy, rest_of_it = _through_epilogue(needs, conv_fprop, args[:5], args[5:], outputs, grads[0], x.dtype)
    channels_last = last(x) or last(w)
    rest = (None, None, None, x.shape, channels_last, *geometry, alpha, *PLAIN[1:])
    dx = conv_dgrad(dy, w, *rest) if needs[0] else None
    dw = conv_wgrad(x, dy, w.shape, channels_last, *geometry, alpha) if needs[1] else None
    return dx, dw, *rest_of_it(), None


def _dgrad_backward(needs, args, outputs, grads):
    (dy, w, *_), geometry, alpha = args[:5], args[7:13], args[13]
    ddx, rest_of_it = _through_epilogue(needs, conv_dgrad, args[:5], args[5:], outputs, grads[0], dy.dtype)
    ddy = conv_fprop(ddx, w, None, None, None, *geometry, alpha, *PLAIN[1:]) if needs[0] else None
    dw = conv_wgrad(ddx, dy, w.shape, last(w), *geometry, alpha) if needs[1] else None
    return ddy, dw, *rest_of_it(), None


def _wgrad_backward(needs, args, outputs, grads):
    x, dy, _, _, *geometry, alpha = args
    (ddw,) = grads
    rest = (None, None, None, x.shape, last(x), *geometry, alpha, *PLAIN[1:])
    dx = conv_dgrad(dy, ddw, *rest) if needs[0] else None
    ddy = conv_fprop(x, ddw, None, None, None, *geometry, alpha, *PLAIN[1:]) if needs[1] else None
    return dx, ddy


def _saves_output(at: int):
    return lambda args: args[at] != "identity" and from_output_suffices(args[at], args[at + 1])


conv_fprop = Op(
    f"conv_fprop(Tensor x, Tensor w, Tensor? bias, Tensor? z, Tensor? scale, {_GEOMETRY}, {_EPILOGUE}) -> Tensor",
    5,
    Planned(_fprop, _math),
    _fprop_fake,
    _fprop_backward,
    saves_output=_saves_output(13),
)
conv_dgrad = Op(
    "conv_dgrad(Tensor dy, Tensor w, Tensor? bias, Tensor? z, Tensor? scale, SymInt[] x_shape, bool channels_last, "
    f"{_GEOMETRY}, {_EPILOGUE}) -> Tensor",
    5,
    Planned(_dgrad, _math),
    _dgrad_fake,
    _dgrad_backward,
    saves_output=_saves_output(15),
)
conv_wgrad = Op(
    f"conv_wgrad(Tensor x, Tensor dy, SymInt[] w_shape, bool channels_last, {_GEOMETRY}, float alpha) -> Tensor",
    2,
    Planned(_wgrad, _math),
    _wgrad_fake,
    _wgrad_backward,
)
conv_bgrad = Op(
    "conv_bgrad(Tensor dy) -> Tensor",
    1,
    Planned(_bgrad),
    lambda dy: dy.new_empty((dy.shape[1],)),
    # db is a sum over everything but axis 1: its gradient is db spread out again
    lambda needs, args, outputs, grads: (grads[0].reshape(1, -1, *[1] * (args[0].ndim - 2)).expand(args[0].shape),),
)
