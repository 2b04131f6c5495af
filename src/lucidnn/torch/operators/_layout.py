"""How the framework lays out a result, where its rule is not lucidnn's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.descriptor import TensorDescriptor, channels_last_strides, contiguous_strides
from ...core.errors import NotSupported
from ...functional._library import Described, last


def suggests_last(t: torch.Tensor) -> bool:
    """Whether the framework takes a tensor for channels-last when it lays out a result (`suggest_memory_format`).

    Unlike `last` it looks at the order of the strides only: slices of channels-last tensors count.

    Examples
    --------
    >>> x = torch.empty(2, 4, 6, 8).to(memory_format=torch.channels_last)
    >>> suggests_last(x), suggests_last(x[..., ::2]), suggests_last(x.contiguous()), suggests_last(x[0])
    (True, True, False, False)
    """
    shape, strides = t.shape, t.stride()
    if len(strides) not in (4, 5) or not 0 < strides[1] <= strides[-1] or 0 in shape:
        return False
    least = 0
    for axis in (1, *range(len(strides) - 1, 1, -1), 0):
        if strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * shape[axis]
    return True


def shape_only(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same looks without elements in memory: the framework is asked by it how it lays out a result."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


RULES: dict[str, Callable[[torch.Tensor], bool]] = {
    "first": lambda t: False,
    "suggested": suggests_last,
    "dense": last,
    # the framework's kernels for a GPU forget about it
    "suggested on a CPU": lambda t: not t.is_cuda and suggests_last(t),
}
"""Whether a result is channels-last, by the tensor that it follows."""


def laid_out(described: Described, rule: str, *, filled: bool = True) -> Described:
    """The same call with its outputs in the framework's layout, which follows the first tensor.

    Parameters
    ----------
    described : Described
    rule : str
        A key of `RULES`.
    filled : bool
        The framework refuses tensors without elements unless it is the batch that is empty.
    """
    op, given = described
    tensors = given["tensors"]
    first = next(iter(tensors.values()))
    if filled and 0 in first.shape[1:]:
        raise NotSupported("a tensor without elements")
    known = {role: TensorDescriptor.of(t) if isinstance(t, torch.Tensor) else t for role, t in tensors.items()}
    op = op.resolved(known)
    strides = channels_last_strides if RULES[rule](first) else contiguous_strides
    made = {
        role: TensorDescriptor(t.dtype, t.shape, strides(t.shape))
        for role, t in op.infer(known).items()
        if role not in known
    }
    return op, {**given, "tensors": {**tensors, **made}}


def following(describe: Callable[[Sequence[Any], Any], Described]) -> Callable[[Sequence[Any], Any], Described]:
    """The same describe function with a key of `RULES` as its first attribute."""

    def laid(tensors: Sequence[Any], attributes: Any) -> Described:
        rule, *rest = attributes
        return laid_out(describe(tensors, rest), rule)

    return laid
