"""Dropout: the published bits of Philox, what a mask may depend on, gradients, generators, the framework's forms."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lucidnn import functional as F
from lucidnn.core import registry
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.problem import Problem
from lucidnn.functional import _random
from lucidnn.functional.dropout import dropout_bwd, dropout_fwd, dropout_fwd_mask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Known answers of the Random123 library for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_published_bits(counter, key, words):
    from lucidnn.engines import _numba as nb
    from lucidnn.engines._numba.philox import COUNTERS, philox, words_by_planes, words_in_order
    from lucidnn.engines.dropout.reference import philox as defined

    found = defined([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert tuple(int(word) for word in found) == words

    import numpy as np

    @nb.jit.numba.njit
    def call(c0, c1, c2, c3, k0, k1):
        return philox(c0, c1, c2, c3, k0, k1)

    assert tuple(int(word) for word in call(*(np.uint32(n) for n in (*counter, *key)))) == words

    # Sixteen counters together, of which the known one is the fourth: numbers of 64 bits that count on past 32.
    @nb.jit.numba.njit
    def together(ordered, planes, first, c2, c3, k0, k1):
        words_in_order(nb.pointer(ordered, np.uint32(0)), 0, first, c2, c3, k0, k1)
        words_by_planes(nb.pointer(planes, np.uint32(0)), 0, COUNTERS, first, np.uint64(1), c2, c3, k0, k1)

    ordered, planes = np.zeros((COUNTERS, 4), np.uint32), np.zeros((4, COUNTERS), np.uint32)
    first = np.uint64((counter[0] + (counter[1] << 32) - 3) % 2**64)
    together(ordered.ctypes.data, planes.ctypes.data, first, *(np.uint32(n) for n in (*counter[2:], *key)))
    assert tuple(ordered[3]) == tuple(planes[:, 3]) == words
    assert (ordered == planes.T).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_mask_is_that_of_the_definition_whatever_the_layout(device):
    state = torch.tensor([-7, 2**40 + 3])
    x = torch.rand(3, 8, 4, 6) + 1.0
    problem = Problem.parse("dropout_fwd x=f32[3,8,4,6] state=i64[2] p=0.3")
    expected = torch.empty_like(x)
    registry.get("dropout.reference").build(problem, {})((x, state, expected), None)
    state = state.to(device)
    for layout in (
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ):
        y, mask = dropout_fwd_mask(layout.to(device), state, None, 0.3, False)
        assert torch.equal(y.cpu() != 0, expected != 0) and torch.equal(mask.cpu(), expected != 0)
        torch.testing.assert_close(y.cpu(), expected)
        dx = dropout_bwd(torch.ones_like(layout, device=device), state, 0.3, False)
        assert torch.equal(dx.cpu() != 0, expected != 0)


@pytest.mark.gpu
def test_a_gpu_gives_the_very_numbers_of_a_cpu():
    state = torch.tensor([11, 5])
    for dtype in (torch.float32, torch.bfloat16):
        x, z = torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype)
        for add in (None, z):
            here = dropout_fwd(x, state, add, 0.1, False)
            there = dropout_fwd(x.cuda(), state.cuda(), None if add is None else add.cuda(), 0.1, False)
            assert torch.equal(here, there.cpu())


def test_how_many_are_dropped():
    torch.manual_seed(0)
    x = torch.ones(200_000)
    for p in (0.1, 0.5, 0.9):
        y = F.dropout(x, p)
        assert abs((y == 0).float().mean().item() - p) < 0.005
        assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
    assert torch.equal(F.dropout(x, 0.0), x) and not F.dropout(x, 1.0).any()
    assert F.dropout(x, 0.5, training=False) is x


def test_the_framework_seeds_it():
    x = torch.ones(100)
    torch.manual_seed(3)
    a, b = F.dropout(x), F.dropout(x)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(x), a) and torch.equal(F.dropout(x), b) and not torch.equal(a, b)


def test_recomputation_draws_the_same():
    x = torch.randn(50, requires_grad=True)
    w = torch.randn(50)
    torch.manual_seed(4)
    (expected,) = torch.autograd.grad((F.dropout(x * w) * w).sum(), x)
    torch.manual_seed(4)
    y = checkpoint(lambda v: (F.dropout(v * w) * w).sum(), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_states_ahead_of_a_generator():
    """The table that a GPU's states come from, with a stand-in for its generator."""

    class Stub:
        seed, offset = 2**63 + 9, 0

        def initial_seed(self):
            return self.seed

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    stub = Stub()
    ahead = _random._Ahead(stub, torch.device("cpu"))
    found = [ahead.next_state().tolist() for _ in range(300)]
    assert found == [[9 - 2**63, 4 * i] for i in range(300)] and stub.offset == 1200
    stub.offset = 8  # a state is restored, then others draw
    assert ahead.next_state().tolist() == [9 - 2**63, 8] and ahead.next_state().tolist() == [9 - 2**63, 12]
    stub.seed, stub.offset = 5, 2
    assert ahead.next_state().tolist() == [5, 2]


def test_gradients():
    state = torch.tensor([1, 2])
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    function = lambda v, u: dropout_fwd(v, state, u, 0.4, False)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, z)) and torch.autograd.gradgradcheck(function, (x, z))
    y = dropout_fwd(x, state, None, 0.4, False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0] != 0, y != 0)


def test_whole_maps_and_the_frameworks_forms():
    torch.manual_seed(6)
    for function, shape in (
        (F.dropout1d, (4, 9, 5)), (F.dropout1d, (9, 5)), (F.dropout2d, (4, 9, 3, 5)), (F.dropout3d, (4, 9, 2, 3, 5)),
        (F.dropout3d, (9, 2, 3, 5)),
    ):  # fmt: skip
        y = function(torch.ones(shape), 0.5)
        axis = 1 if len(shape) % 2 or function is F.dropout2d else 0
        maps = y.flatten(2) if axis and shape[0] == 4 else y.flatten(1)
        assert y.shape == torch.Size(shape)
        assert bool(((maps == 0).all(-1) | (maps == 2).all(-1)).all()) and bool((y == 0).any()) and bool((y == 2).any())
    x = torch.ones(64)
    assert F.dropout(x, 0.5, inplace=True) is x and set(x.tolist()) == {0.0, 2.0}
    with pytest.warns(UserWarning, match="axes"):
        F.dropout2d(torch.ones(4, 5))


def test_alpha_dropout_keeps_mean_and_deviation():
    torch.manual_seed(7)
    x = torch.randn(400_000)
    for y in (F.alpha_dropout(x, 0.2, True), F.feature_alpha_dropout(x.reshape(4000, 100), 0.2, True)):
        assert abs(y.mean().item()) < 0.02 and abs(y.std().item() - 1) < 0.02
    assert F.alpha_dropout(x, 0.2) is x
    assert not F.alpha_dropout(x, 1.0, True).any()


def test_operators_and_compilation():
    x, state = torch.randn(4, 6, requires_grad=True), torch.tensor([3, 4])
    torch.library.opcheck(torch.ops.lucidnn.dropout_fwd, (x, state, None, 0.5, False))
    torch.library.opcheck(torch.ops.lucidnn.dropout_fwd_mask, (x.detach(), state, None, 0.5, False))
    torch.library.opcheck(torch.ops.lucidnn.dropout_bwd, (x, state, 0.5, False))
    compiled = torch.compile(lambda v: F.dropout(v, 0.5).sum(), fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(x), x)
    assert set(grad.flatten().tolist()) <= {0.0, 2.0}


def test_bad_input():
    x = torch.ones(3, 4)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidArgument, match="p: found"):
            F.dropout(x, p)
    with pytest.raises(InvalidArgument, match="generator"):
        F.dropout(x, generator=torch.Generator())
    with pytest.raises(InvalidArgument, match="state"):
        dropout_fwd(x, torch.zeros(3, dtype=torch.int64), None, 0.5, False)
    with pytest.raises(InvalidArgument, match="state"):
        F.DropoutGenerator().set_state(torch.zeros(2))
    with pytest.raises(InvalidArgument, match="seed"):
        F.DropoutGenerator(2**64)
    with pytest.raises(InvalidArgument, match="z"):
        F.dropout(x, z=torch.ones(4))


@pytest.mark.gpu
def test_a_captured_graph_draws_anew():
    x = torch.ones(10_000, device="cuda")
    F.dropout(x)
    own = F.DropoutGenerator(1, "cuda")
    F.dropout(x, generator=own)
    for generator in (None, own):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = F.dropout(x, generator=generator)
        found = []
        for _ in range(2):
            graph.replay()
            found.append(y.clone())
        assert not torch.equal(*found)
