"""Problems of rows that are reduced (softmax, cross-entropy) as few loops: the kept axes and the reduced ones.

Axes of each kind that are one run of memory in every tensor become one loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class RowLoops:
    """Two nests of loops, each outermost first and never empty.

    Attributes
    ----------
    kept, reduced : tuple of int
        Sizes; none is 1 unless it is the only one of its nest.
    kept_strides, reduced_strides : dict of str to tuple of int
        For each role, elements from one point to the next along each loop; 0 where it repeats.
    """

    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    kept_strides: dict[str, tuple[int, ...]]
    reduced_strides: dict[str, tuple[int, ...]]

    @property
    def rows(self) -> int:
        return math.prod(self.kept)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.reduced)

    @property
    def lanes_reduced(self) -> bool:
        """Whether neighbours in the memory of the first tensor lie along the reduction."""
        first = next(iter(self.kept_strides))
        if self.length == 1 or self.rows == 1:
            return self.rows == 1
        kept, reduced = self.kept_strides[first][-1], self.reduced_strides[first][-1]
        return reduced <= kept or (kept == 0 and reduced > 0)


def row_loops(shape: Sequence[int], strides: Mapping[str, Sequence[int]], axes: Sequence[int]) -> RowLoops:
    """The loops over a shape; `axes` are reduced, `strides` has every tensor's, the most important tensor first.

    Examples
    --------
    >>> loops = row_loops((8, 32, 7, 7), {"x": (1568, 49, 7, 1)}, (1,))
    >>> loops.kept, loops.reduced, loops.kept_strides["x"], loops.lanes_reduced
    ((8, 49), (32,), (1568, 1), False)
    >>> row_loops((8, 32, 7, 7), {"x": (1568, 1, 224, 32)}, (1, 2, 3)).reduced
    (1568,)
    """
    kept = _merged(shape, strides, [axis for axis in range(len(shape)) if axis not in axes])
    reduced = _merged(shape, strides, list(axes))
    return RowLoops(kept[0], reduced[0], kept[1], reduced[1])


def _merged(shape, strides, axes) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    axes = [axis for axis in axes if shape[axis] > 1]
    axes.sort(key=lambda axis: [-s[axis] for s in strides.values()])
    groups: list[list[int]] = []  # axes that are one loop, outermost first
    for axis in axes:
        if groups and all(s[groups[-1][-1]] == shape[axis] * s[axis] for s in strides.values()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = tuple(math.prod(shape[axis] for axis in group) for group in groups) or (1,)
    return sizes, {role: tuple(s[group[-1]] for group in groups) or (0,) for role, s in strides.items()}
