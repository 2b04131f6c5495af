"""Linear maps along one axis: which places of the input each place of the output is a weighted sum of.

Every resampling is such a map for each axis, and its gradient is the transposed maps. So kernels need to know one thing
only: for place j a first place of the input, and the weights from there on. Positions are worked out as the frameworks
do, in float32 (float64 for float64 tensors), which decides where ``nearest`` falls on a tie.

Examples
--------
>>> up = AxisMap.of(3, 6, "linear")
>>> up.first.tolist(), up.weights[:3].tolist()
([0, 0, 0, 1, 1, 2], [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75]])
>>> up.transposed().first.tolist(), up.transposed().weights.tolist()
([0, 1, 3], [[1.0, 0.75, 0.25, 0.0], [0.25, 0.75, 0.75, 0.25], [0.25, 0.75, 1.0, 0.0]])
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

MODES = ("nearest", "nearest-exact", "linear", "cubic", "area")
CUBIC, SMOOTH_CUBIC = -0.75, -0.5  # the cubic's slope parameter; the second one with antialiasing


def _cubic(distance: Any, a: float) -> Any:
    """Keys' cubic convolution kernel (1981)."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, np.where(d < 2, ((d - 5) * d + 8) * d * a - 4 * a, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class AxisMap:
    """``out[j] = sum over t of weights[j, t] * in[first[j] + t]``; a weight of 0 takes no part, whatever stands there.

    Attributes
    ----------
    size : int
        Places of the input.
    first : numpy.ndarray
        int64, one a place of the output; places with a weight other than 0 lie inside.
    weights : numpy.ndarray
        float64, (places of the output, most weights that one has).
    """

    size: int
    first: np.ndarray
    weights: np.ndarray

    @classmethod
    def gathered(cls, size: int, count: int, rows: Any, places: Any, weights: Any) -> AxisMap:
        """From (row, place, weight) triples; those of one row and place are added up."""
        used = weights != 0
        rows, places, weights = rows[used], places[used], weights[used]
        first, last = np.full(count, size), np.full(count, -1)
        np.minimum.at(first, rows, places)
        np.maximum.at(last, rows, places)
        first[last < 0] = 0
        taps = max(int((last - first).max(initial=0)) + 1, 1)
        table = np.zeros((count, taps))
        np.add.at(table, (rows, places - first[rows]), weights)
        return cls(size, first.astype(np.int64), table)

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(
        cls,
        size: int,
        count: int,
        mode: str,
        align_corners: bool = False,
        scale: float = 0.0,
        antialias: bool = False,
        double: bool = False,
    ) -> AxisMap:
        """Of a resampling from `size` to `count` places; `scale` is the factor that was asked for, 0 if a size was."""
        real: Any = np.float64 if double else np.float32
        j = np.arange(count)
        if align_corners:
            step = real(real(size - 1) / real(count - 1)) if count > 1 else real(0)
        else:
            step = real(1.0 / scale) if scale else real(size) / real(count)
        if mode == "area":
            start, end = j * size // count, -(-(j + 1) * size // count)
            window = np.arange(int((end - start).max(initial=1)))
            inside = start[:, None] + window < end[:, None]
            places, weights = start[:, None] + window, np.where(inside, 1.0 / (end - start)[:, None], 0.0)
        elif antialias:  # with the corners aligned only the step differs, as in the framework
            places, weights = _smooth(size, j, step, mode, real)
        elif mode.startswith("nearest"):
            if mode == "nearest":
                at = (step * j.astype(real)).astype(np.float32)
            else:
                at = np.maximum(step * (j.astype(real) + real(0.5)) - real(0.5), real(0)) + real(0.5)
            places = np.minimum(np.floor(at).astype(np.int64), size - 1)[:, None]
            weights = np.ones((count, 1))
        elif mode == "linear" and size == count:
            places, weights = j[:, None], np.ones((count, 1))
        else:
            at = step * j.astype(real) if align_corners else step * (j.astype(real) + real(0.5)) - real(0.5)
            if mode == "linear":
                at = np.maximum(at, real(0))
            near = np.minimum(np.floor(at).astype(np.int64), size - 1)
            t = np.clip(at - near.astype(real), 0, 1).astype(np.float64)
            if mode == "linear":
                places, weights = near[:, None] + [0, 1], np.stack([1 - t, t], 1)
            else:
                places, weights = near[:, None] + [-1, 0, 1, 2], _cubic(t[:, None] - [-1, 0, 1, 2], CUBIC)
            places = np.clip(places, 0, size - 1)
        rows = np.broadcast_to(j[:, None], places.shape)
        return cls.gathered(size, count, rows.ravel(), places.ravel(), weights.ravel())

    @functools.cached_property
    def taps(self) -> int:
        """Most weights that a place has."""
        return self.weights.shape[1]

    @functools.cached_property
    def is_pick(self) -> bool:
        """Whether each place is one of the input, unchanged."""
        return self.taps == 1 and bool((self.weights == 1).all())

    def transposed(self) -> AxisMap:
        """The gradient's map: from what were the outputs to what were the inputs."""
        rows, taps = np.nonzero(self.weights)
        return AxisMap.gathered(len(self.first), self.size, self.first[rows] + taps, rows, self.weights[rows, taps])


def _smooth(size: int, j: Any, step: Any, mode: str, real: Any) -> tuple[Any, Any]:
    """Places and weights where each output averages over as much of the input as it stands for."""
    half = real(0.5)
    reach = real(1 if mode == "linear" else 2) * max(step, real(1))
    center = step * (j.astype(real) + half)
    start = np.maximum((center - reach + half).astype(np.int64), 0)
    end = np.minimum((center + reach + half).astype(np.int64), size)
    window = np.arange(max(int((end - start).max(initial=1)), 1))
    places = start[:, None] + window
    distance = (places.astype(real) - center[:, None] + half).astype(np.float64) / max(float(step), 1.0)
    weights = np.maximum(1 - np.abs(distance), 0) if mode == "linear" else _cubic(distance, SMOOTH_CUBIC)
    weights = np.where(places < end[:, None], weights, 0.0)
    total = weights.sum(1, keepdims=True)
    return places, weights / np.where(total == 0, 1, total)
