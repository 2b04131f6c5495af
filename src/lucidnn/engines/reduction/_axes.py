"""A reduction as few loops: axes of one kind that are one run of memory in every tensor become one loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...core.problem import Problem

NUMBER = "number"  # a tensor that is not there: the place among the reduced points, which is linear in their indices


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop: its size, and for each role the elements from one point to the next (0 where it repeats)."""

    size: int
    strides: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The loops over what is kept and over what is reduced, each outermost first in the full tensor's memory.

    Examples
    --------
    >>> axes = Axes.of(Problem.parse("reduce_fwd x=f32[8,32,7,7]@nhwc mode=avg axes=2,3"))
    >>> [loop.size for loop in axes.kept], [loop.size for loop in axes.reduced], axes.reduced[0].strides
    ([8, 32], [49], {'x': 32, 'y': 0, 'number': 0})
    """

    kept: tuple[Loop, ...]
    reduced: tuple[Loop, ...]

    @classmethod
    def of(cls, problem: Problem) -> Axes:
        """None has size 1; a problem without points has loops of size 0."""
        op: Any = problem.op
        full = ("x",) if op.name == "reduce_fwd" else ("dx", "x")
        shape = problem[full[0]].shape
        strides: dict[str, list[int]] = {}
        for role, t in problem.items:
            if role in full:
                strides[role] = list(t.strides)
            else:
                left = iter(t.strides)
                strides[role] = [
                    (next(left) if op.keep or axis not in op.axes else 0) * (axis not in op.axes)
                    for axis in range(len(shape))
                ]
        strides[NUMBER], step = [0] * len(shape), 1
        for axis in reversed(op.axes) if "index" in problem.tensors else ():  # else nobody asks: more axes are one
            strides[NUMBER][axis], step = step, step * shape[axis]
        axes = [axis for axis, n in enumerate(shape) if n != 1]
        axes.sort(key=lambda axis: -strides[full[0]][axis])
        kinds = ([a for a in axes if a not in op.axes], [a for a in axes if a in op.axes])
        return cls(*(_merge(kind, shape, strides) for kind in kinds))

    @property
    def count(self) -> int:
        """Points that are kept."""
        return math.prod(loop.size for loop in self.kept)

    @property
    def points(self) -> int:
        """Points that make one of them."""
        return math.prod(loop.size for loop in self.reduced)


def _merge(axes: list[int], shape: tuple[int, ...], strides: dict[str, list[int]]) -> tuple[Loop, ...]:
    groups: list[list[int]] = []
    for axis in axes:
        if groups and all(s[groups[-1][-1]] == shape[axis] * s[axis] for s in strides.values()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return tuple(
        Loop(math.prod(shape[axis] for axis in group), {role: s[group[-1]] for role, s in strides.items()})
        for group in groups
    )
