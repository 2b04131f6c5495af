"""The matrices of Winograd's fast convolution, for any tile, and how much they magnify rounding errors.

``F(m, r)`` gives m neighbouring outputs of a filter with r taps from m + r - 1 inputs d with only m + r - 1 products::

    y = A ((G g) * (B d))          in two dimensions          Y = A ((G g G') * (B d B')) A'

with A of shape (m, n), G (n, r) and B (n, n), n = m + r - 1. The gradient of the filter is the same with r outputs and
a "filter" of m taps, F(r, m). Products of many channels are summed before the outer transform, which is then shared.

Method (Toom and Cook): outputs are the transpose of multiplying two polynomials by their values at n - 1 points and at
infinity. Few points have small powers and far-apart differences; which are chosen decides the error. Those here are
sums of few powers of two, so that the powers are exact; pairs a, -a let even and odd terms be shared. For six points
0, 5/8, -5/8, 3/2, -3/2 and infinity err 2.4 times less than the usual 0, 1, -1, 2, -2 and infinity (measured, and
that is nearly what `amplification` says).

After Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016; Barabasz et al., "Error analysis and
improving the accuracy of Winograd convolution for deep neural networks", 2020; Alam et al., "Winograd convolution for
deep neural networks: efficient point selection", 2022.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

Matrix = tuple[tuple[float, ...], ...]


def _pairs(*points: Fraction | int) -> tuple[Fraction, ...]:
    """Zero, then every point and its negative."""
    return (Fraction(0), *(Fraction(sign * p) for p in points for sign in (1, -1)))


_HALF = Fraction(1, 2)
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: _pairs(),
    3: (*_pairs(), Fraction(1)),
    4: _pairs(1),
    5: (*_pairs(Fraction(3, 2)), _HALF),
    6: _pairs(Fraction(5, 8), Fraction(3, 2)),
    7: (*_pairs(Fraction(7, 8), 2), Fraction(3, 8)),
    8: _pairs(1, _HALF, 2),
}  # by m + r - 1; infinity is one more


@dataclasses.dataclass(frozen=True)
class Transforms:
    """The matrices of ``F(m, r)``, row by row: `A` (m, n) for the output, `B` (n, n) for the input, `G` (n, r)."""

    m: int
    r: int
    A: Matrix
    B: Matrix
    G: Matrix

    @property
    def n(self) -> int:
        """Points of an input tile along one axis."""
        return self.m + self.r - 1


def _product(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), lowest power first."""
    c = [Fraction(1)]
    for root in roots:
        c = [(c[i - 1] if i else 0) - root * (c[i] if i < len(c) else 0) for i in range(len(c) + 1)]
    return c


@functools.cache
def transforms(m: int, r: int) -> Transforms:
    """The matrices of ``F(m, r)``; m + r - 1 is 2 to 8.

    Examples
    --------
    >>> t = transforms(2, 3)
    >>> t.A
    ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, 1.0))
    >>> t.G
    ((-1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
    >>> d, g = (3.0, -1.0, 4.0, 1.0), (2.0, 0.0, -5.0)
    >>> dot = lambda u, v: sum(a * b for a, b in zip(u, v))
    >>> products = [dot(row, d) * dot(weights, g) for row, weights in zip(t.B, t.G)]
    >>> [dot(row, products) for row in t.A]  # 3*2 - 4*5 and -1*2 - 1*5
    [-14.0, -7.0]
    """
    points = POINTS[m + r - 1]
    others = [[p for p in points if p != point] for point in points]
    scales = [
        math.prod((point - p for p in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    a = [[float(p**i) for p in points] + [float(i == m - 1)] for i in range(m)]
    g = [[float(p**k / s) for k in range(r)] for p, s in zip(points, scales, strict=True)]
    g.append([float(k == r - 1) for k in range(r)])
    b = [[*map(float, _product(rest)), 0.0] for rest in others] + [[*map(float, _product(list(points)))]]
    a, b, g = (tuple(map(tuple, matrix)) for matrix in (a, b, g))
    return Transforms(m, r, a, b, g)


@functools.cache
def amplification(m: int, r: int, worst: bool = False) -> float:
    """How many times larger the products of ``F(m, r)`` are than the outputs they cancel to, in one dimension.

    For independent random inputs and filters: the root mean square of the terms of an output of the outer transform
    over that of the output. Rounding errors relative to the terms grow by that much relative to the output; in two
    dimensions by its square. Direct convolution has 1. With `worst` for the worst of the m outputs, else for all.

    Examples
    --------
    >>> [round(amplification(m, 3) ** 2, 1) for m in (2, 4, 6)]
    [1.7, 4.8, 20.6]
    >>> round(amplification(6, 3, worst=True) ** 2)
    46
    """
    t = transforms(m, r)
    products = [sum(x * x for x in g) * sum(x * x for x in b) for g, b in zip(t.G, t.B, strict=True)]
    squares = [sum(a * a * p for a, p in zip(row, products, strict=True)) / r for row in t.A]
    return math.sqrt(max(squares) if worst else sum(squares) / m)


def relative_error(
    tiles: tuple[tuple[int, int], ...], terms: float, roundoff: float = 2.0**-24, worst: bool = False
) -> float:
    """Expected ``|out - exact| / |exact|`` (Frobenius) of a Winograd convolution, before the output is rounded.

    Parameters
    ----------
    tiles : tuple of (int, int)
        (m, r) of each axis that is transformed.
    terms : float
        Products that are summed before the outer transform: channels of a filter, or tiles in the filter's gradient.
    roundoff : float
        Unit roundoff of the arithmetic, transforms and sums alike.
    worst : bool
        Of the outputs at the worst place of a tile.

    Returns
    -------
    float
        Some 1.5 roundoffs of the transforms and the product, and 0.3 of a sum for every sqrt(terms), both amplified.
        Measured errors on normal data are 0.65 to 0.85 of this.

    Examples
    --------
    >>> 1e-6 < relative_error(((4, 3), (4, 3)), 64) < 1.2e-6
    True
    """
    return math.prod(amplification(m, r, worst) for m, r in tiles) * roundoff * (1.5 + 0.3 * math.sqrt(terms))
