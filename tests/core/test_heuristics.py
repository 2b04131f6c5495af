"""The cost model: seconds that grow with work, the larger of arithmetic and traffic, and the tail of a wave."""

from __future__ import annotations

import pytest

from lucidnn.core.heuristics import LAUNCH, roofline
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target

GPU = Target.parse("cuda:sm_90:132")
BIG = Problem.parse("conv_fprop x=bf16[64,256,56,56]@nhwc w=bf16[256,256,3,3]@nhwc padding=1", GPU)


def test_the_larger_of_arithmetic_and_traffic():
    compute = BIG.flops / GPU.flops("bf16")
    traffic = BIG.bytes / GPU.bandwidth
    assert compute > traffic
    assert roofline(BIG, memory_efficiency=1.0) == pytest.approx(compute + LAUNCH["cuda"])
    assert roofline(BIG, flops=0.0, memory_efficiency=1.0) == pytest.approx(traffic + LAUNCH["cuda"])
    assert roofline(BIG, compute_efficiency=0.5) == pytest.approx(2 * compute + LAUNCH["cuda"])
    assert roofline(BIG, flops=0.0, bytes=0.0, launches=3) == pytest.approx(3 * LAUNCH["cuda"])


def test_the_type_of_the_arithmetic_counts():
    f32 = Problem.parse(str(BIG).replace("bf16", "f32"))
    tf32 = Problem.parse(str(f32).replace(" on=", " math=tf32 on="))
    assert roofline(BIG) < roofline(tf32) < roofline(f32)
    assert roofline(BIG, dtype="f32") > roofline(BIG)


@pytest.mark.parametrize("kind", ["cpu:avx2:4", "cuda:sm_80", "cuda:sm_100", "hip:gfx942"])
def test_more_work_is_more_seconds(kind):
    def seconds(n):
        line = f"conv_fprop x=f32[{n},64,28,28] w=f32[64,64,3,3] padding=1"
        return roofline(Problem.parse(line, Target.parse(kind)))

    assert seconds(0) == LAUNCH[kind.partition(":")[0]] or seconds(0) < 1e-4
    assert seconds(1) < seconds(8) < seconds(64) < 64.5 * seconds(1)
