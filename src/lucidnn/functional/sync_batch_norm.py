"""Batch normalization over a batch that is spread over processes: `sync_batch_norm`.

Each process takes the mean and the sum of squared differences of its own part, and one gathering of these, with the
part's size, makes the whole batch's statistics by Chan's formula: never a sum of squares over processes. Backward, one
sum over processes of the two sums that dx needs. The arithmetic is that of the pieces of
`lucidnn.ops.batch_normalization`; what is sent is 2 C + 1 numbers forward and 2 C backward.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument
from .batch_normalization import (
    batch_norm,
    batch_norm_bwd_apply,
    batch_norm_bwd_sums,
    batch_norm_combine,
    batch_norm_infer_fwd,
    batch_norm_stats,
)

_SPATIAL = ("spatial", "identity", 0.0)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum, eps, group):
        channels = x.shape[1]
        mean, m2 = batch_norm_stats(x, "spatial")
        count = mean.new_full((1,), x.numel() // max(channels, 1))
        if not x.numel():  # nothing has no mean, and what is weighted with 0 must still be a number
            mean, m2 = torch.zeros_like(mean), torch.zeros_like(m2)
        own = torch.cat((mean, m2, count))
        parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, own, group=group)
        means, m2s, counts = torch.stack(parts).split((channels, channels, 1), 1)
        factor = momentum.reshape(-1) if isinstance(momentum, torch.Tensor) else None
        mean, inverse = batch_norm_combine(
            counts.reshape(-1),
            means,
            m2s,
            running_mean,
            running_var,
            factor,
            eps,
            0.0 if factor is not None else momentum,
        )
        ctx.save_for_backward(x, weight, mean, inverse, counts.sum(0))
        ctx.eps, ctx.group = eps, group
        ctx.like = None if bias is None else bias.dtype
        return batch_norm_infer_fwd(x, mean, None, inverse, weight, bias, None, eps, *_SPATIAL)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        given = (dy, x, mean, None, inverse, weight, None, None, None)
        dscale, dbias = batch_norm_bwd_sums(*given, ctx.eps, *_SPATIAL)
        dx = None
        if ctx.needs_input_grad[0]:
            total = torch.cat((dscale, dbias))
            torch.distributed.all_reduce(total, group=ctx.group)
            sums = total.split(x.shape[1])
            dx = batch_norm_bwd_apply(*given, *sums, count, ctx.eps, "spatial", False, "identity", 0.0)[0]
        dweight = dscale.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, dbias.to(ctx.like) if ctx.needs_input_grad[2] else None, *[None] * 5


def sync_batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, process_group=None
):
    """`batch_norm` by the statistics of the batches of all processes of a group together.

    Parameters
    ----------
    input : torch.Tensor
        This process' part of the batch, (N, C) and up to three spatial axes; N may differ from process to process, and
        be 0. float64, float32, float16 or bfloat16.
    running_mean, running_var : torch.Tensor or None
        (C,). Used where `training` is false; else moved towards the whole batch's statistics, in place, if given.
    weight, bias : torch.Tensor, optional
        (C,).
    training : bool
        Without it, and without more than one process, this is `batch_norm`.
    momentum : float or torch.Tensor
        Weight of the new statistics in the running ones.
    eps : float
        Added to variances, >= 0.
    process_group : torch.distributed.ProcessGroup, optional
        The default group if left out. All its processes make the call, and go backward through it, in one order.

    Returns
    -------
    torch.Tensor
        Of input's shape, type and memory format.

    Raises
    ------
    InvalidArgument
        Names the argument, the value found and what is accepted.

    Notes
    -----
    The gradients of `weight` and `bias` are this process' share, which data-parallel training sums with all others.
    Differentiable once.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    >>> sync_batch_norm(x, None, None, training=True, eps=0.0)  # one process
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not training or not spread or torch.distributed.get_world_size(process_group) == 1:
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if (running_mean is None) != (running_var is None):
        missing, given = ("running_mean", "running_var") if running_mean is None else ("running_var", "running_mean")
        raise InvalidArgument(missing, "None", f"a tensor as {given}")
    if running_mean is None:
        momentum = 0.0
    return _SyncBatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps, process_group)
