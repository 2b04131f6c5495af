"""The CPU engines cut a problem into blocks by sizes meant for real caches; edge lines are too small to be cut at all.

Here the sizes are shrunk, so that small random problems have several blocks of everything: output pixels along each
axis, channels, filters, images, rows of the unfolded matrix, parts of the filter gradient, chunks of its reduction.
"""

from __future__ import annotations

import random

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.descriptor import contiguous_strides
from lucidnn.core.problem import Problem
from lucidnn.engines.convolution import direct, direct_wgrad, im2col_gemm, kn2row
from lucidnn.testing import verify

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
ENGINES = ("conv.direct", "conv.direct_wgrad", "conv.im2col_gemm")


@pytest.fixture
def small_blocks(monkeypatch):
    """Set block sizes from a random source; plans made with them are forgotten afterwards."""
    plans = (direct._plan, direct_wgrad._plan, im2col_gemm._layout)

    def shrink(rnd: random.Random) -> None:
        slab = rnd.choice([2_000, 20_000, 400_000])
        monkeypatch.setattr(direct, "SCRATCH_PIXELS", rnd.choice([16, 64, 256]))
        monkeypatch.setattr(direct, "PANEL_BYTES", rnd.choice([2_000, 20_000, 160_000]))
        monkeypatch.setattr(direct, "SLAB_BYTES", slab)
        monkeypatch.setattr(direct_wgrad, "SLAB_BYTES", slab)
        monkeypatch.setattr(direct_wgrad, "PIXELS", rnd.choice([8, 50, 192]))
        monkeypatch.setattr(direct_wgrad, "COPIES", rnd.choice([1, 1 << 20, 64 << 20]))
        monkeypatch.setattr(direct_wgrad, "CHUNK_ELEMENTS", rnd.choice([1, 20, 144]))
        monkeypatch.setattr(im2col_gemm, "MATRIX_BYTES", rnd.choice([1_000, 20_000, 32 << 20]))
        for module in (direct, direct_wgrad, im2col_gemm):
            monkeypatch.setattr(module.nb, "worthwhile", lambda operations, limit: limit)
        for plan in plans:
            plan.cache_clear()

    yield shrink
    for plan in plans:
        plan.cache_clear()


def tensor(rnd: random.Random, dtype: str, shape: list[int], output: bool = False) -> str:
    """A descriptor's text: dense in either layout, axes in any order with gaps, or an expanded axis."""
    sizes = f"{dtype}[{','.join(map(str, shape))}]"
    kind = rnd.randrange(6)
    if kind < 4:
        return f"{sizes}@{LAYOUTS[len(shape)][kind % 2]}"
    order = rnd.sample(range(len(shape)), len(shape))
    gaps = [shape[axis] + rnd.choice([0, 0, 1]) for axis in order]
    strides = dict(zip(order, contiguous_strides(tuple(gaps)), strict=True))
    if kind == 5 and not output:
        strides[rnd.randrange(len(shape))] = 0
    return f"{sizes}@({','.join(str(strides[axis]) for axis in range(len(shape)))})"


def draw(rnd: random.Random, dtype: str) -> Problem:
    while True:
        rank = rnd.choice([1, 2, 2, 2, 3])
        groups = rnd.choice([1, 1, 1, 2, 3])
        c = rnd.choice([1, 2, 3, 5, 16, 17, 20, 32, 40]) * groups
        k = rnd.choice([1, 3, 10, 16, 17, 32, 33, 50, 64]) * groups
        if rnd.random() < 0.2:  # depthwise
            groups = c = k = rnd.choice([2, 5, 16, 20, 32, 48, 96])
        sizes = [rnd.randint(1, {1: 60, 2: 20, 3: 8}[rank]) for _ in range(rank)]
        filters = [rnd.choice([1, 2, 3, 3, 4]) for _ in range(rank)]
        stride = [rnd.choice([1, 1, 2, 3]) for _ in range(rank)]
        dilation = [rnd.choice([1, 1, 2]) for _ in range(rank)]
        padding = [(rnd.randint(0, 3), rnd.randint(0, 3)) for _ in range(rank)]
        out = [
            (n + sum(p) - d * (f - 1) - 1) // s + 1
            for n, p, d, f, s in zip(sizes, padding, dilation, filters, stride, strict=True)
        ]
        if min(out) >= 1:
            break
    n = rnd.choice([1, 2, 3])
    shapes = {"x": [n, c, *sizes], "w": [k, c // groups, *filters], "y": [n, k, *out]}
    name, roles, target = rnd.choice(
        [
            ("conv_fprop", {"x": "x", "w": "w", "y": "y"}, "y"),
            ("conv_dgrad", {"dy": "y", "w": "w", "dx": "x"}, "x"),
            ("conv_wgrad", {"x": "x", "dy": "y", "dw": "w"}, "w"),
        ]
    )
    words = [name]
    words += [f"{role}={tensor(rnd, dtype, shapes[part], part == target)}" for role, part in roles.items()]
    words += [f"stride={','.join(map(str, stride))}", f"dilation={','.join(map(str, dilation))}", f"groups={groups}"]
    words.append("padding=" + ",".join(f"{a}:{b}" for a, b in padding))
    if rnd.random() < 0.3:
        words += [f"z={tensor(rnd, dtype, shapes[target])}", "beta=0.5"]
    if rnd.random() < 0.3:
        words.append("alpha=1.5")
    if name == "conv_fprop":
        words += rnd.choice([[], [f"bias={dtype}[{k}]"]]) + rnd.choice([[], ["act=relu"], ["act=gelu"]])
    return Problem.parse(" ".join([*words, f"on=cpu:generic:{rnd.choice([1, 2, 4, 8])}"]))


@pytest.mark.parametrize(
    "dtype, seed",
    [(dtype, seed) for dtype, n in (("f32", 6), ("f64", 2), ("f16", 2), ("bf16", 2)) for seed in range(n)],
)
def test_small_blocks(dtype, seed, small_blocks):
    rnd = random.Random(f"{dtype} {seed}")
    for _ in range(12):
        small_blocks(rnd)
        problem = draw(rnd, dtype)
        for engine in map(registry.get, ENGINES):
            if problem.op.name in engine.operations:
                assert not engine.reasons(problem)
                found = verify(problem, engine, engine.configs(problem)[0], torch.device("cpu"), seed)
                assert not found.fault, f"{engine.name} {problem}: {found.fault}"


@pytest.mark.parametrize(
    "line",
    [
        "conv_fprop x=f32[2,32,40,40] w=f32[64,32,3,3] padding=1",
        "conv_fprop x=f32[1,160,9,9]@nhwc w=f32[40,160,3,3]@nhwc padding=1 act=silu",
        "conv_fprop x=f32[1,3,70,70] w=f32[64,3,7,7] stride=2 padding=3",
        "conv_fprop x=bf16[1,24,6,20,20] w=bf16[40,24,3,3,3] padding=1",
        "conv_fprop x=f32[1,8,3000] w=f32[24,8,9] padding=4",
        "conv_dgrad dy=f32[2,64,20,20] w=f32[64,48,3,3] dx=f32[2,48,40,40] stride=2 padding=1",
        "conv_dgrad dy=f32[2,144,13,13] w=f32[144,16,5,5] padding=2",
        "conv_fprop x=f32[2,96,30,30] w=f32[96,1,7,7] padding=3 groups=96 bias=f32[96] act=relu",
        "conv_dgrad dy=f32[2,80,15,15]@nhwc w=f32[80,1,3,3] dx=f32[2,80,30,30]@nhwc stride=2 padding=1 groups=80",
        "conv_dgrad dy=f32[1,3,6,7] w=f32[3,1,3,4]@(48,1,8,2) stride=1,3 padding=2:1,0:3 dilation=2,2 groups=3",
        "conv_wgrad x=f32[2,70,30,30] dy=f32[2,70,15,15] dw=f32[70,1,3,3] stride=2 padding=1 groups=70",
        "conv_wgrad x=f32[3,48,26,26] dy=f32[3,64,26,26] padding=1",
        "conv_wgrad x=f32[5,160,7,7]@nhwc dy=f32[5,96,7,7]@nhwc dw=f32[96,160,3,3]@nhwc padding=1",
        "conv_wgrad x=f16[2,3,64,64] dy=f16[2,32,32,32] dw=f16[32,3,4,4] stride=2 padding=1",
    ],
)
def test_real_blocks(line):
    """A few problems that are cut with the sizes as they are."""
    problem = Problem.parse(line)
    for engine in map(registry.get, ENGINES):
        if problem.op.name in engine.operations:
            found = verify(problem, engine, engine.configs(problem)[0], torch.device("cpu"))
            assert not found.fault, f"{engine.name}: {found.fault}"


@pytest.mark.parametrize("operation", ["conv_fprop", "conv_wgrad"])
def test_nan_reaches_what_it_should_and_nothing_else(operation):
    """One NaN in x poisons the outputs whose sums it enters; padding and block edges carry it nowhere else."""
    line = {
        "conv_fprop": "conv_fprop x=f32[2,20,12,12] w=f32[40,20,3,3] padding=1 act=relu",
        "conv_wgrad": "conv_wgrad x=f32[2,20,12,12] dy=f32[2,40,12,12] padding=1",
    }[operation]
    problem = Problem.parse(line)
    first = torch.randn(problem["x"].shape)
    first[1, 7, 0, 5] = float("nan")
    second = torch.randn(problem[problem.inputs[1]].shape)
    out = problem[problem.outputs[0]]
    expected = torch.zeros(out.shape, dtype=torch.bool)
    if operation == "conv_fprop":
        expected[1, :, 0:2, 4:7] = True
    else:
        expected[:, 7, :2] = True  # it lies in the first row: no output pixel reads that with the last filter row
    for engine in map(registry.get, ENGINES):
        if operation in engine.operations:
            result = torch.empty(out.shape)
            size = engine.workspace_size(problem, {})
            engine.build(problem, {})((first, second, result), torch.empty(size, dtype=torch.uint8))
            assert torch.equal(result.isnan(), expected), engine.name


@pytest.mark.parametrize(
    "line",
    [
        "conv_fprop x=f32[2,20,9,11] w=f32[13,20,3,3] padding=5 dilation=5",
        "conv_fprop x=f64[1,9,12,7] w=f64[5,9,2,3] padding=0:3,4 dilation=1,4 stride=2,1",
        "conv_dgrad dy=f32[2,13,9,11] w=f32[13,20,3,3] padding=5 dilation=5",
        "conv_dgrad dy=f32[1,7,5,4,4] w=f32[7,10,2,2,3] dx=f32[1,10,7,8,8] padding=0,1,2 dilation=2,3,2 stride=1,2,2",
        "conv_wgrad x=f32[3,20,9,11] dy=f32[3,13,9,11] dw=f32[13,20,3,3] padding=5 dilation=5",
        "conv_wgrad x=f32[2,11,30] dy=f32[2,6,26] dw=f32[6,11,3] padding=10 dilation=12",
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1500, 1 << 20])
def test_taps_in_small_blocks(line, block_bytes, monkeypatch):
    monkeypatch.setattr(kn2row, "BLOCK_BYTES", block_bytes)
    kn2row._plan.cache_clear()
    problem = Problem.parse(f"{line} on=cpu:generic:2")
    try:
        engine = registry.get("conv.kn2row")
        assert not engine.reasons(problem)
        found = verify(problem, engine, {}, torch.device("cpu"), 1)
        assert not found.fault, found.fault
    finally:
        kn2row._plan.cache_clear()
