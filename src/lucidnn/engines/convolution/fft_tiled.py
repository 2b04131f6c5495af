"""``conv.fft_tiled``: convolution in the frequency domain, images cut into overlapping windows (overlap-save).

Method, memory and errors: `lucidnn.engines._fft`. Cost: windows of L points give L - R' + 1 results for a filter that
reaches over R', so the transforms do not grow with the image and the filters have small spectra; what overlaps is
transformed twice. For filters of middle size (from 7 x 7 or 50 taps) on large images and long signals. The window is
the knob `tile`, one length an axis. Stride 1 only. Stockham, "High-speed convolution and correlation", 1966.
"""

from __future__ import annotations

from ...core.engine import Config
from ...core.problem import Problem
from .. import _fft


class FftTiled(_fft.SpectralEngine):
    """All directions, several windows."""

    name = "conv.fft_tiled"

    def refusals(self, problem: Problem) -> list[str]:
        r = _fft.require(problem)
        if not problem.is_empty:
            r.require(set(problem.op.stride) == {1}, "stride 1", problem.op.stride)
            if not r:
                found = _fft.tilings(problem)
                r.require(bool(found), "an image of more than one window", str(problem.items[0][1]))
                for scheme in found[:1]:
                    _fft.require_long_sums(r, scheme)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return [{"tile": scheme.lengths} for scheme in _fft.tilings(problem)]

    def scheme(self, problem: Problem, config: Config) -> _fft.Scheme:
        return _fft.tiled(problem, config["tile"])
