"""The operators of layer, RMS and group normalization and their gradients.

Second derivatives are those of the plain formula, taken by the framework (`differentiated_twice`): right, and no
faster than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as T

from ..core.operation import Epilogue
from ..ops.normalization import GroupNormBwd, GroupNormFwd, LayerNormBwd, LayerNormFwd, RmsNormBwd, RmsNormFwd
from ._library import Described, Op, Planned, last, new_empty

# ---- what the operators share ------------------------------------------------------------------------------


def differentiated_twice(
    plain: Callable[..., Any], dy: torch.Tensor, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    """Gradients of a backward pass: of the sum of `grads` times the gradients of ``plain(*tensors)``.

    Parameters
    ----------
    plain : callable
        The forward formula in differentiable tensor arithmetic.
    dy : torch.Tensor
        The backward pass's first input.
    tensors : sequence of tensor or None
        What the forward pass read.
    grads : sequence of tensor or None
        For the gradient of each of `tensors`, what multiplies it.
    needs : sequence of bool
        Whether the result is wanted for dy and each of `tensors`.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():

        def source(t: Any) -> Any:
            return t if t is None or (again and t.requires_grad) else t.detach().requires_grad_()

        dy, given = source(dy), [source(t) for t in tensors]
        used = [t for t, grad in zip(given, grads, strict=True) if t is not None and grad is not None]
        weights = [grad for t, grad in zip(given, grads, strict=True) if t is not None and grad is not None]
        first = torch.autograd.grad(plain(*given), used, dy, create_graph=True, allow_unused=True)
        pairs = [(f, w.to(f.dtype)) for f, w in zip(first, weights, strict=True) if f is not None and f.requires_grad]
        wanted = [t for t, need in zip((dy, *given), needs, strict=True) if need]
        if not pairs:
            return [None] * len(needs)
        found = iter(
            torch.autograd.grad(
                [f for f, _ in pairs], wanted, [w for _, w in pairs], create_graph=again, allow_unused=True
            )
        )
    return [next(found) if need else None for need in needs]


def _wide(t: torch.Tensor) -> torch.Tensor:
    """In the type that is computed in."""
    return t if t.dtype == torch.float64 else t.float()


def _axes(x: torch.Tensor, count: int) -> list[int]:
    return list(range(x.ndim - count, x.ndim))


def _plain_last(x, scale, bias, axes: int, epsilon: float, centered: bool):
    v = _wide(x)
    over = _axes(x, axes)
    if centered:
        v = v - v.mean(over, keepdim=True)
    v = v * (v.square().mean(over, keepdim=True) + epsilon) ** -0.5
    v = v if scale is None else v * scale
    return (v if bias is None else v + bias).to(x.dtype)


_TORCH_ACTIVATIONS: dict[str, Callable[[Any, float], Any]] = {
    "identity": lambda v, p: v, "relu": lambda v, p: T.relu(v), "clipped_relu": lambda v, p: v.clamp(0.0, p),
    "leaky_relu": T.leaky_relu, "elu": T.elu, "sigmoid": lambda v, p: v.sigmoid(), "tanh": lambda v, p: v.tanh(),
    "silu": lambda v, p: T.silu(v), "gelu": lambda v, p: T.gelu(v),
    "gelu_tanh": lambda v, p: T.gelu(v, approximate="tanh"), "softplus": lambda v, p: T.softplus(v, threshold=1e9),
    "hardswish": lambda v, p: v * (v + 3).clamp(0.0, 6.0) / 6, "hardsigmoid": lambda v, p: (v + 3).clamp(0.0, 6.0) / 6,
    "mish": lambda v, p: T.mish(v),
}  # fmt: skip


def _plain_group(x, scale, bias, groups: int, epsilon: float, activation: str, parameter: float):
    v = _wide(x).reshape(x.shape[0], groups, -1)
    v = v - v.mean(2, keepdim=True)
    v = (v * (v.square().mean(2, keepdim=True) + epsilon) ** -0.5).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    v = v if scale is None else v * scale.reshape(shape)
    v = v if bias is None else v + bias.reshape(shape)
    return _TORCH_ACTIVATIONS[activation](v, parameter).to(x.dtype)


def _named(wanted: Sequence[bool], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(names, wanted, strict=True) if flag)


def _all_of(tensors: Any, attributes: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """One tensor for each of the flags: the results in turn, and an empty one where nothing was wanted."""
    wanted = attributes[-1]
    if isinstance(result, tuple) and len(result) == len(wanted):
        return result
    found = iter(result if isinstance(result, tuple) else (result,))
    return tuple(next(found) if flag else tensors[0].new_empty(0) for flag in wanted)


def statistics_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_GRADIENTS = ("dx", "dscale", "dbias")


# ---- layer and RMS -----------------------------------------------------------------------------------------


def _layer_fwd(tensors: Any, attributes: Any) -> Described:
    given = dict(zip(("x", "scale", "bias"), tensors, strict=True))
    return LayerNormFwd(*attributes), {"tensors": given}


def _layer_bwd(tensors: Any, attributes: Any) -> Described:
    axes, _, wanted = attributes
    given = dict(zip(("dy", "x", "mean", "inv_variance", "scale"), tensors, strict=True))
    return LayerNormBwd(gradients=_named(wanted, _GRADIENTS), axes=axes), {"tensors": given}


def _rms_fwd(tensors: Any, attributes: Any) -> Described:
    return RmsNormFwd(*attributes), {"tensors": dict(zip(("x", "scale"), tensors, strict=True))}


def _rms_bwd(tensors: Any, attributes: Any) -> Described:
    axes, _, wanted = attributes
    given = dict(zip(("dy", "x", "inv_variance", "scale"), tensors, strict=True))
    return RmsNormBwd(gradients=_named(wanted, _GRADIENTS[:2]), axes=axes), {"tensors": given}


def _row_major(t: torch.Tensor, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return t.new_empty(shape, dtype=dtype)


def _last_statistics(x: torch.Tensor, axes: int) -> torch.Tensor:
    return _row_major(x, [*x.shape[: x.ndim - axes], *[1] * axes], statistics_type(x))


def _layer_fwd_backward(needs, args, outputs, grads):
    x, scale, bias, axes, epsilon = args
    mean, inverse = outputs
    found = layer_norm_bwd(grads[0], x, mean, inverse, scale, axes, epsilon, needs)
    dx, dscale, dbias = (t if need else None for t, need in zip(found, needs, strict=True))
    return dx, dscale, None if dbias is None else dbias.to(bias.dtype)


def _layer_bwd_backward(needs, args, outputs, grads):
    dy, x, _, _, scale, axes, epsilon, wanted = args
    bias = x.new_zeros(x.shape[x.ndim - axes :]) if wanted[2] else None

    def plain(x, scale, bias):
        return _plain_last(x, scale, bias, axes, epsilon, True)

    grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
    scale_ = scale if scale is not None else x.new_ones(x.shape[x.ndim - axes :]) if wanted[1] else None
    ddy, ddx, ddscale, _ = differentiated_twice(
        plain, dy, (x, scale_, bias), grads, (needs[0], needs[1], needs[4], False)
    )
    return ddy, ddx, None, None, ddscale


def _rms_fwd_backward(needs, args, outputs, grads):
    x, scale, axes, epsilon = args
    found = rms_norm_bwd(grads[0], x, outputs[0], scale, axes, epsilon, needs)
    return tuple(t if need else None for t, need in zip(found, needs, strict=True))


def _rms_bwd_backward(needs, args, outputs, grads):
    dy, x, _, scale, axes, epsilon, wanted = args

    def plain(x, scale):
        return _plain_last(x, scale, None, axes, epsilon, False)

    grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
    ddy, ddx, ddscale = differentiated_twice(plain, dy, (x, scale), grads, (needs[0], needs[1], needs[3]))
    return ddy, ddx, None, ddscale


def _parameter_fakes(x: torch.Tensor, scale: Any, shape: Any, wanted: Sequence[bool]) -> list[torch.Tensor]:
    kind = x.dtype if scale is None else scale.dtype
    return [_row_major(x, shape, kind) if flag else x.new_empty(0) for flag in wanted]


def _last_bwd_fake(x, scale, axes, wanted):
    dx = _row_major(x, x.shape) if wanted[0] else x.new_empty(0)
    return (dx, *_parameter_fakes(x, scale, x.shape[x.ndim - axes :], wanted[1:]))


layer_norm_fwd = Op(
    "layer_norm_fwd(Tensor x, Tensor? scale, Tensor? bias, int axes, float epsilon) -> (Tensor, Tensor, Tensor)",
    3,
    Planned(_layer_fwd),
    lambda x, scale, bias, axes, epsilon: (
        _row_major(x, x.shape),
        _last_statistics(x, axes),
        _last_statistics(x, axes),
    ),
    _layer_fwd_backward,
    saves_output=lambda args: (1, 2),
    differentiable=1,
)
layer_norm_bwd = Op(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor mean, Tensor inv_variance, Tensor? scale, int axes, float epsilon, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)",
    5,
    Planned(_layer_bwd, finish=_all_of),
    lambda dy, x, mean, inverse, scale, axes, epsilon, wanted: _last_bwd_fake(x, scale, axes, wanted),
    _layer_bwd_backward,
)
rms_norm_fwd = Op(
    "rms_norm_fwd(Tensor x, Tensor? scale, int axes, float epsilon) -> (Tensor, Tensor)",
    2,
    Planned(_rms_fwd),
    lambda x, scale, axes, epsilon: (_row_major(x, x.shape), _last_statistics(x, axes)),
    _rms_fwd_backward,
    saves_output=lambda args: (1,),
    differentiable=1,
)
rms_norm_bwd = Op(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor inv_variance, Tensor? scale, int axes, float epsilon, bool[] wanted) "
    "-> (Tensor, Tensor)",
    4,
    Planned(_rms_bwd, finish=_all_of),
    lambda dy, x, inverse, scale, axes, epsilon, wanted: _last_bwd_fake(x, scale, axes, wanted),
    _rms_bwd_backward,
)


# ---- group -------------------------------------------------------------------------------------------------


def _group_fwd(tensors: Any, attributes: Any) -> Described:
    groups, epsilon, activation, parameter = attributes
    given = dict(zip(("x", "scale", "bias"), tensors, strict=True))
    epilogue = Epilogue(activation=activation, parameter=parameter)
    return GroupNormFwd(groups, epsilon), {"tensors": given, "epilogue": epilogue}


def _group_bwd(tensors: Any, attributes: Any) -> Described:
    groups, _, activation, parameter, wanted = attributes
    given = dict(zip(("dy", "x", "mean", "inv_variance", "scale", "bias"), tensors, strict=True))
    epilogue = Epilogue(activation=activation, parameter=parameter)
    op = GroupNormBwd(gradients=_named(wanted, _GRADIENTS), groups=groups)
    return op, {"tensors": given, "epilogue": epilogue}


def _group_fwd_fake(x, scale, bias, groups, epsilon, activation, parameter):
    known = [_row_major(x, (x.shape[0], groups), statistics_type(x)) for _ in range(2)]
    return new_empty(x, x.shape, last(x)), *known


def _group_bwd_fake(dy, x, mean, inverse, scale, bias, groups, epsilon, activation, parameter, wanted):
    dx = new_empty(x, x.shape, last(x)) if wanted[0] else x.new_empty(0)
    return (dx, *_parameter_fakes(x, scale, x.shape[1:2], wanted[1:]))


def _group_fwd_backward(needs, args, outputs, grads):
    x, scale, bias, groups, epsilon, activation, parameter = args
    mean, inverse = outputs
    read = None if activation == "identity" else bias
    found = group_norm_bwd(grads[0], x, mean, inverse, scale, read, groups, epsilon, activation, parameter, needs)
    dx, dscale, dbias = (t if need else None for t, need in zip(found, needs, strict=True))
    return dx, dscale, None if dbias is None else dbias.to(bias.dtype)


def _group_bwd_backward(needs, args, outputs, grads):
    dy, x, _, _, scale, bias, groups, epsilon, activation, parameter, wanted = args

    def plain(x, scale, bias):
        return _plain_group(x, scale, bias, groups, epsilon, activation, parameter)

    grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
    scale_ = scale if scale is not None else x.new_ones(x.shape[1]) if wanted[1] else None
    bias_ = bias if bias is not None else x.new_zeros(x.shape[1]) if wanted[2] else None
    needed = (needs[0], needs[1], needs[4], needs[5])
    ddy, ddx, ddscale, ddbias = differentiated_twice(plain, dy, (x, scale_, bias_), grads, needed)
    return ddy, ddx, None, None, ddscale, ddbias


group_norm_fwd = Op(
    "group_norm_fwd(Tensor x, Tensor? scale, Tensor? bias, int groups, float epsilon, str activation, "
    "float parameter) -> (Tensor, Tensor, Tensor)",
    3,
    Planned(_group_fwd),
    _group_fwd_fake,
    _group_fwd_backward,
    saves_output=lambda args: (1, 2),
    differentiable=1,
)
group_norm_bwd = Op(
    "group_norm_bwd(Tensor dy, Tensor x, Tensor mean, Tensor inv_variance, Tensor? scale, Tensor? bias, int groups, "
    "float epsilon, str activation, float parameter, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    6,
    Planned(_group_bwd, finish=_all_of),
    _group_bwd_fake,
    _group_bwd_backward,
)
