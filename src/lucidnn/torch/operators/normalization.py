"""The framework's batch, layer, group and RMS normalization and their gradients (instance_norm is a batch_norm).

Where the framework keeps statistics in a half type (a CPU, all operands in that type), they are rounded to it here
too, since the framework's gradient reads what this returns.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import functional
from ...core.errors import NotSupported
from ...functional import _normalization as norm
from ...functional import batch_normalization as batch
from ...functional._library import Described, dense, last, run
from .._override import override

_HALF = (torch.float16, torch.bfloat16)
_NO_ACTIVATION = ("identity", 0.0)


def _mixed(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a half-type input has float32 parameters; a refusal of every other mixture of types."""
    kinds = {t.dtype for t in parameters if t is not None}
    if not kinds or kinds == {x.dtype}:
        return False
    if x.dtype in _HALF and kinds == {torch.float32}:
        return True
    raise NotSupported(f"an input of {x.dtype} beside parameters of {', '.join(sorted(map(str, kinds)))}")


def _wide(t: torch.Tensor | None) -> torch.Tensor | None:
    """Statistics in the type that they are computed in."""
    return t.float() if t is not None and t.dtype in _HALF else t


def _kept(x: torch.Tensor, mixed: bool, *statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Statistics in the type that the framework keeps them in."""
    return tuple(t.to(x.dtype) for t in statistics) if x.dtype in _HALF and not mixed else statistics


# ---- batch -----------------------------------------------------------------------------------------------------

_momenta: set[float] = set()


def _factor(momentum: float, x: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """The momentum as an attribute, which is compiled for, or as a tensor where it is a new one at every call."""
    if momentum in _momenta:
        return momentum, None
    if len(_momenta) < 16:
        _momenta.add(momentum)
        return momentum, None
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return 0.0, torch.full((1,), momentum, dtype=kind, device=x.device)


@override("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Normalize by the batch's statistics, which move the running ones, or by the running ones."""
    mixed = _mixed(input, weight, bias, running_mean, running_var)
    if not training:
        if running_mean is None or running_var is None:
            raise NotSupported("no running statistics to normalize by")
        given = (input, running_mean, running_var, None, weight, bias, None)
        y = run(batch._infer, given, (eps, "spatial", *_NO_ACTIVATION))
        none = input.new_empty((0,), dtype=torch.float32 if mixed or (input.is_cuda and input.dtype in _HALF) else None)
        return y, none, none.clone()
    if (running_mean is None) != (running_var is None):
        raise NotSupported("one of two running statistics")
    factor = None
    if running_mean is None:
        momentum = 0.0
    else:
        momentum, factor = _factor(momentum, input)
    given = (input, weight, bias, None, running_mean, running_var, factor)
    into = () if running_mean is None else (running_mean, running_var)
    y, mean, inverse = run(batch._train, given, (eps, momentum, "spatial", *_NO_ACTIVATION), into=into)
    return (y, mean, inverse) if input.is_cuda else (y, *_kept(input, mixed, mean, inverse))


@override("_native_batch_norm_legit.no_stats")
def _native_batch_norm_without(input, weight, bias, training, momentum, eps):
    return native_batch_norm(input, weight, bias, None, None, training, momentum, eps)


@override("_batch_norm_with_update")
def _batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps):
    found = native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *found, input.new_empty((0,), dtype=torch.uint8)


@override("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    """Gradients of the input, the weight and the bias; the statistics are constants unless they are the batch's."""
    _mixed(input, weight, running_mean)
    if train:
        known = (_wide(save_mean), None, _wide(save_invstd))
    else:
        known = (running_mean, running_var, None)
    given = (grad_out, input, *known, weight, None, None, None)
    dx, dw, db = run(batch._bwd, given, (eps, "spatial", not train, False, *_NO_ACTIVATION))
    return tuple(t if wanted else None for t, wanted in zip((dx, dw, db), output_mask, strict=True))


@override("batch_norm_backward")
def _batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


@override("cudnn_batch_norm")
def _cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon):
    found = native_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )
    return *found, input.new_empty((0,), dtype=torch.uint8)


@override("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(
    input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserveSpace
):
    return native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, (True, True, True)
    )


# ---- layer and RMS ---------------------------------------------------------------------------------------------


def _axes(input: torch.Tensor, normalized_shape: Any) -> int:
    axes = len(normalized_shape)
    if axes == 0 or tuple(input.shape[input.ndim - axes :]) != tuple(normalized_shape):
        raise NotSupported("a normalized shape that is not the input's last axes")
    return axes


def _masked(found: Any, output_mask: Any) -> Any:
    """The results there are, in the places that the mask leaves open."""
    results = iter(found if isinstance(found, tuple) else (found,))
    return [next(results) if wanted else None for wanted in output_mask]


@override("native_layer_norm")
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    """Each row by its own mean and variance; gives the statistics, too."""
    mixed = _mixed(input, weight, bias)
    y, mean, inverse = run(norm._layer_fwd, (input, weight, bias), (_axes(input, normalized_shape), eps))
    return (y, mean, inverse) if input.is_cuda else (y, *_kept(input, mixed, mean, inverse))


@override("native_layer_norm_backward")
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """Gradients of the input, the weight and the bias, those that the mask asks for."""
    _mixed(input, weight, bias)
    wanted = tuple(output_mask)
    if not any(wanted):
        return None, None, None
    given = (grad_out, input, _wide(mean), _wide(rstd), weight)
    dx, dw, db = _masked(run(norm._layer_bwd, given, (_axes(input, normalized_shape), 0.0, wanted)), wanted)
    return dx, dw, db if db is None or bias is None else db.to(bias.dtype)


@override("_fused_rms_norm", devices=("CUDA",))
def _fused_rms_norm(input, normalized_shape, weight, eps):
    _mixed(input, weight)
    if eps is None:
        eps = torch.finfo(norm.statistics_type(input)).eps
    return run(norm._rms_fwd, (input, weight), (_axes(input, normalized_shape), eps))


@override("_fused_rms_norm_backward", devices=("CUDA",))
def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    _mixed(input, weight)
    wanted = tuple(output_mask)
    if not any(wanted):
        return None, None
    return tuple(
        _masked(
            run(norm._rms_bwd, (grad_out, input, rstd, weight), (_axes(input, normalized_shape), 0.0, wanted)), wanted
        )
    )


@override("rms_norm", composite=True, devices=("CPU",))
def rms_norm(input, normalized_shape, weight=None, eps=None):
    """On a CPU the framework makes it of five operators; here it is one, with its own gradient."""
    if torch.is_autocast_enabled("cpu"):
        raise NotSupported("rms_norm under autocast, whose rules are those of its parts")
    _axes(input, normalized_shape)
    if weight is not None and weight.dtype != input.dtype:
        raise NotSupported(f"an input of {input.dtype} beside a weight of {weight.dtype}")
    return functional.rms_norm(input, normalized_shape, weight, eps)


# ---- group -----------------------------------------------------------------------------------------------------


def _group_fwd(tensors: Any, attributes: Any) -> Described:
    """As in `functional`, but on a GPU the framework's result is channels-first whatever its input is."""
    op, given = norm._group_fwd(tensors, attributes)
    x = tensors[0]
    given["tensors"]["y"] = dense(x, x.shape, last(x) and not x.is_cuda)
    return op, given


@override("native_group_norm")
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    """Each group of channels of each image by its own mean and variance; gives the statistics, too."""
    mixed = _mixed(input, weight, bias)
    y, mean, inverse = run(_group_fwd, (input, weight, bias), (group, eps, *_NO_ACTIVATION))
    return y, *_kept(input, mixed, mean, inverse)


@override("native_group_norm_backward")
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    """Gradients of the input, the weight and the bias, those that the mask asks for."""
    _mixed(input, weight)
    wanted = tuple(output_mask)
    if not any(wanted):
        return None, None, None
    given = (grad_out, input, _wide(mean), _wide(rstd), weight, None)
    return tuple(_masked(run(norm._group_bwd, given, (group, 0.0, *_NO_ACTIVATION, wanted)), wanted))
