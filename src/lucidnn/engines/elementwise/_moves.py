"""A tensor transformation as nested loops over two tensors, with the axes on which a place may not exist.

A point of the loops is an element of y, which comes from an element of x or is padding. Folded axes have two loops, one
for blocks and one within them; on a padded axis the loops' indices add up to a coordinate in x, and where unfolded
blocks are cut off, to one in y: both may lie outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ...core.problem import Problem

FREE = 1 << 40  # size of an axis that needs no check: coordinates stay 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """`size` turns; elements from one to the next in each tensor; and what a turn adds to its axis' coordinates."""

    size: int
    x: int
    y: int
    z: int
    axis: int = -1  # -1: none that is checked
    in_x: int = 0
    in_y: int = 0


@dataclasses.dataclass(frozen=True)
class Axis:
    """Where coordinates start, and the sizes that they have to stay below."""

    x_start: int = 0
    x_size: int = FREE
    y_start: int = 0
    y_size: int = FREE


@dataclasses.dataclass(frozen=True)
class Moves:
    """The loops, outermost first in y, where both tensors start, and the checked axes."""

    loops: tuple[Loop, ...]
    axes: tuple[Axis, ...]
    x_start: int
    y_start: int
    z_start: int

    @classmethod
    def of(cls, problem: Problem) -> Moves:
        """The fewest loops of a problem.

        Examples
        --------
        >>> moves = Moves.of(Problem.parse("transform_tensor x=f32[8,3,5,5] padding=0,0,1,0"))
        >>> [(loop.size, loop.x, loop.y) for loop in moves.loops], moves.axes
        ([(24, 25, 35), (35, 1, 1)], (Axis(x_start=-5, x_size=25, y_start=0, y_size=1099511627776),))
        """
        axes: list[Axis] = []
        starts = [0, 0, 0]
        loops: list[Loop] = []
        for found, axis, base in _axes(problem):
            if axis is not None:
                axes.append(axis)
            for i, step in enumerate(base):
                starts[i] += step
            for loop in found:
                place = len(axes) - 1 if axis is not None else -1
                loops.append(dataclasses.replace(loop, axis=place) if place >= 0 else loop)
        merged = _merged(loops, axes)
        return cls(merged, tuple(axes), *starts)


def _axes(problem: Problem) -> Iterator[tuple[list[Loop], Axis | None, tuple[int, int, int]]]:
    """For each axis of the padded tensor: its loops, its check, and how far they start from the tensors' starts."""
    op: Any = problem.op
    x, y = problem["x"], problem["y"]
    xs, ys = _steps(x), _steps(y)
    zs = _steps(problem["z"]) if "z" in problem.tensors else (0,) * y.ndim
    pads = op.padding or ((0, 0),) * x.ndim
    factors = op.fold or (1,) * max(x.ndim - 2, 0)
    product = math.prod(factors)
    for k, (before, after) in enumerate(pads):
        padded = before > 0 or after > 0
        f = factors[k - 2] if k > 1 else 1
        # Channels of the folded tensor that lie between two elements of a block along this axis.
        between = math.prod(factors[k - 1 :]) if k > 1 else product if k == 1 else 1
        if not op.unfold:
            y_step = between if k == 1 else 1
            axis = Axis(x_start=-before, x_size=x.shape[k]) if padded else None
            found = [Loop((x.shape[k] + before + after) // f, f * xs[k], y_step * ys[k], y_step * zs[k], -1, f)]
            if f > 1:
                found.append(Loop(f, xs[k], between * ys[1], between * zs[1], -1, 1))
            yield found, axis, (-before * xs[k], 0, 0)
        elif k < 2:
            x_step = between if k == 1 else 1
            size = x.shape[k] // x_step
            axis = Axis(x_start=-before, x_size=size) if padded else None
            found = [Loop(size + before + after, x_step * xs[k], ys[k], zs[k], -1, 1)]
            yield found, axis, (-before * x_step * xs[k], 0, 0)
        else:
            first = -(before // f) if before % f == 0 else -before // f
            count = (x.shape[k] * f + after - 1) // f - first + 1
            at = f * first + before  # of the first block in y, perhaps before its start
            axis = None
            if padded or at or f * count != y.shape[k]:
                axis = Axis(first, x.shape[k], at, y.shape[k])
            found = [Loop(count, xs[k], f * ys[k], f * zs[k], -1, 1, f)]
            if f > 1:
                found.append(Loop(f, between * xs[1], ys[k], zs[k], -1, 0, 1))
            yield found, axis, (first * xs[k], at * ys[k], at * zs[k])


def _steps(t: Any) -> tuple[int, ...]:
    return tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True))


def _merged(loops: list[Loop], axes: list[Axis]) -> tuple[Loop, ...]:
    """Outermost first in y; loops that are one run everywhere are one."""
    kept = [loop for loop in loops if loop.size != 1]
    kept.sort(key=lambda loop: (-loop.y, -loop.x))
    merged: list[Loop] = []
    for loop in kept:
        last = merged[-1] if merged else None
        if last and loop.axis == -1 and _one_run(last, loop) and _scales(last, loops):
            merged[-1] = dataclasses.replace(loop, size=last.size * loop.size, axis=last.axis, in_x=last.in_x)
            if last.axis >= 0:  # the coordinate counts the inner loop's turns from now on
                axis = axes[last.axis]
                axes[last.axis] = dataclasses.replace(
                    axis, x_start=axis.x_start * loop.size, x_size=axis.x_size * loop.size
                )
        else:
            merged.append(loop)
    return tuple(merged) or (Loop(1, 0, 0, 0),)


def _scales(loop: Loop, loops: list[Loop]) -> bool:
    """Whether a loop is not checked, or alone makes up its axis' coordinate, turn by turn."""
    alone = sum(one.axis == loop.axis for one in loops) == 1
    return loop.axis == -1 or (alone and loop.in_x == 1 and loop.in_y == 0)


def _one_run(outer: Loop, inner: Loop) -> bool:
    return all(getattr(outer, t) == inner.size * getattr(inner, t) for t in "xyz")
