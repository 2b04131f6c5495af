"""A batch normalization as loops: the axes that are summed over and those that are not, as few of each as there can be.

Neighbouring axes that every tensor steps through as one run of memory become one. For NHWC tensors what is left is
(pixels; channels), for NCHW (images, pixels; channels), and for statistics per activation (images; channels and pixels
as one), so that one pair of kernels serves them all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from ...core.problem import Problem
from ...ops.batch_normalization import LARGE


@dataclasses.dataclass(frozen=True)
class View:
    """The loops of a problem, outermost first.

    Attributes
    ----------
    summed, kept : tuple of int
        Sizes of the axes that statistics are over, and of the others; at least one each.
    strides : dict of str to (tuple of int, tuple of int)
        For each role the steps along both kinds of axes. Roles of parameters have none along summed ones.
    """

    summed: tuple[int, ...]
    kept: tuple[int, ...]
    strides: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, problem: Problem) -> View:
        """The loops of a problem; for a combination the parts are what is summed over."""
        return _view(problem)

    @property
    def channels(self) -> int:
        """How many statistics there are of a kind."""
        return math.prod(self.kept)

    @property
    def values(self) -> int:
        """Values of a channel, M."""
        return math.prod(self.summed)

    @property
    def channels_inner(self) -> bool:
        """Whether a step to the next channel, not to the next value of one, is the short one in memory."""
        summed, kept = self.strides["x"]
        if self.kept[-1] == 1 or self.summed[-1] == 1:
            return self.kept[-1] > 1
        return kept[-1] < summed[-1]


@functools.lru_cache(maxsize=1024)
def _view(problem: Problem) -> View:
    if problem.op.name == "batch_norm_combine":
        shape = problem["means"].shape
        large, summed, kept = ("means", "m2s"), [0], [*range(1, len(shape))]
        order = "means"
    else:
        shape, order = problem["x"].shape, "x"
        large = LARGE
        spatial = problem.op.mode == "spatial"  # type: ignore[attr-defined]
        summed = [0, *range(2, len(shape))] if spatial else [0]
        kept = [1] if spatial else [*range(1, len(shape))]
    strides: dict[str, tuple[int, ...]] = {}
    for role, t in problem.items:
        if role in large:
            strides[role] = t.strides
        elif role not in ("factor", "count", "counts"):
            own = iter(t.strides)
            strides[role] = tuple(next(own) if axis in kept else 0 for axis in range(len(shape)))
    sums, channels = _merged(shape, summed, strides, order), _merged(shape, kept, strides, order)
    return View(
        tuple(math.prod(shape[axis] for axis in group) for group in sums) or (1,),
        tuple(math.prod(shape[axis] for axis in group) for group in channels) or (1,),
        {
            role: (tuple(s[g[-1]] for g in sums) or (0,), tuple(s[g[-1]] for g in channels) or (0,))
            for role, s in strides.items()
        },
    )


def _merged(shape: Sequence[int], axes: list[int], strides: dict[str, tuple[int, ...]], order: str) -> list[list[int]]:
    """Groups of axes that are one loop each, outermost first."""
    found: list[list[int]] = []
    for axis in sorted((a for a in axes if shape[a] > 1), key=lambda a: (-strides[order][a], a)):
        if found and all(s[found[-1][-1]] == shape[axis] * s[axis] for s in strides.values()):
            found[-1].append(axis)
        else:
            found.append([axis])
    return found
