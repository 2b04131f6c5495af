"""The proof itself is tested: each way in which an engine can be wrong is caught, by the right words."""

from __future__ import annotations

import pytest
import torch

from fakes import Fake
from lucidnn.core.descriptor import TensorDescriptor
from lucidnn.core.problem import Problem
from lucidnn.testing import GUARD, allocate, disagreement, empty, fill, reference, tolerance, verify

CPU = torch.device("cpu")
PLAIN = Problem.parse("pointwise_fwd x=f32[4,6] alpha=2.0")
SLICED = Problem.parse("pointwise_fwd x=f32[4,6]@(20,2)%4 y=f32[4,6]@(20,2)%4 alpha=2.0")


def right(x, y, workspace):
    y.copy_(x * 2)


def forgets_one(x, y, workspace):
    y[:3].copy_(x[:3] * 2)
    y[3, :5].copy_(x[3, :5] * 2)


def off_by_little_in_one(x, y, workspace):
    right(x, y, workspace)
    y[2, 3] += 1e-5


def past_the_end(x, y, workspace):
    right(x, y, workspace)
    torch.as_strided(y, (1,), (1,), y.storage_offset() + 3 * y.stride(0) + 5 * y.stride(1) + 1).fill_(0.0)


def before_the_start(x, y, workspace):
    right(x, y, workspace)
    torch.as_strided(y, (1,), (1,), y.storage_offset() - 1).fill_(0.0)


def into_the_gap(x, y, workspace):
    right(x, y, workspace)
    torch.as_strided(y, (1,), (1,), y.storage_offset() + 1).fill_(0.0)


def changes_its_input(x, y, workspace):
    right(x, y, workspace)
    x[0, 0] = 7.0


def writes_beside_its_input(x, y, workspace):
    right(x, y, workspace)
    torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).fill_(0.0)


def reads_past_its_input(x, y, workspace):
    wide = torch.as_strided(x, (4, 7), x.stride(), x.storage_offset())
    y.copy_(wide[:, :6] * 2 + 0 * wide[3, 6])


def counts_on_zeroed_workspace(x, y, workspace):
    y.copy_(x * 2 + workspace.view(torch.float32)[0])


def past_its_workspace(x, y, workspace):
    right(x, y, workspace)
    torch.as_strided(workspace, (1,), (1,), workspace.storage_offset() + workspace.numel()).fill_(0)


def never_twice_the_same(x, y, workspace, calls=[]):  # noqa: B006  (it is to remember)
    calls.append(1)
    y.copy_(x * 2 * (1 + 2.0**-23 * (len(calls) % 2)))


def adds_to_what_is_there(x, y, workspace):
    y.add_(x * 2)


WRONG = {
    forgets_one: (PLAIN, "relative error inf"),
    off_by_little_in_one: (PLAIN, "is over the bound"),
    past_the_end: (PLAIN, "wrote outside y"),
    before_the_start: (PLAIN, "wrote outside y"),
    into_the_gap: (SLICED, "wrote outside y"),
    changes_its_input: (PLAIN, "changed its input x"),
    writes_beside_its_input: (PLAIN, "changed its input x, or memory around it"),
    reads_past_its_input: (PLAIN, "relative error inf"),
    counts_on_zeroed_workspace: (PLAIN, "relative error inf"),
    past_its_workspace: (PLAIN, "wrote outside workspace"),
    never_twice_the_same: (PLAIN, "two runs differ in y"),
    adds_to_what_is_there: (PLAIN, "relative error inf"),
}


class Doing(Fake):
    def __init__(self, body, **kwargs):
        super().__init__("toy.doing", workspace=32, **kwargs)
        self._body = body

    def build(self, problem, config):
        return lambda tensors, workspace: self._body(*tensors, workspace)


@pytest.mark.parametrize("body", WRONG, ids=lambda b: b.__name__)
def test_a_wrong_engine_is_caught(body):
    problem, words = WRONG[body]
    assert words in verify(problem, Doing(body), {}, CPU).fault


@pytest.mark.parametrize("problem", [PLAIN, SLICED], ids=str)
def test_a_right_engine_passes(problem):
    found = verify(problem, Doing(right), {}, CPU)
    assert found.fault == "" and found.errors == {"y": 0.0}


def test_a_note_allows_runs_to_differ():
    assert verify(PLAIN, Doing(never_twice_the_same, notes=("nondeterministic",)), {}, CPU).fault == ""


def test_sums_that_cancel_are_held_to_their_usual_size():
    """One sum of 36 numbers came to 0.01 once: its rounding errors are those of the numbers, not of the sum."""
    problem = Problem.parse("conv_bgrad dy=f32[6,1,6]")
    expected = {"db": torch.tensor([0.01], dtype=torch.float64)}
    assert disagreement(problem, {"db": torch.tensor([0.01 + 1e-6])}, expected)[1] == ""
    assert "over the bound" in disagreement(problem, {"db": torch.tensor([0.01 + 1e-5])}, expected)[1]


def test_one_missing_term_of_a_large_bf16_sum_is_caught():
    """Relative to the whole tensor it would be lost in the rounding of 16-bit results."""
    problem = Problem.parse("conv_fprop x=bf16[4,64,24,24] w=bf16[32,64,3,3] padding=1")
    inputs = {role: empty(problem[role], CPU) for role in problem.inputs}
    fill(problem, inputs)
    expected = reference(problem, inputs, CPU)
    out = expected["y"].to(torch.bfloat16)
    assert disagreement(problem, {"y": out}, expected)[1] == ""
    at = (1, 7, 11, 13)
    out[at] = float(expected["y"][at]) - 1.5  # one of 576 products of two standard normal numbers
    errors, fault = disagreement(problem, {"y": out}, expected)
    assert errors["y"] < tolerance(problem, "y") and "element [1, 7, 11, 13] is" in fault


LAID_OUT = "f32[3,4] f32[3,4]%4 f16[5]%2 f16[5]%8 f64[3]%8 u8[7]%1 f32[2,3]@(9,2)%8 f32[4,3]@(0,1) f32[0,3] bf16[1]"


@pytest.mark.parametrize("text", LAID_OUT.split())
@pytest.mark.parametrize("poison", [False, True])
def test_memory_is_laid_out_as_described(text, poison):
    t = TensorDescriptor.parse(text)
    tensor, buffer = allocate(t, CPU, poison)
    found = TensorDescriptor.of(tensor)
    assert (found.dtype, found.shape) == (t.dtype, t.shape)
    assert found.numel == 0 or (found.strides, found.alignment) == (t.strides, t.alignment)
    start = tensor.data_ptr() - buffer.data_ptr() if t.numel else GUARD
    assert start >= GUARD and buffer.numel() - start - t.span * t.itemsize >= GUARD
    if t.numel and tensor.is_floating_point():
        assert bool(tensor.isnan().all()) == poison and bool((tensor == 0).all()) != poison
    assert int((buffer != 255).sum()) == (0 if poison else t.nbytes)


def test_elements_must_be_aligned_to_their_size():
    with pytest.raises(ValueError, match="aligned to their own size"):
        allocate(TensorDescriptor.parse("f32[3]%2"), CPU)
