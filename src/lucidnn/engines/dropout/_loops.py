"""Dropout as few loops: axes that are one run, in every tensor and in the numbering of the elements, become one."""

from __future__ import annotations

import dataclasses
import math

from ...core.problem import Problem
from ...ops.dropout import number_strides

NUMBER = "number"  # the elements' numbers, as if they were a tensor


@dataclasses.dataclass(frozen=True)
class Loops:
    """Outermost first; `lanes` is the loop along which the first tensor's elements lie side by side (or nearest).

    Attributes
    ----------
    sizes : tuple of int
        At least one; none is 1 unless it is the only one.
    strides : dict of str to tuple of int
        For each role, elements from one point to the next along each loop.
    quads : int
        The loop whose points come in whole groups of four that share a call of Philox, -1 where there is none.
    """

    sizes: tuple[int, ...]
    strides: dict[str, tuple[int, ...]]
    quads: int

    @property
    def lanes(self) -> int:
        return len(self.sizes) - 1


def dropout_loops(problem: Problem) -> Loops:
    """The loops in the order of the output's memory.

    Examples
    --------
    >>> dropout_loops(Problem.parse("dropout_fwd x=f32[8,32,7,7] state=i64[2]")).sizes
    (12544,)
    >>> loops = dropout_loops(Problem.parse("dropout_fwd x=f32[8,32,6,6]@nhwc state=i64[2]"))
    >>> loops.sizes, loops.strides["number"], loops.quads
    ((8, 36, 32), (1152, 1, 36), 1)
    >>> dropout_loops(Problem.parse("dropout_fwd x=f32[8,32,6,6] state=i64[2] feature=1")).strides["number"]
    (1, 0)
    """
    first = problem[problem.inputs[0]]
    out = problem.outputs[0]
    strides = {role: t.strides for role, t in problem.items if role != "state"}
    strides[NUMBER] = number_strides(first, problem.op.feature)  # type: ignore[attr-defined]
    axes = [axis for axis, size in enumerate(first.shape) if size > 1]
    axes.sort(key=lambda axis: [-strides[role][axis] for role in (out, *strides)])
    groups: list[list[int]] = []
    for axis in axes:
        if groups and all(s[groups[-1][-1]] == first.shape[axis] * s[axis] for s in strides.values()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = tuple(math.prod(first.shape[axis] for axis in group) for group in groups) or (1,)
    merged = {role: tuple(s[group[-1]] for group in groups) or (0,) for role, s in strides.items()}
    numbers = merged[NUMBER]
    quads = numbers.index(1) if 1 in numbers else -1
    if quads >= 0 and len(sizes) > 1:
        whole = sizes[quads] % 4 == 0 and all(s % 4 == 0 for i, s in enumerate(numbers) if i != quads)
        quads = quads if whole else -1
    return Loops(sizes, merged, quads)
