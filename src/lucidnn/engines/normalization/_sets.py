"""Normalization problems as loops: which elements make a set, and where a scale or bias of each element lies.

The **inside** of a set is two nested loops, `a` outside and `b` inside, such that parameters go along one of them:
layer and RMS normalization have one long loop of `b` with a parameter each; a group is its channels by its points, in
the order in which memory has them. Everything else are the loops **outside**, one step of which is another set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ...core.descriptor import TensorDescriptor
from ...core.problem import Problem

FULL = ("x", "dy", "y", "dx")  # roles of the tensors that have x's shape


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop: how often, and by role how many elements a step is; ``parameter`` counts in logical order."""

    size: int
    steps: dict[str, int]

    def step(self, role: str) -> int:
        return self.steps.get(role, 0)


def merged(loops: Sequence[Loop]) -> list[Loop]:
    """Neighbouring loops, outermost first, that are one for every role become one; loops of one step fall away."""
    found: list[Loop] = []
    for loop in loops:
        if loop.size == 1:
            continue
        if found and all(found[-1].steps[role] == loop.size * loop.steps[role] for role in loop.steps):
            loop = Loop(found.pop().size * loop.size, loop.steps)
        found.append(loop)
    return found


@dataclasses.dataclass(frozen=True)
class Sets:
    """A problem in loops, outermost first; `channels` and `points` are a group's, each empty in the other operations.

    Attributes
    ----------
    outside : list of Loop
        Over the sets, with steps in the full tensors, the statistics and (groups) the parameters.
    inside : list of Loop
        Over the elements of a set in logical order; layer and RMS normalization.
    channels, points : list of Loop
        The channels of a group and the points of an image, merged each by itself.
    """

    outside: list[Loop]
    inside: list[Loop]
    channels: list[Loop]
    points: list[Loop]
    size: int  # elements of a set
    count: int  # sets
    parameters: int  # elements of a scale


def full_roles(problem: Problem) -> list[str]:
    """Roles of the tensors of x's shape, in the problem's order."""
    return [role for role, _ in problem.items if role in FULL]


def sets(problem: Problem) -> Sets:
    """The loops of a problem.

    Examples
    --------
    >>> s = sets(Problem.parse("layer_norm_fwd x=f32[4,3,8] scale=f32[8]"))
    >>> [loop.size for loop in s.outside], [loop.size for loop in s.inside]
    ([12], [8])
    >>> s = sets(Problem.parse("group_norm_fwd x=f32[4,6,5,5] groups=3"))
    >>> [loop.size for loop in s.outside], [loop.size for loop in s.points]
    ([4, 3], [25])
    """
    op, x = problem.op, problem["x"]
    full = full_roles(problem)
    tensors = {role: problem[role] for role in (*full, *op.statistics)}  # type: ignore[attr-defined]
    size = op.set_size(x)  # type: ignore[attr-defined]
    shape = op.parameter_shape(x)  # type: ignore[attr-defined]
    count = math.prod(x.shape) // size if size else 0

    def loop(axis: int, parameter: int) -> Loop:
        return Loop(x.shape[axis], {r: t.strides[axis] for r, t in tensors.items()} | {"parameter": parameter})

    if not op.name.startswith("group"):
        split = x.ndim - op.axes  # type: ignore[attr-defined]
        dense = TensorDescriptor("f32", shape).strides
        outside = merged([loop(axis, 0) for axis in range(split)])
        inner = [loop(split + i, dense[i]) for i in range(len(shape))]
        inner = [dataclasses.replace(one, steps=_only(one.steps, (*full, "parameter"))) for one in inner]
        return Sets(outside, merged(inner), [], [], size, count, math.prod(shape))
    each = x.shape[1] // op.groups  # type: ignore[attr-defined]
    images = {r: t.strides[0] for r, t in tensors.items()} | {"parameter": 0}
    across = {r: t.strides[1] * (each if r in full else 1) for r, t in tensors.items()} | {"parameter": each}
    outside = merged([Loop(x.shape[0], images), Loop(op.groups, across)])  # type: ignore[attr-defined]
    channel = {r: tensors[r].strides[1] for r in full} | {"parameter": 1}
    points = [Loop(x.shape[axis], {r: tensors[r].strides[axis] for r in full}) for axis in range(2, x.ndim)]
    return Sets(outside, [], merged([Loop(each, channel)]), merged(points), size, count, x.shape[1])


def _only(steps: dict[str, int], roles: Sequence[str]) -> dict[str, int]:
    return {role: steps[role] for role in roles}
