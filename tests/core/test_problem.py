"""Problems: the line and the object say the same, whatever is left out; every committed problem file reads."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from lucidnn import Problem, read_problems
from lucidnn.core.operation import Operation, lookup
from lucidnn.core.target import Target

FILES = sorted((Path(__file__).resolve().parents[2] / "problems").glob("*.txt"))
ON = " on=cuda:sm_90:132"

WRITTEN_OUT = {
    "conv_fprop x=f32[2,4,6,6] w=f32[8,4,3,3]":
        "conv_fprop x=f32[2,4,6,6]@nchw w=f32[8,4,3,3]@nchw y=f32[2,8,4,4]@nchw",
    "conv_fprop w=f32[8,4,3,3] stride=1,1 dilation=1 x=f32[2,4,6,6] padding=0,0:0 groups=1 alpha=1 math=ieee":
        "conv_fprop x=f32[2,4,6,6]@nchw w=f32[8,4,3,3]@nchw y=f32[2,8,4,4]@nchw",
    "conv_fprop x=bf16[2,4,6,6]@nhwc w=bf16[8,4,3,3] padding=1:2,3 stride=2 act=elu:0.5":
        "conv_fprop x=bf16[2,4,6,6]@nhwc w=bf16[8,4,3,3]@nchw y=bf16[2,8,4,5]@nhwc "
        "stride=2,2 padding=1:2,3 act=elu:0.5",
    "conv_fprop x=bf16[2,4,6,6] w=bf16[8,4,3,3]@nhwc bias=f32[8] math=tf32":
        "conv_fprop x=bf16[2,4,6,6]@nchw w=bf16[8,4,3,3]@nhwc bias=f32[8] y=bf16[2,8,4,4]@nhwc",
    "conv_fprop x=bf16[2,4,6,6] w=bf16[8,4,3,3] math=tf32":
        "conv_fprop x=bf16[2,4,6,6]@nchw w=bf16[8,4,3,3]@nchw y=bf16[2,8,4,4]@nchw",
    "conv_dgrad dy=f32[2,8,4] w=f32[8,2,3] stride=2 groups=2":
        "conv_dgrad dy=f32[2,8,4]@ncw w=f32[8,2,3]@ncw dx=f32[2,4,9]@ncw stride=2 groups=2",
    "conv_wgrad x=f32[2,4,9] dy=f32[2,8,4] stride=2 groups=2 z=f32[8,2,2] beta=1":
        "conv_wgrad x=f32[2,4,9]@ncw dy=f32[2,8,4]@ncw z=f32[8,2,2]@ncw dw=f32[8,2,2]@ncw stride=2 groups=2 beta=1.0",
    "conv_bgrad dy=f32[2,8]": "conv_bgrad dy=f32[2,8]@nc db=f32[8]",
    "max_pool_fwd x=f32[2,8,7,7]@nhwc window=3 stride=2 padding=1 index_type=u8":
        "max_pool_fwd x=f32[2,8,7,7]@nhwc y=f32[2,8,4,4]@nhwc index=u8[2,8,4,4]@nhwc window=3,3 stride=2,2 padding=1,1 "
        "index_type=u8",
    "max_pool_fwd x=f32[2,8,7] window=2 index_type=none ceil_mode=1":
        "max_pool_fwd x=f32[2,8,7]@ncw y=f32[2,8,4]@ncw window=2 ceil_mode=1 index_type=none",
    "pointwise_fwd x=f32[5] act=relu": "pointwise_fwd x=f32[5] y=f32[5] act=relu",
    "pointwise_fwd x=f32[5,3]@(1,5) act=relu": "pointwise_fwd x=f32[5,3]@(1,5) y=f32[5,3]@(1,5) act=relu",
    "pointwise_bwd dy=f32[5,3] x=f32[5,3]@(9,1) act=relu":
        "pointwise_bwd dy=f32[5,3]@nc x=f32[5,3]@(9,1) dx=f32[5,3]@nc act=relu",
}  # fmt: skip


@pytest.mark.parametrize("line", WRITTEN_OUT)
def test_what_is_left_out_is_filled_in(line):
    assert str(Problem.parse(line + ON)) == WRITTEN_OUT[line] + ON


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_line_of_every_file_comes_back(file):
    problems = read_problems(file, Target.parse("cuda:sm_90"))
    assert problems
    for p in problems:
        again = Problem.parse(str(p))
        assert again == p and hash(again) == hash(p) and str(again) == str(p)
        assert p.flops >= 0 and p.bytes >= 0 and isinstance(p.tuning_key, str)
        if all(t.layout != "strided" for _, t in p.items):
            assert Problem.parse(p.tuning_key).op == p.op, "the tuning key is a problem line too"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_no_line_is_there_twice(file):
    lines = [str(p) for p in read_problems(file, Target.parse("cuda:sm_90"))]
    assert sorted(set(lines)) == sorted(lines)


def test_where_the_target_comes_from():
    line = "conv_bgrad dy=f32[2,8]"
    assert Problem.parse(line).target.kind == "cpu"
    assert Problem.parse(line, Target.parse("cuda:sm_80")).target.arch == "sm_80"
    assert Problem.parse(line + ON, Target.parse("cuda:sm_80")).target.arch == "sm_90"


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_problems_can_be_copied_and_sent(through):
    p = Problem.parse("conv_fprop x=f32[2,4,6,6] w=f32[8,4,3,3] act=relu")
    assert p.inputs == ("x", "w") and p.outputs == ("y",) and p["y"].shape == (2, 8, 4, 4) and p.flops
    q = through(p)
    assert q == p and q.outputs == ("y",) and str(q) == str(p)


def test_problems_cannot_be_changed():
    p = Problem.parse("conv_fprop x=f32[2,4,6,6] w=f32[8,4,3,3]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.math = "tf32"
    with pytest.raises(TypeError):
        p.tensors["x"] = p["y"]


def test_tuning_key_buckets_the_batch_and_nothing_else():
    def key(n, c=4, extra=""):
        return Problem.parse(f"conv_fprop x=f32[{n},{c},6,6] w=f32[8,{c},3,3]{extra}").tuning_key

    assert key(5) == key(7) == key(8) and key(8) != key(9) and key(9) == key(16)
    assert key(1) != key(2) and key(8, 4) != key(8, 5) and key(8) != key(8, extra=" padding=1")
    assert "on=" not in key(8)
    assert key(0) == key(1)  # no element: any row will do


def test_counts_of_a_convolution():
    p = Problem.parse("conv_fprop x=f32[2,4,6,6] w=f32[8,2,3,3] groups=2")
    assert p.flops == 2 * (2 * 8 * 4 * 4) * (2 * 3 * 3)
    assert p.bytes == 4 * (2 * 4 * 36 + 8 * 2 * 9 + 2 * 8 * 16)
    for line in (
        "conv_dgrad dy=f32[2,8,4,4] w=f32[8,2,3,3] groups=2",
        "conv_wgrad x=f32[2,4,6,6] dy=f32[2,8,4,4] groups=2",
    ):
        assert Problem.parse(line).flops == p.flops


def test_every_operation_is_described():
    """First words, roles and defaults are all there is to a line: none may clash with another's."""
    lookup("conv_fprop")
    for name, op in Operation.registry.items():
        words = [*op.inputs, *op.optional, *op.outputs, *op.codecs(), "alpha", "beta", "act", "math", "on"]
        assert len(set(words)) == len(words) and op.name == name
        assert set(op.batched) <= set(op.inputs + op.optional + op.outputs)
        assert op.__doc__ and (op.__module__.startswith("lucidnn.ops."))
