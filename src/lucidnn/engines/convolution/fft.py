"""``conv.fft``: convolution in the frequency domain, each image transformed as a whole.

Method, memory and errors: `lucidnn.engines._fft`. Cost: three transforms and, for every frequency, the products of the
channels; the size of the filter hardly matters, so this is for large filters (of 15 x 15, of 100 taps in one
dimension) on images that are not much larger. 16-bit tensors are computed in float32 and rounded once. A stride saves
nothing, because the results between are computed too; more than three thrown away for one kept are refused. Mathieu,
Henaff and LeCun, "Fast training of convolutional networks through FFTs", 2013.
"""

from __future__ import annotations

import math

from ...core.engine import Config
from ...core.problem import Problem
from .. import _fft


class Fft(_fft.SpectralEngine):
    """All directions, one window."""

    name = "conv.fft"

    def refusals(self, problem: Problem) -> list[str]:
        r = _fft.require(problem)
        if not problem.is_empty:
            r.require(math.prod(problem.op.stride) <= 4, "strides whose product is at most 4", problem.op.stride)
            _fft.require_long_sums(r, _fft.whole(problem))
        return r

    def scheme(self, problem: Problem, config: Config) -> _fft.Scheme:
        return _fft.whole(problem)
