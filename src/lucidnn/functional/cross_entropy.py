"""Cross-entropy on tensors: the operators, their gradients, `cross_entropy` and `nll_loss`."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument, NotSupported
from ..ops.cross_entropy import REDUCTIONS, CrossEntropyBwd, CrossEntropyFwd
from ._library import Described, Op, Planned
from .softmax import log_softmax

_ATTRIBUTES = "str reduction, float smoothing, int ignore_index, bool from_log"


def _fwd(tensors: Any, attributes: Any) -> Described:
    return CrossEntropyFwd(*attributes), {"tensors": dict(zip(("x", "target", "weight"), tensors, strict=True))}


def _bwd(tensors: Any, attributes: Any) -> Described:
    roles = ("dy", "x", "target", "stats", "weight", "total")
    return CrossEntropyBwd(*attributes), {"tensors": dict(zip(roles, tensors, strict=True))}


def _present(target: torch.Tensor, reduction: str, from_log: bool) -> tuple[bool, bool]:
    """Whether there are stats and a total."""
    return not from_log, reduction == "mean" and target.dtype == torch.int64


def _fwd_finish(tensors, attributes, result):
    x, target, _ = tensors
    stats, total = _present(target, attributes[0], attributes[3])
    if stats and total:
        return result
    y, *kept = result if isinstance(result, tuple) else (result,)
    return y, kept[0] if stats else x.new_empty(0), kept[-1] if total else x.new_empty(0)


def _fwd_fake(x, target, weight, reduction, smoothing, ignore_index, from_log):
    stats, total = _present(target, reduction, from_log)
    rows = (x.shape[0], *x.shape[2:])
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(rows if reduction == "none" else ()),
        x.new_empty(rows, dtype=sums) if stats else x.new_empty(0),
        x.new_empty((), dtype=sums) if total else x.new_empty(0),
    )


def _fwd_backward(needs, args, outputs, grads):
    x, target, weight, *attributes = args
    reduction, smoothing, _, from_log = attributes
    if needs[2]:
        raise NotSupported("the gradient of cross_entropy by weight; accepted: by input, and by probabilities")
    stats, total = _present(target, reduction, from_log)
    dy, dx, d_target = grads[0], None, None
    if needs[0]:
        kept = outputs[0] if stats else None, weight, outputs[1] if total else None
        dx = cross_entropy_bwd(dy, x, target, *kept, *attributes)
    if needs[1]:
        scaled = (1.0 - smoothing) * (dy / (x.numel() / x.shape[1]) if reduction == "mean" else dy)
        scaled = scaled.unsqueeze(1) if reduction == "none" else scaled
        d_target = -(scaled * log_softmax(x, 1))
        if weight is not None:
            d_target = d_target * _along_classes(weight, x)
        d_target = d_target.to(target.dtype)
    return dx, d_target, None


def _along_classes(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.reshape(1, -1, *[1] * (x.ndim - 2))


def _bwd_backward(needs, args, outputs, grads):
    """The gradients of dx, a function of dy, x (through stats too) and target: plain arithmetic."""
    dy, x, target, stats, weight, total, reduction, smoothing, ignore_index, from_log = args
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    g, classes = grads[0].to(kind), x.shape[1]
    w = torch.ones((), dtype=kind, device=x.device) if weight is None else _along_classes(weight, x).to(kind)
    scale = dy.to(kind)
    share = 1.0 / (x.numel() // classes) if reduction == "mean" else 1.0
    share = share if total is None else 1.0 / total
    scale = (scale.unsqueeze(1) if reduction == "none" else scale) * share
    if target.dtype == torch.int64:
        counted = (target != ignore_index).unsqueeze(1)
        numbers = torch.arange(classes, device=x.device).reshape(1, -1, *[1] * (x.ndim - 2))
        hot = (target.unsqueeze(1) == numbers).to(kind)
        g = torch.where(counted, g, 0.0)
    else:
        hot = target.to(kind)
    q = w * ((1.0 - smoothing) * hot + smoothing / classes)
    d_x = d_target = None
    p, sums = None, None
    slope = -q
    if not from_log:
        p = torch.exp(x.to(kind) - stats.unsqueeze(1))
        sums = q.sum(1, keepdim=True)
        slope = p * sums + slope
    d_dy = ((g * slope).sum(1, keepdim=True) * share).squeeze(1) if needs[0] else None
    if d_dy is not None:
        d_dy = (d_dy if reduction == "none" else d_dy.sum()).to(dy.dtype)
    if needs[1]:
        if p is None or sums is None:
            d_x = torch.zeros_like(x)
        else:
            d_x = (scale * sums * p * (g - (g * p).sum(1, keepdim=True))).to(x.dtype)
    if needs[2] and p is not None:
        d_target = (scale * (1.0 - smoothing) * w * ((g * p).sum(1, keepdim=True) - g)).to(target.dtype)
    return d_dy, d_x, d_target, None, None, None


cross_entropy_fwd = Op(
    f"cross_entropy_fwd(Tensor x, Tensor target, Tensor? weight, {_ATTRIBUTES}) -> (Tensor, Tensor, Tensor)",
    3,
    Planned(_fwd, finish=_fwd_finish),
    _fwd_fake,
    _fwd_backward,
    saves_output=lambda args: (1, 2),
    differentiable=1,  # the backward operator's own gradient knows that stats depends on x
)
cross_entropy_bwd = Op(
    "cross_entropy_bwd(Tensor dy, Tensor x, Tensor target, Tensor? stats, Tensor? weight, Tensor? total, "
    f"{_ATTRIBUTES}) -> Tensor",
    6,
    Planned(_bwd),
    lambda dy, x, target, stats, weight, total, *attributes: torch.empty_like(x),
    _bwd_backward,
)


def _loss(input, target, weight, size_average, reduce, reduction, ignore_index, smoothing, from_log):
    for name, t in (("input", input), ("target", target)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    if size_average is not None or reduce is not None:  # the framework's older names for the reduction
        whole = reduce is None or reduce
        reduction = "none" if not whole else "mean" if size_average is None or size_average else "sum"
    if reduction not in REDUCTIONS:
        raise InvalidArgument("reduction", repr(reduction), ", ".join(REDUCTIONS))
    if input.ndim == 0:
        raise InvalidArgument("input", "no axes", "a class axis: (C), (N, C) or (N, C, d1, ...)")
    by_class = not target.is_floating_point()
    if by_class and target.dtype != torch.int64:
        accepted = "torch.int64 class numbers" + ("" if from_log else ", or probabilities")
        raise InvalidArgument("target", str(target.dtype), accepted)
    single = input.ndim == 1
    if single:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    expected = (input.shape[0], *input.shape[2:]) if by_class else input.shape
    if target.shape != expected:
        found, shape = list(target.shape)[int(single) :], list(expected)[int(single) :]
        raise InvalidArgument("target", f"shape {found}", f"shape {shape} for an input of {list(input.shape)}")
    y, *_ = cross_entropy_fwd(input, target, weight, reduction, float(smoothing), ignore_index, from_log)
    return y.squeeze(0) if single and reduction == "none" else y


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    """Cross-entropy between logits and targets.

    Parameters
    ----------
    input : torch.Tensor
        Logits (C), (N, C) or (N, C, d1, ...); any strides. float64, float32, float16 or bfloat16.
    target : torch.Tensor
        Class numbers, int64, of the shape without the class axis; or probabilities of the input's shape.
    weight : torch.Tensor, optional
        (C,) one for each class.
    ignore_index : int
        The class number of rows that do not count.
    reduction : {'mean', 'sum', 'none'}
        The mean is weighted by the classes' weights; `size_average` and `reduce` are its older names.
    label_smoothing : float
        The part of each target that is spread over all classes.

    Returns
    -------
    torch.Tensor
        A number, or one for each row.

    Raises
    ------
    InvalidArgument
        Shapes or types that do not fit; on a CPU a class number that does not exist (on a GPU that gives NaN).

    Notes
    -----
    The definition is in `lucidnn.ops.cross_entropy`. Probabilities are not kept: backward makes them anew.

    Examples
    --------
    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)
    """
    return _loss(input, target, weight, size_average, reduce, reduction, ignore_index, label_smoothing, False)


def nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """`cross_entropy` of logarithms of probabilities, such as `log_softmax` gives, by class numbers.

    Examples
    --------
    >>> nll_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([1]))
    tensor(2.)
    """
    return _loss(input, target, weight, size_average, reduce, reduction, ignore_index, 0.0, True)
