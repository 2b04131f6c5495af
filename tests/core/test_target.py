"""Targets are parsed without the hardware, written back in full, and refuse what is none."""

from __future__ import annotations

import os

import pytest
import torch

from lucidnn.core.errors import InvalidArgument
from lucidnn.core.target import Target

GOOD = {
    "cuda": "cuda:sm_90:132",
    "cuda:sm_80": "cuda:sm_80:108",
    "cuda:sm_90:114": "cuda:sm_90:114",
    "cuda:sm_100": "cuda:sm_100:148",
    "hip": "hip:gfx942:304",
    "hip:gfx90a": "hip:gfx90a:104",
    "cpu:avx2:8": "cpu:avx2:8",
    "cpu:neon:64": "cpu:neon:64",
}


@pytest.mark.parametrize("text", GOOD)
def test_parse(text):
    target = Target.parse(text)
    assert str(target) == GOOD[text] and Target.parse(str(target)) == target
    assert target.bandwidth > 0 and target.shared_memory > 0 and target.is_gpu == (target.kind != "cpu")
    for dtype in ("f64", "f32", "f16", "bf16"):
        assert target.flops(dtype) > 0
    assert target.flops("f32", "tf32") >= target.flops("f32")
    assert target.flops("bf16") >= target.flops("f32") or target.kind == "cpu"


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "cuda:90", "cuda:sm90", "cuda:gfx942", "hip:sm_90", "cpu:sm_90", "cpu:avx2:0", "cpu:avx2:x",
     "cpu:avx2:-1", "cuda:sm_90:1:2", "cuda:sm_x", "CUDA:sm_90", "cpu:avx9"],
)  # fmt: skip
def test_what_is_no_target(text):
    with pytest.raises(InvalidArgument, match="target: found"):
        Target.parse(text)


def test_an_architecture_not_listed_is_taken_for_its_nearest_older_relative():
    assert Target.parse("cuda:sm_87").bandwidth == Target.parse("cuda:sm_86").bandwidth
    assert Target.parse("cuda:sm_103").flops("bf16") == Target.parse("cuda:sm_100").flops("bf16")
    assert Target.parse("cuda:sm_70").bandwidth > 0 and Target.parse("hip:gfx1100").bandwidth > 0


def test_capability():
    assert [Target.parse(t).capability for t in ("cuda:sm_90", "cuda:sm_100", "hip", "cpu")] == [90, 100, 0, 0]


def test_of_a_device():
    here = Target.of("cpu")
    assert here == Target.of(torch.device("cpu")) and here.processors == torch.get_num_threads()
    assert Target.parse("cpu").arch == here.arch and Target.parse("cpu").processors == os.cpu_count()
    with pytest.raises(InvalidArgument, match="device: found meta; accepted: cpu or cuda"):
        Target.of("meta")


@pytest.mark.gpu
def test_of_a_gpu():
    target = Target.of("cuda")
    assert target.kind in ("cuda", "hip") and target == Target.of("cuda:0")
    assert target.processors == torch.cuda.get_device_properties(0).multi_processor_count
