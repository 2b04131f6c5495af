"""Every Triton engine's launches are compiled for four GPUs that are not there, and the machine code is looked at.

The default run takes the first config of representative problems; ``-m slow`` takes every config of many more.
Registers, spills and shared memory go into the test report as properties. Compiled kernels are kept by Triton, so a
second run is quick.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from lucidnn.core.problem import Problem
from lucidnn.core.registry import engines, failures, for_operation

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PRODUCTS = ("conv_gather", "conv_wgrad", "conv_wgrad_planes", "conv_tma")  # kernels that multiply matrices
TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942")

HOT = """
conv_fprop x={t}[64,256,56,56]@nhwc w={t}[256,256,3,3]@nhwc padding=1
conv_fprop x={t}[64,64,56,56]@nhwc w={t}[64,64,3,3]@nhwc bias={t}[64] act=relu padding=1
conv_fprop x={t}[64,256,56,56]@nhwc w={t}[64,256,1,1]@nhwc
conv_dgrad dy={t}[64,256,56,56]@nhwc w={t}[256,256,3,3]@nhwc padding=1
conv_dgrad dy={t}[64,128,28,28]@nhwc w={t}[128,128,3,3]@nhwc dx={t}[64,128,56,56]@nhwc stride=2 padding=1
conv_wgrad x={t}[64,256,56,56]@nhwc dy={t}[64,256,56,56]@nhwc dw={t}[256,256,3,3]@nhwc padding=1
conv_wgrad x={t}[64,256,56,56]@nhwc dy={t}[64,64,56,56]@nhwc dw={t}[64,256,1,1]@nhwc
""".strip().splitlines()

USUAL = """
conv_fprop x={t}[16,64,28,28]@{l} w={t}[96,64,3,3]@{l} bias={t}[96] act=silu padding=1
conv_fprop x={t}[16,3,32,32]@{l} w={t}[32,3,3,3]@{l} padding=1
conv_dgrad dy={t}[16,64,14,14]@{l} w={t}[64,32,3,3]@{l} dx={t}[16,32,28,28]@{l} stride=2 padding=1
conv_wgrad x={t}[16,32,28,28]@{l} dy={t}[16,64,28,28]@{l} dw={t}[64,32,3,3]@{l} padding=1
conv_dgrad dy={t}[2,16,5,5]@{l} w={t}[16,16,1,1] dx={t}[2,16,9,9]@{l} stride=2
""".strip().splitlines()

# Float32 on the matrix units: both operands go from memory to where these read them, past the registers.
DIRECT = {
    "conv.implicit_gemm_packed": """
conv_fprop x=f32[64,32,16,16] w=f32[64,32,3,3] bias=f32[64] padding=1 act=relu math=tf32
conv_dgrad dy=f32[64,64,16,16] w=f32[64,32,3,3] dx=f32[64,32,16,16] padding=1 math=tf32
conv_fprop x=f32[64,3,32,32] w=f32[32,3,3,3] padding=1 math=tf32
conv_fprop x=f32[64,256,56,56]@nhwc w=f32[256,256,3,3]@nhwc padding=1 math=tf32
conv_fprop x=bf16[64,64,28,28] w=bf16[96,64,3,3] padding=1
""",
    "conv.implicit_gemm_wgrad_packed": """
conv_wgrad x=f32[64,32,16,16] dy=f32[64,64,16,16] dw=f32[64,32,3,3] padding=1 math=tf32
conv_wgrad x=f32[64,3,32,32] dy=f32[64,32,32,32] dw=f32[32,3,3,3] padding=1 math=tf32
conv_wgrad x=f32[64,256,56,56]@nhwc dy=f32[64,256,56,56]@nhwc dw=f32[256,256,3,3]@nhwc padding=1 math=tf32
conv_wgrad x=bf16[64,32,14,14] dy=bf16[64,64,14,14] dw=bf16[64,32,3,3] padding=1
""",
    "conv.implicit_gemm_wgrad": """
conv_wgrad x=f32[64,32,16,16] dy=f32[64,64,16,16] dw=f32[64,32,3,3] padding=1 math=tf32
conv_wgrad x=f32[64,3,32,32] dy=f32[64,32,32,32] dw=f32[32,3,3,3] padding=1 math=tf32
""",
}

OTHERS = """
conv_bgrad dy=bf16[16,64,28,28]@nhwc
conv_bgrad dy=f32[16,64,28,28]
max_pool_fwd x=f32[16,32,32,32] window=2
max_pool_fwd x=bf16[16,32,33,32]@nhwc window=3 stride=2 padding=1 index_type=u8
max_pool_bwd dy=f32[16,32,16,16] index=i64[16,32,16,16] dx=f32[16,32,32,32] window=2
pointwise_fwd x=bf16[16,32,32,32]@nhwc bias=bf16[32] act=gelu
pointwise_fwd x=f64[16,32,33] act=tanh
pointwise_bwd dy=f32[16,32,32,32] x=f32[16,32,32,32] act=relu
reduce_fwd x=bf16[16,256,28,28]@nhwc mode=avg axes=2,3
reduce_fwd x=f32[64,3000] mode=max axes=1 index_type=i64
reduce_bwd dy=f32[64] x=f32[64,3000] mode=mul axes=1
batch_norm_train_fwd x=bf16[16,64,28,28]@nhwc scale=f32[64] running_mean=f32[64] running_variance=f32[64] act=relu
batch_norm_bwd dy=f32[16,64,28,28] x=f32[16,64,28,28] mean=f32[64] inv_variance=f32[64] bias=f32[64] act=silu
layer_norm_fwd x=bf16[512,4096] scale=bf16[4096] bias=bf16[4096]
layer_norm_bwd dy=bf16[512,4096] x=bf16[512,4096] mean=f32[512,1] inv_variance=f32[512,1] scale=bf16[4096]
rms_norm_bwd dy=f32[64,1000] x=f32[64,1000] inv_variance=f32[64,1] scale=f32[1000]
group_norm_fwd x=bf16[4,320,28,28]@nhwc scale=bf16[320] bias=bf16[320] groups=32 act=silu
group_norm_bwd dy=f32[4,64,28,28] x=f32[4,64,28,28] mean=f32[4,8] inv_variance=f32[4,8] scale=f32[64] groups=8
resample_fwd x=bf16[8,64,28,28]@nhwc size=56,56 mode=linear
resample_bwd dy=f32[8,16,56,56] size=28,28 mode=linear
shuffle x=bf16[8,64,28,28] kind=pixel_shuffle factor=2
unfold_fwd x=bf16[8,16,28,28] window=3 padding=1
unfold_bwd dy=f32[8,144,784] size=28 window=3 padding=1
grid_sample_fwd x=bf16[8,16,28,28] grid=bf16[8,28,28,2]
grid_sample_bwd dy=f32[8,16,28,28]@nhwc x=f32[8,16,28,28]@nhwc grid=f32[8,28,28,2]
lrn_fwd x=bf16[16,64,28,28]@nhwc
lrn_bwd dy=f32[8,64,28,28] x=f32[8,64,28,28]
divisive_norm_fwd x=bf16[8,64,28,28] means=bf16[8,64,28,28]
lp_normalize_fwd x=bf16[512,21000] scale=bf16[512,1]
lp_normalize_bwd dy=f32[8,64,28,28] x=f32[8,64,28,28] norm=f32[8,1,28,28] p=1.5
softmax_fwd x=bf16[512,4096]
softmax_fwd x=bf16[16,21001] axes=1 log=1
softmax_bwd y=f32[8,64,28,28] dy=f32[8,64,28,28] log=1
cross_entropy_fwd x=bf16[64,5001] target=i64[64]
cross_entropy_bwd dy=f32[] x=f32[64,5001] target=i64[64] stats=f32[64] weight=f32[5001] total=f32[] smoothing=0.1
dropout_fwd x=bf16[512,4096] state=i64[2] z=bf16[512,4096] beta=1.0 keep_mask=1
dropout_bwd dy=bf16[16,64,28,28]@nhwc state=i64[2]
avg_pool_fwd x=bf16[16,32,33,32]@nhwc window=3 stride=2 padding=1 count_padding=0
avg_pool_bwd dy=f32[16,32,16,16] dx=f32[16,32,32,32] window=2
lp_pool_fwd x=f32[16,32,32,32] window=3 stride=2 norm=3.0
lp_pool_bwd dy=bf16[16,32,16,16]@nhwc x=bf16[16,32,32,32]@nhwc y=bf16[16,32,16,16]@nhwc window=2
adaptive_avg_pool_fwd x=bf16[1,8,128,128] output_size=1
adaptive_avg_pool_bwd dy=bf16[16,32,5,5]@nhwc dx=bf16[16,32,32,32]@nhwc
adaptive_max_pool_fwd x=bf16[1,8,128,128] output_size=1
adaptive_max_pool_bwd dy=f32[16,32,5,5] index=i64[16,32,5,5] dx=f32[16,32,32,32]
max_unpool_fwd x=bf16[16,32,16,16]@nhwc index=i64[16,32,16,16]@nhwc output_size=32
max_unpool_bwd dy=f32[16,32,32,32] index=i64[16,32,16,16]
transform_tensor x=bf16[16,64,28,28] y=bf16[16,64,28,28]@nhwc
transform_tensor x=f32[16,3,56,56] y=f32[16,32,29,29] padding=0,0:5,1,1 fold=2,2
transform_tensor x=i8[16,64,28,28] y=i32[16,16,54,54] padding=0,0,-1,-1 fold=2,2 unfold=1
""".strip().splitlines()

MANY = """
conv_fprop x={t}[2,40,17,19]@{l} w={t}[72,40,5,5]@{l} z={t}[2,72,7,8]@{l} alpha=0.5 beta=2.0 stride=2 act=mish
conv_fprop x={t}[2,33,70]@{c} w={t}[20,33,9]@{c} stride=3 padding=4:2 dilation=2
conv_fprop x={t}[1,16,6,20,20]@{d} w={t}[24,16,3,3,3]@{d} padding=1 bias=f32[24] act=relu
conv_fprop x={t}[4,64,14,14]@{l} w={t}[64,16,3,3]@{l} groups=4 padding=1
conv_fprop x={t}[4,64,14,14]@{l} w={t}[64,1,3,3]@{l} groups=64 padding=1
conv_fprop x={t}[2,3,224,224]@{l} w={t}[64,3,7,7]@{l} stride=2 padding=3
conv_dgrad dy={t}[2,72,7,8]@{l} w={t}[72,40,5,5]@{l} dx={t}[2,40,17,19]@{l} stride=2
conv_dgrad dy={t}[1,24,6,10,10]@{d} w={t}[24,16,3,3,3]@{d} dx={t}[1,16,6,20,20]@{d} stride=1,2,2 padding=1
conv_dgrad dy={t}[4,64,14,14]@{l} w={t}[64,1,3,3]@{l} dx={t}[4,64,14,14]@{l} groups=64 padding=1
conv_wgrad x={t}[2,40,17,19]@{l} dy={t}[2,72,7,8]@{l} dw={t}[72,40,5,5]@{l} stride=2 alpha=0.5
conv_wgrad x={t}[1,16,6,20,20]@{d} dy={t}[1,24,6,20,20]@{d} dw=f32[24,16,3,3,3]@{d} padding=1
conv_wgrad x={t}[4,64,14,14]@{l} dy={t}[4,64,14,14]@{l} dw={t}[64,1,3,3]@{l} groups=64 padding=1
conv_wgrad x={t}[2,3,224,224]@{l} dy={t}[2,64,112,112]@{l} dw={t}[64,3,7,7]@{l} stride=2 padding=3
conv_fprop x={t}[70000,8,64,64]@{l} w={t}[8,8,3,3]@{l} padding=1
conv_wgrad x={t}[70000,8,64,64]@{l} dy={t}[70000,8,64,64]@{l} dw={t}[8,8,3,3]@{l} padding=1
""".strip().splitlines()

LAYOUTS = {"nhwc": ("nwc", "ndhwc"), "nchw": ("ncw", "ncdhw")}


def filled(lines: list[str], dtype: str, layout: str = "nhwc") -> list[str]:
    dtype, _, math = dtype.partition(" ")
    one, three = LAYOUTS[layout]
    return [f"{line.format(t=dtype, l=layout, c=one, d=three)} {math}".strip() for line in lines]


def triton_engines(line: str) -> list[str]:
    """Names of the Triton engines that list the line's operation (decided without importing them when collecting)."""
    from lucidnn.engines._triton.launch import TritonEngine

    return [e.name for e in for_operation(line.split()[0]) if isinstance(e, TritonEngine)]


def check(line: str, target: str, record_property, every_config: bool = False, hot: bool = False) -> None:
    from lucidnn.engines._triton.resources import assembler_log, resources

    problem = Problem.parse(f"{line} on={target}")
    names = triton_engines(line)
    assert names, f"no Triton engine for {line}: {failures()}"
    accepting = [engines()[name] for name in names if not engines()[name].reasons(problem)]
    assert accepting, "every Triton engine refuses"
    for engine in accepting:
        configs = engine.configs(problem)
        for config in configs if every_config else configs[:1]:
            for launch in engine.launches(problem, config):
                kernel = launch.compile(problem)
                facts = resources(kernel)
                record_property(f"{engine.name} {launch.kernel.__name__} {config}", str(facts))
                assert facts.shared <= problem.target.shared_memory, (config, facts)
                # where registers were spilled, copies of what was also stored are left over and mean nothing
                assert not facts.lost or facts.spills, "the assembler lost part of an address"
                multiplies = launch.kernel.__name__ in PRODUCTS
                if multiplies and expects_matrix_units(problem, launch.constexprs["PRECISION"]):
                    assert facts.matrix, (config, facts)
                if multiplies and target == "cuda:sm_90":  # an assembler was seen to take products out: zeros
                    written = len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"]))
                    assert facts.matrix.get("HGMMA", 0) >= written, (config, facts)
                if hot and multiplies:
                    assert facts.spills == 0, (config, facts)
                    assert "HGMMA" in facts.matrix and facts.async_copies > 0, (config, facts)
                    assert "C7515" not in assembler_log(kernel), "ptxas serialises the matrix instructions"


def expects_matrix_units(problem: Problem, precision: str) -> bool:
    """Where Triton has a matrix instruction for the type: float64 on some targets is left to the vector units."""
    dtype = problem.items[0][1].dtype
    return dtype in ("f16", "bf16") or precision == "tf32" or (dtype == "f64" and problem.target.arch == "sm_90")


@pytest.mark.parametrize("line", filled(HOT, "bf16") + filled(HOT[:1], "f16"))
def test_hot_kernels_on_hopper(line: str, record_property) -> None:
    check(line, "cuda:sm_90", record_property, hot=True)


@pytest.mark.parametrize("engine,line", [(e, line) for e, text in DIRECT.items() for line in text.strip().splitlines()])
def test_operands_pass_the_registers_by_on_hopper(engine: str, line: str) -> None:
    from lucidnn.engines._triton.resources import assembler_log, resources

    problem = Problem.parse(f"{line} on=cuda:sm_90")
    config = engines()[engine].configs(problem)[0]
    (product,) = [one for one in engines()[engine].launches(problem, config) if one.kernel.__name__ in PRODUCTS]
    kernel = product.compile(problem)
    facts = resources(kernel)
    assert "HGMMA" in facts.matrix and facts.async_copies > 0, facts
    assert facts.loop_stores == 0 and facts.spills == 0, facts
    assert "C7515" not in assembler_log(kernel), "ptxas serialises the matrix instructions"


# Tiles as large as they come, in each type and order of the result, which may be turned in shared memory.
LARGE = """
conv_fprop x=f32[4,256,64,64] w=f32[256,256,3,3] padding=2 dilation=2 math=tf32
conv_dgrad dy=f32[4,256,32,32]@nhwc w=f32[256,128,3,3] padding=1 math=tf32
conv_fprop x=f16[4,256,64,64] w=f16[256,256,3,3] bias=f16[256] act=silu padding=1
conv_fprop x=f16[4,256,32,32]@nhwc w=f16[256,256,3,3]@nhwc z=f16[4,256,32,32] beta=0.5 padding=1
""".strip().splitlines()


@pytest.mark.parametrize("line", LARGE)
def test_large_tiles_fit_into_shared_memory(line: str) -> None:
    problem = Problem.parse(f"{line} on=cuda:sm_90")
    for name in ("conv.implicit_gemm_tma", "conv.implicit_gemm", "conv.implicit_gemm_packed"):
        if engines()[name].reasons(problem):
            continue
        for config in engines()[name].configs(problem)[:3]:
            for launch in engines()[name].launches(problem, config):
                shared = launch.compile(problem).metadata.shared
                assert shared <= problem.target.shared_memory, (name, config, shared)


def test_a_lost_copy_is_seen() -> None:
    from lucidnn.engines._triton.resources import _lost

    code = """
        /*1430*/                   IMAD.HI.U32 R58, R68, 0x8421085, R70 ;
        /*1450*/                   IMAD.MOV.U32 R71, RZ, RZ, R23 ;
        /*1470*/                   MOV R71, R13 ;
        /*14a0*/                   IMAD.HI.U32 R68, R68, 0x8421085, R70 ;
    """
    assert _lost(code) == 1
    assert _lost(code.replace("MOV R71, R13", "IMAD.HI.U32 R57, R68, 0x8421085, R70")) == 0


FIRST = [
    *filled(USUAL, "bf16"),
    *filled(USUAL[:3:2], "f16", "nchw"),
    *filled(USUAL, "f32 math=tf32", "nchw"),
    *filled(USUAL[1:], "f32"),
    *filled(USUAL[1:], "f64"),
    *OTHERS,
]


def in_turn(lines: list[str]) -> list:
    """Every line for Hopper, every second one for one of the others in turn; the longer profile has what is left."""
    others = [target for target in TARGETS if target != "cuda:sm_90"]
    found = []
    for number, line in enumerate(lines):
        for target in TARGETS:
            usual = target in ("cuda:sm_90", others[number // 2 % len(others)] if number % 2 == 0 else "")
            marks = [] if usual else [pytest.mark.slow]
            found.append(pytest.param(line, target, id=f"{line}-{target}", marks=marks))
    return found


@pytest.mark.parametrize("line, target", in_turn(FIRST))
def test_first_config(line: str, target: str, record_property) -> None:
    check(line, target, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f32 math=tf32", "f64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(3600)
def test_every_config(layout: str, dtype: str, target: str, record_property) -> None:
    for line in filled(USUAL + MANY + HOT, dtype, layout):
        check(line, target, record_property, every_config=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("line", OTHERS)
def test_every_config_of_the_others(line: str, target: str, record_property) -> None:
    check(line, target, record_property, every_config=True)


def test_a_launch_names_every_parameter_once() -> None:
    from lucidnn.engines._triton.launch import Launch
    from lucidnn.engines.convolution.bias_grad_triton import conv_bias_grad_sum

    args = {"parts": None, "db": "db", "PARTS": 2, "K": 3}
    with pytest.raises(TypeError, match="missing {'db_stride'}"):
        Launch(conv_bias_grad_sum, (1,), args, {"BLOCK_S": 2, "BLOCK": 4})
    with pytest.raises(TypeError, match="unknown {'size'}"):
        Launch(conv_bias_grad_sum, (1,), {**args, "db_stride": 1, "size": 2}, {"BLOCK_S": 2, "BLOCK": 4})
    with pytest.raises(ValueError, match="grid"):
        Launch(conv_bias_grad_sum, (0,), {**args, "db_stride": 1}, {"BLOCK_S": 2, "BLOCK": 4})


def test_numbers_are_specialised() -> None:
    from lucidnn.engines._triton.launch import Real, Slice, specialise

    problem = Problem.parse("conv_bgrad dy=f16[2,3,4]%4 on=cuda:sm_90")
    found = [
        specialise(v, problem.tensors) for v in ("dy", "x", 24, 1, 2**31, 3, None, Slice(0, "f32"), Real(1.0, "f64"))
    ]
    assert found == [
        ("*fp16", 4), ("constexpr", 1), ("i32", 8), ("constexpr", 1), ("i64", 16), ("i32", 1), ("constexpr", 1),
        ("*fp32", 16), ("fp64", 1),
    ]  # fmt: skip
