"""An elementwise problem with broadcasting as few loops: axes that are one run in every tensor become one loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...core.problem import Problem
from ...ops.elementwise import spread_strides

INDEX = "index"  # a tensor that is not there: the index along gen_index's axis


@dataclasses.dataclass(frozen=True)
class Loops:
    """The loops, outermost first in y's memory, at least one; for each role the elements from point to point.

    Examples
    --------
    >>> Loops.of(Problem.parse("elementwise_fwd x=f32[8,3,5] b=f32[5] mode=add"))
    Loops(sizes=(24, 5), strides={'x': (5, 1), 'b': (0, 1), 'y': (5, 1), 'index': (0, 0)})
    """

    sizes: tuple[int, ...]
    strides: dict[str, tuple[int, ...]]

    @property
    def rows(self) -> int:
        """Points of all loops but the innermost."""
        return math.prod(self.sizes[:-1])

    @classmethod
    def of(cls, problem: Problem) -> Loops:
        op: Any = problem.op
        shape = problem["y"].shape
        generates = op.mode == "gen_index"
        roles = [role for role, _ in problem.items if not (generates and role == "x")]
        strides = {role: spread_strides(problem[role], len(shape)) for role in roles}
        strides[INDEX] = tuple(int(generates and axis == op.axis) for axis in range(len(shape)))
        if 0 in shape:
            return cls((0,), dict.fromkeys(strides, (0,)))
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        axes.sort(key=lambda axis: [-strides[role][axis] for role in ("y", *roles)])
        groups: list[list[int]] = []
        for axis in axes:
            if groups and all(s[groups[-1][-1]] == shape[axis] * s[axis] for s in strides.values()):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        return cls(
            tuple(math.prod(shape[axis] for axis in group) for group in groups) or (1,),
            {role: tuple(s[group[-1]] for group in groups) or (0,) for role, s in strides.items()},
        )
