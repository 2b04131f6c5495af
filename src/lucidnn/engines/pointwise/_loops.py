"""Elementwise problems as few loops: axes that are one run of memory in every tensor become one axis."""

from __future__ import annotations

import dataclasses
import math

from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops of an elementwise problem, outermost first.

    Attributes
    ----------
    sizes : tuple of int
        At least one; none is 1 unless it is the only one.
    strides : dict of str to tuple of int
        For each role, elements from one point to the next along each loop; 0 where it repeats.
    """

    sizes: tuple[int, ...]
    strides: dict[str, tuple[int, ...]]

    @property
    def rows(self) -> int:
        """Points of all loops but the innermost."""
        return math.prod(self.sizes[:-1])


def merged(problem: Problem) -> Loops:
    """The loops in the order of the output's memory, merged as far as all tensors allow.

    A bias (one value a channel) is a tensor that repeats along all axes but 1.

    Examples
    --------
    >>> merged(Problem.parse("pointwise_fwd x=f32[8,32,7,7]")).sizes
    (12544,)
    >>> loops = merged(Problem.parse("pointwise_fwd x=f32[8,32,7,7] bias=f32[32]"))
    >>> loops.sizes, loops.strides["bias"]
    ((8, 32, 49), (0, 1, 0))
    """
    (out,) = problem.outputs
    shape = problem[out].shape
    strides = {role: t.strides for role, t in problem.items if role != "bias"}
    if "bias" in problem.tensors:
        step = problem["bias"].strides[0]
        strides["bias"] = tuple(step if axis == 1 else 0 for axis in range(len(shape)))
    if 0 in shape:
        return Loops((0,), dict.fromkeys(strides, (0,)))
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    axes.sort(key=lambda axis: [-strides[role][axis] for role in (out, *strides)])
    groups: list[list[int]] = []  # axes that are one loop, outermost first
    for axis in axes:
        if groups and all(s[groups[-1][-1]] == shape[axis] * s[axis] for s in strides.values()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return Loops(
        tuple(math.prod(shape[axis] for axis in group) for group in groups) or (1,),
        {role: tuple(s[group[-1]] for group in groups) or (0,) for role, s in strides.items()},
    )


OUTPUT = 32
"""Added to an activation's code where its slope is told from its output, by a formula of its own."""


def code_of(problem: Problem) -> int:
    """The number under which a kernel knows the problem's activation."""
    name = problem.epilogue.activation
    own = name in ("elu", "sigmoid", "tanh") and getattr(problem.op, "from_output", False)
    return ACTIVATIONS[name].code + (OUTPUT if own else 0)
