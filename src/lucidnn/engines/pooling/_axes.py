"""How the pooling engines see a problem: windows along three axes, strides, global axes merged into one, constants.

Where a window is a whole axis, and that axis and the one inside it lie in memory as one longer axis would, the two are
taken as that longer axis: a global pooling of dense planes has one long row a plane.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.engine import Config
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


def lanes_are_columns(g: Windows, role: str, width: int) -> bool:
    """Whether a GPU's neighbouring threads go along W: where a step along it is the shorter one in this tensor."""
    if g.C == 1:
        return True
    return width > 1 and g.strides[role][4] < g.strides[role][1]


def block_of_lanes(lanes: int) -> int:
    """The power of two, at most 256, that wastes least of the lanes; of equals the largest."""
    widest = min(1 << (lanes - 1).bit_length(), 256)
    fits = [n for n in (16, 32, 64, 128, 256) if n <= widest]
    return min(fits, default=widest, key=lambda n: (-(-lanes // n) * n, -n))


def shared_divisor(problem: Problem, axes: tuple[WindowAxis, WindowAxis, WindowAxis]) -> float:
    """What the sums of all windows are divided by where that is one number, else 0."""
    each = [set(numbers) for numbers in divisors(problem, axes)]
    if any(len(numbers) != 1 for numbers in each):
        return 0.0
    (d,), (h,), (w,) = each
    return d * h * w


def used_lines(group: int, window: WindowAxis) -> tuple[int, int]:
    """For `group` neighbouring windows: how many places they span, and four bits for each place, one for each window
    that has it among its points.

    Examples
    --------
    >>> used_lines(2, WindowAxis(9, 4, 3, 2))
    (5, 140049)
    >>> [140049 >> 4 * j & 15 for j in range(5)]
    [1, 1, 3, 2, 2]
    """
    longest = window.longest
    stride = window.stride or 0
    spread = (group - 1) * stride + window.dilation * max(longest - 1, 0) + 1
    bits = 0
    for v in range(group):
        for k in range(longest):
            bits |= 1 << 4 * (v * stride + k * window.dilation) + v
    return spread, bits


# What the averaging kernels on a GPU add up: the points, the points of a power sum with p = 1, squares, other powers.
AVERAGE, SUM, SQUARES, POWERS = 0, 1, 2, 3


def kind_of(norm: float | None) -> int:
    """Which of the four an exponent means; None stands for averages."""
    return AVERAGE if norm is None else {1.0: SUM, 2.0: SQUARES}.get(norm, POWERS)


def sign_of(norm: float | None) -> int:
    """1 for an even, -1 for an odd whole exponent, 0 for others."""
    if norm is None or norm != int(norm):
        return 0
    return 1 if norm % 2 == 0 else -1


def window_constants(g: Windows) -> dict[str, Any]:
    """The windows as a Triton kernel's constants; T, R and S are the longest ones where they differ."""
    found: dict[str, Any] = dict(zip("TRS", (a.longest for a in g.axes), strict=True))
    for axis, a in zip("DHW", g.axes, strict=True):
        found |= {f"STRIDE_{axis}": a.stride, f"PAD_{axis}": a.before, f"AFTER_{axis}": a.after}
        found |= {f"DILATION_{axis}": a.dilation, f"ADAPTIVE_{axis}": a.stride == 0}
    return found


def is_wide(problem: Problem, g: Windows, rows: int, lanes: int, config: Config) -> bool:
    """Whether some number of a kernel needs 64 bits."""
    edge = 4 * (config["BLOCK_R"] + config["BLOCK_L"])
    starts = max(a.size * a.count if not a.stride else a.count * a.stride + 2 * a.size for a in g.axes)
    return max(rows + edge, 2 * lanes + edge, starts + edge, *(t.span for _, t in problem.items)) >= 2**31


def float_type(problem: Problem) -> str:
    """Of numbers that take part in the sums: f32, or f64 for float64."""
    return "f64" if problem.items[0][1].dtype == "f64" else "f32"
