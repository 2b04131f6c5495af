"""Convolution in the frequency domain: images in several rounds, which small problems do not show otherwise."""

from __future__ import annotations

import pytest
import torch

from lucidnn.core.problem import Problem
from lucidnn.core.registry import get
from lucidnn.engines import _fft
from lucidnn.testing import verify

LINES = """
conv_fprop x=f32[5,6,21,40] w=f32[4,3,5,7] groups=2 padding=2 bias=f32[4] act=relu
conv_fprop x=bf16[3,6,90]@nwc w=bf16[6,1,7] groups=6 padding=6:0
conv_dgrad dy=f32[5,4,21,40]@nhwc w=f32[4,6,5,7] padding=2,3
conv_wgrad x=f32[5,6,21,40] dy=f32[5,4,21,40] dw=f32[4,3,5,7] groups=2 padding=2,3
conv_wgrad x=f64[3,6,90] dy=f64[3,6,90] dw=f64[6,1,7] z=f64[6,1,7] beta=1.0 groups=6 padding=6:0
""".strip().splitlines()


@pytest.fixture(params=[1, 2])
def rounds(request, monkeypatch):
    """Memory for one image or two a round."""
    caches = (_fft.whole, _fft._tiled, _fft.tilings)
    choose = _fft.Scheme.of.__func__
    monkeypatch.setattr(_fft.Scheme, "of", classmethod(lambda cls, p, axes: choose(cls, p, axes, request.param)))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("engine", ["conv.fft", "conv.fft_tiled"])
@pytest.mark.parametrize("line", LINES)
def test_images_in_rounds(engine, line, rounds):
    problem = Problem.parse(line + " on=cpu")
    engine = get(engine)
    assert isinstance(engine, _fft.SpectralEngine)
    assert engine.reasons(problem) == []
    for config in engine.configs(problem):
        assert 0 < engine.scheme(problem, config).images < problem.items[0][1].shape[0]
        assert verify(problem, engine, config, torch.device("cpu")).fault == ""
