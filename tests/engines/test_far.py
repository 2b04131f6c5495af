"""Tensors that reach past 2^31 elements: a few elements of them, far apart, so that a 32-bit offset goes astray.

The memory is asked for and hardly touched on a CPU; on a GPU it is a few gigabytes for a moment.
"""

from __future__ import annotations

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.descriptor import DTYPES
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import GUARD, disagreement, fill, reference

FAR = 2**31 + 16
LINES = f"""
conv_fprop x=bf16[2,8,5,5]@({FAR},1,40,8) w=bf16[8,8,3,3]@nhwc padding=1
conv_fprop x=f16[1,8,3,5]@(1,1,{FAR // 2},8) w=f16[8,8,3,3] padding=1
conv_fprop x=f16[1,3,5,4]@(1,{FAR // 2},4,1) w=f16[8,3,3,3] padding=1
conv_fprop x=f16[1,8,5,5] w=f16[3,8,3,3]@({FAR // 2},9,3,1) padding=1
conv_fprop x=bf16[2,8,5,5]@nhwc w=bf16[8,8,3,3]@nhwc y=bf16[2,8,5,5]@({FAR},1,40,8) padding=1 act=relu
conv_fprop x=f16[1,2,2,3,3]@(1,9,{FAR},3,1) w=f16[4,2,2,2,2] y=f16[1,4,1,2,2]
conv_dgrad dy=bf16[2,8,5,5]@({FAR},1,40,8) w=bf16[8,8,3,3]@nhwc padding=1
conv_dgrad dy=f16[2,4,3,3] w=f16[4,3,3,3] dx=f16[2,3,6,6]@({FAR},36,6,1) padding=1 stride=2
conv_wgrad x=bf16[2,8,5,5]@({FAR},1,40,8) dy=bf16[2,8,5,5]@nhwc padding=1
conv_wgrad x=f16[2,8,5,5] dy=f16[2,4,5,5]@({FAR},25,5,1) padding=1
conv_wgrad x=f16[2,3,5,5] dy=f16[2,2,5,5] dw=f16[2,3,3,3]@({FAR},9,3,1) padding=1
conv_bgrad dy=f16[2,8,5,5]@({FAR},25,5,1)
max_pool_fwd x=f16[2,8,6,6]@({FAR},36,6,1) window=2
max_pool_fwd x=f16[2,8,6,6] y=f16[2,8,3,3]@({FAR},9,3,1) index=u8[2,8,3,3]@({FAR},9,3,1) window=2 index_type=u8
max_pool_bwd dy=f16[2,8,3,3]@({FAR},9,3,1) index=u8[2,8,3,3] dx=f16[2,8,6,6] window=2 index_type=u8
max_pool_bwd dy=f16[2,8,3,3] index=u8[2,8,3,3] dx=f16[2,8,6,6]@({FAR},36,6,1) window=2 index_type=u8
pointwise_fwd x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,6,6]@({FAR},36,6,1) act=relu
pointwise_bwd dy=f16[2,8,6,6] x=f16[2,8,6,6]@({FAR},36,6,1) dx=f16[2,8,6,6] act=relu
reduce_fwd x=f16[2,8,6]@({FAR},6,1) mode=max axes=1 index_type=i64
reduce_fwd x=f16[2,8,6]@({FAR},6,1) mode=add axes=0
reduce_bwd dy=f16[2,8] x=f16[2,8,6]@({FAR},6,1) y=f16[2,8] mode=norm2 axes=2
batch_norm_train_fwd x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,6,6]@({FAR},36,6,1) scale=f16[8] act=relu
batch_norm_train_fwd x=bf16[2,8,6,6]@({FAR},1,48,8) z=bf16[2,8,6,6]@({FAR},1,48,8) beta=1.0
batch_norm_infer_fwd x=f16[2,8,6,6]@({FAR},36,6,1) mean=f16[8] variance=f16[8]
batch_norm_bwd dy=f16[2,8,9]@({FAR},9,1) x=f16[2,8,9] mean=f16[8] inv_variance=f16[8] y=f16[2,8,9]@({FAR},9,1) act=relu
batch_norm_bwd dy=bf16[2,8,9] x=bf16[2,8,9]@({FAR},1,8) dx=bf16[2,8,9]@({FAR},1,8) mean=f16[8] inv_variance=f16[8]
layer_norm_fwd x=f16[2,8,6]@({FAR},6,1) y=f16[2,8,6]@({FAR},6,1) scale=f16[6]
layer_norm_bwd dy=f16[2,8,6] x=f16[2,8,6]@({FAR},6,1) mean=f32[2,8,1] inv_variance=f32[2,8,1] dx=f16[2,8,6]@({FAR},1,8)
rms_norm_fwd x=f16[6,2]@(1,{FAR}) scale=f16[2]
rms_norm_bwd dy=f16[2,6]@({FAR},1) x=f16[2,6] inv_variance=f32[2,1] scale=f16[6]
group_norm_fwd x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,6,6]@({FAR},36,6,1) groups=2 act=relu
group_norm_bwd dy=f16[2,8,9]@({FAR},1,8) x=f16[2,8,9] mean=f32[2,4] inv_variance=f32[2,4] groups=4
lrn_fwd x=f16[2,8,6]@({FAR},6,1) y=f16[2,8,6]@({FAR},1,8)
lrn_bwd dy=f16[2,8,6] x=f16[2,8,6]@({FAR},6,1) dx=f16[2,8,6]@({FAR},6,1)
lp_normalize_fwd x=f16[2,8,6]@({FAR},6,1) y=f16[2,8,6]@({FAR},1,8)
lp_normalize_bwd dy=bf16[6,2]@(1,{FAR}) x=bf16[6,2] norm=f32[6,1] dx=bf16[6,2]@(1,{FAR})
softmax_fwd x=f16[2,8,6]@({FAR},6,1) y=f16[2,8,6]@({FAR},1,8)
softmax_fwd x=f16[6,2]@(1,{FAR}) axes=1 log=1
softmax_bwd y=f16[2,8,6]@({FAR},6,1) dy=f16[2,8,6] dx=f16[2,8,6]@({FAR},6,1) axes=2
cross_entropy_fwd x=f16[2,8,6]@({FAR},6,1) target=i64[2,6]
cross_entropy_bwd dy=f16[] x=f16[2,2]@(1,{FAR}) target=i64[2] stats=f32[2] total=f32[] dx=f16[2,2]@({FAR},1)
dropout_fwd x=f16[2,8,6]@({FAR},6,1) state=i64[2] y=f16[2,8,6]@({FAR},6,1)
dropout_bwd dy=f16[2,8,8]@({FAR},1,8) state=i64[2] dx=f16[2,8,8]@({FAR},1,8)
resample_fwd x=f16[2,8,6,6]@({FAR},36,6,1) size=9,12 mode=linear
resample_fwd x=f16[2,8,6,6] y=f16[2,8,12,12]@({FAR},1,96,8) size=12,12
resample_bwd dy=f16[2,8,12,12]@({FAR},144,12,1) size=6,6 mode=linear
shuffle x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,2,12,12]@({FAR},144,12,1) kind=pixel_shuffle factor=2
unfold_fwd x=f16[2,3,6,6]@({FAR},36,6,1) y=f16[2,27,16]@({FAR},16,1) window=3
unfold_bwd dy=f16[2,27,16]@({FAR},16,1) dx=f16[2,3,6,6]@({FAR},36,6,1) size=6 window=3
grid_sample_fwd x=f16[2,3,6,6]@({FAR},36,6,1) grid=f16[2,3,3,2]
grid_sample_bwd dy=f16[2,3,3,3] x=f16[2,3,6,6]@({FAR},36,6,1) grid=f16[2,3,3,2]@({FAR},6,2,1)
avg_pool_fwd x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,3,3]@({FAR},1,24,8) window=2
avg_pool_bwd dy=f16[2,8,3,3]@({FAR},9,3,1) dx=f16[2,8,6,6]@({FAR},36,6,1) window=3 stride=2 padding=1
lp_pool_fwd x=f16[2,8,6,6]@({FAR},1,48,8) window=2
lp_pool_bwd dy=f16[2,8,3,3] x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,3,3]@({FAR},9,3,1) window=2
adaptive_avg_pool_fwd x=f16[2,8,6,6]@({FAR},36,6,1) output_size=1
adaptive_avg_pool_bwd dy=f16[2,8,4,4] dx=f16[2,8,6,6]@({FAR},36,6,1)
adaptive_max_pool_fwd x=f16[2,8,6,6]@({FAR},36,6,1) output_size=4
adaptive_max_pool_fwd x=f16[2,8,6,6]@({FAR},1,48,8) output_size=1
adaptive_max_pool_bwd dy=f16[2,8,4,4]@({FAR},16,4,1) index=i64[2,8,4,4] dx=f16[2,8,6,6]@({FAR},36,6,1)
max_unpool_fwd x=f16[2,8,3,3]@({FAR},9,3,1) index=i64[2,8,3,3] y=f16[2,8,6,6]@({FAR},36,6,1) output_size=6
max_unpool_bwd dy=f16[2,8,6,6]@({FAR},36,6,1) index=i64[2,8,3,3] dx=f16[2,8,3,3]@({FAR},9,3,1)
transform_tensor x=f16[2,8,6,6]@({FAR},36,6,1) y=f16[2,8,6,6]@nhwc
transform_tensor x=f16[2,8,6,6] y=f16[2,32,4,4]@({FAR},16,4,1) fold=2,2 padding=0,0,1,1
transform_tensor x=f16[2,8,4,4]@({FAR},1,32,8) y=f16[2,2,6,6]@({FAR},36,6,1) fold=2,2 unfold=1 padding=0,0,-1,-1
""".strip().splitlines()
TARGETS = {
    "cpu": Target.parse("cpu"),
    "cuda": Target.of("cuda") if torch.cuda.is_available() else Target.parse("cuda:sm_90"),
}


def cases(kind: str) -> list:
    return [
        pytest.param(engine, problem, id=f"{engine.name} {problem.text.rpartition(' on=')[0]}")
        for problem in (Problem.parse(line, TARGETS[kind]) for line in LINES)
        for engine in registry.for_operation(problem.op.name)
        if kind in engine.targets and "reference" not in engine.notes and not engine.reasons(problem)
    ]


def far(t, device) -> torch.Tensor:
    """A tensor of this description in memory that nobody has written to."""
    buffer = torch.empty(t.span * t.itemsize + 2 * GUARD, dtype=torch.uint8, device=device)
    flat = buffer[GUARD : GUARD + t.span * t.itemsize].view(getattr(torch, DTYPES[t.dtype][0]))
    return torch.as_strided(flat, t.shape, t.strides)


def check(engine, problem: Problem, device: torch.device) -> None:
    tensors = {role: far(t, device) for role, t in problem.items}
    inputs = {role: tensors[role] for role in problem.inputs}
    fill(problem, inputs, seed=2)
    for role in problem.outputs:
        tensors[role].fill_(float("nan") if tensors[role].is_floating_point() else 99)
    config = engine.configs(problem)[0]
    size = engine.workspace_size(problem, config)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    engine.build(problem, config)(tuple(tensors.values()), workspace)
    outputs = {role: tensors[role] for role in problem.outputs}
    assert disagreement(problem, outputs, reference(problem, inputs, device))[1] == ""


@pytest.mark.parametrize("engine, problem", cases("cpu"))
def test_far_on_a_cpu(engine, problem):
    check(engine, problem, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("engine, problem", cases("cuda"))
def test_far_on_a_gpu(engine, problem):
    check(engine, problem, torch.device("cuda"))
    torch.cuda.empty_cache()


def test_every_family_goes_far():
    for kind in TARGETS:
        taken = {case.values[1].op.name for case in cases(kind)}
        assert taken == {line.split()[0] for line in LINES}, kind
