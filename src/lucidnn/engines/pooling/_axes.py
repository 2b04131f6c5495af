"""How the averaging engines see a problem: windows along three axes, strides, and global axes merged into one.

Where a window is a whole axis, and that axis and the one inside it lie in memory as one longer axis would, the two are
taken as that longer axis: a global pooling of dense planes has one long row a plane.
"""

from __future__ import annotations

import dataclasses

from ...core.problem import Problem
from ...ops.convolution import five_strides
from ...ops.pooling import WindowAxis, window_axes

UNIT = WindowAxis(1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes, windows and strides, spatial ones as (D, H, W).

    Examples
    --------
    >>> Windows.of(Problem.parse("adaptive_avg_pool_fwd x=f32[2,8,6,5] output_size=1")).axes[2].size
    30
    """

    N: int
    C: int
    axes: tuple[WindowAxis, WindowAxis, WindowAxis]
    strides: dict[str, tuple[int, ...]]  # by role, (N, C, D, H, W)

    @classmethod
    def of(cls, problem: Problem) -> Windows:
        x = problem[problem.op.x_role]  # type: ignore[attr-defined]
        strides = {role: list(five_strides(t)) for role, t in problem.items}
        large = [s for role, s in strides.items() if problem[role].shape == x.shape]
        axes = list(window_axes(problem))
        for outer, inner in ((1, 2), (0, 1), (0, 2)):
            a, b = axes[outer], axes[inner]
            follows = all(a.size == 1 or s[2 + outer] == s[2 + inner] * b.size for s in large)
            between = inner - outer == 1 or axes[1] == UNIT
            if _whole(a) and _whole(b) and follows and between:
                size = a.size * b.size
                axes[outer], axes[inner] = UNIT, WindowAxis(size, 1, size, size)
                for s in strides.values():
                    s[2 + outer] = 0
        return cls(x.shape[0], x.shape[1], tuple(axes), {r: tuple(s) for r, s in strides.items()})  # type: ignore

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of x, D, H, W."""
        d, h, w = (a.size for a in self.axes)
        return d, h, w

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of y, O, P, Q."""
        o, p, q = (a.count for a in self.axes)
        return o, p, q


def _whole(axis: WindowAxis) -> bool:
    """Whether there is one window, the axis itself."""
    return axis.count == 1 and axis.window == axis.size and not axis.before and not axis.after and axis.dilation == 1


def divisors(problem: Problem, axes: tuple[WindowAxis, WindowAxis, WindowAxis]) -> list[list[float]]:
    """What sums are divided by: the product of one number for the window along each axis.

    For power pooling that is the counted part of a whole window, and 1 for most.
    """
    op = problem.op
    divisor, norm = getattr(op, "divisor", 0), getattr(op, "norm", None)
    if divisor:
        ones = [[1.0] * a.count for a in axes[:2]]
        return [*ones, [float(divisor)] * axes[2].count]
    padding = norm is not None or getattr(op, "count_padding", False)
    found = []
    for a in axes:
        whole = a.window if norm is not None else 1
        found.append([(a.counted(q, padding) or whole) / whole for q in range(a.count)])
    return found
