"""Inside the framework's machinery: operator checks, compilation, export, autocast, transforms, odd tensors."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as T

from lucidnn import Problem
from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, NotSupported
from lucidnn.core.plan import observe
from lucidnn.functional._convolution import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # the framework's own, on its own way to forward mode
ops = torch.ops.lucidnn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def leaf(*shape, seed=0, dtype=torch.float32, last=False, device="cpu"):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
    return (t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t).requires_grad_()


# ---- operators ---------------------------------------------------------------------------------------------

POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)
CONV = ([1, 1], [1, 1, 1, 1], [1, 1], 1, "zeros", False)


def operator_calls(last: bool, device: str) -> dict:
    def t(*shape, seed=0):
        return leaf(*shape, seed=seed, last=last, device=device)

    x, w, b, y = t(2, 3, 6, 6), t(4, 3, 3, 3, seed=1), t(4, seed=2), t(2, 4, 6, 6, seed=3)
    wide = [2, 1], [1, 0, 0, 2], [1, 2], 1, "reflect", True
    pool_index = F.max_pool2d(y.detach(), 2, return_indices=True)[1]
    tap = ops.max_pool_fwd(y.detach(), *POOL, "u8")[1]
    return {
        "conv_fprop": (ops.conv_fprop, (x, w, b, None, None, *CONV, *PLAIN)),
        "conv_fprop z": (ops.conv_fprop, (x, w, b, y, None, *CONV, 0.5, 2.0, "relu", 0.0, None, None)),
        "conv_fprop uneven": (ops.conv_fprop, (x, w, None, None, None, *wide, 1.0, 0.0, "leaky_relu", 0.1, None, None)),
        "conv_dgrad": (ops.conv_dgrad, (y, w, None, None, None, [2, 3, 6, 6], last, *CONV, *PLAIN)),
        "conv_wgrad": (ops.conv_wgrad, (x, y, [4, 3, 3, 3], last, *CONV, 1.0)),
        "conv_bgrad": (ops.conv_bgrad, (y,)),
        "pointwise_fwd": (ops.pointwise_fwd, (y, b, x.new_zeros(2, 4, 6, 6), 2.0, 1.0, "relu", 0.0)),
        "pointwise_fwd transposed": (ops.pointwise_fwd, (y.mT, None, None, 1.0, 0.0, "relu", 0.0)),
        "pointwise_fwd sliced": (ops.pointwise_fwd, (y[:, ::2], None, None, 1.0, 0.0, "relu", 0.0)),
        "pointwise_bwd": (ops.pointwise_bwd, (y, y.detach() * 2, 1.0, "relu", 0.0)),
        "max_pool_fwd": (ops.max_pool_fwd, (y, *POOL, "i64")),
        "max_pool_fwd u8": (ops.max_pool_fwd, (y, *POOL, "u8")),
        "max_pool_bwd": (ops.max_pool_bwd, (t(2, 4, 3, 3, seed=5), pool_index, [2, 4, 6, 6], last, *POOL, "i64")),
        "max_pool_bwd u8": (ops.max_pool_bwd, (t(2, 4, 3, 3, seed=5), tap, [2, 4, 6, 6], last, *POOL, "u8")),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", operator_calls(False, "cpu"))
def test_operator(name, last, device):
    """Schema, registration, the fake function's shapes and strides, and tracing with symbolic shapes."""
    operator, args = operator_calls(last, device)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(operator.default, args)


def test_every_operator_is_checked():
    """Here or in a family's own file: by its `operator_calls`, as above, or by a call of opcheck that names it."""
    defined = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "lucidnn::" in name
    }
    checked = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        calls = getattr(importlib.import_module(path.stem), "operator_calls", lambda last, device: {})
        checked |= {name.split()[0] for name in calls(False, "cpu")}
        checked |= set(re.findall(r"opcheck\(\s*(?:torch\.ops\.lucidnn|ops)\.(\w+)", path.read_text(encoding="utf-8")))
    assert defined == checked


# ---- compilation -------------------------------------------------------------------------------------------


def net(x, w1, b1, w2, v):
    y = F.max_pool2d(F.relu(F.conv2d(x, w1, b1, padding=1)), 2)
    y = F.conv2d(y, w2, None, stride=2, padding=1, activation="relu")
    return F.linear(y.mean((2, 3)), v)


def net_tensors(n=4, size=12, dtype=torch.float32, last=False, device="cpu"):
    shapes = [(n, 3, size, size), (8, 3, 3, 3), (8,), (6, 8, 3, 3), (5, 6)]
    return [leaf(*s, seed=i, dtype=dtype, last=last, device=device) for i, s in enumerate(shapes)]


def run_and_grad(function, tensors):
    out = function(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


INDUCTOR = pytest.param(
    "inductor", True, marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend, last", [("aot_eager", False), ("aot_eager", True), INDUCTOR])
def test_compiled_whole_and_for_any_size(backend, last, device):
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=backend)
    for n, size in ((4, 12), (3, 16), (5, 9)):
        tensors = net_tensors(n, size, last=last, device=device)
        expected = run_and_grad(net, tensors)
        found = run_and_grad(compiled, tensors)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=5e-6 * float(b.detach().abs().max()))
            assert a.stride() == b.stride()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), net(*tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, w: F.conv2d(x, w, padding="same"),
    lambda x, w: F.conv2d(x, w, padding=((1, 0), (2, 1)), stride=(1, 2)),
    lambda x, w: F.conv2d(x[0], w),
    lambda x, w: F.conv1d(x.flatten(2), w.flatten(2)),
    lambda x, w: F.conv3d(x.unsqueeze(2), w.unsqueeze(2), padding=(0, 1, 1)),
    lambda x, w: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    lambda x, w: F.max_pool1d(x[0], 2),
    lambda x, w: F.relu(x.mT),
], ids=["same", "pairs", "unbatched", "1-D", "3-D", "pool", "pool unbatched", "relu"])  # fmt: skip
def test_every_face_compiles(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, size in ((2, 10), (3, 13)):
        x, w = leaf(n, 3, size, size).detach(), leaf(4, 3, 3, 3).detach()
        found, expected = compiled(x, w), function(x, w)
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.stride() == b.stride()


def test_export():
    class Module(torch.nn.Module):
        def forward(self, x, w):
            return F.max_pool2d(F.conv2d(x, w, padding=1, activation="relu"), 2)

    x, w = leaf(4, 3, 8, 8).detach(), leaf(4, 3, 3, 3).detach()
    batch = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(Module(), (x, w), dynamic_shapes=({0: batch}, None))
    for n in (4, 7):
        again = leaf(n, 3, 8, 8, seed=n).detach()
        torch.testing.assert_close(program.module()(again, w), Module()(again, w))


# ---- modes and transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    x, w, b = leaf(2, 3, 8, 8, device=device), leaf(4, 3, 3, 3, seed=1, device=device), leaf(4, seed=2, device=device)
    with torch.autocast(device, torch.bfloat16):
        y, v = F.conv2d(x, w, b), F.linear(x, leaf(5, 8, device=device))
        expected = T.conv2d(x, w, b)
        assert y.dtype == v.dtype == expected.dtype == torch.bfloat16
        assert F.relu(x).dtype == F.max_pool2d(x, 2).dtype == torch.float32
        assert F.conv2d(x.double(), w.double()).dtype == torch.float64, "the framework leaves doubles alone too"
        with torch.autocast(device, enabled=False):
            assert F.conv2d(x, w, b).dtype == torch.float32
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    assert F.conv2d(x, w, b).dtype == torch.float32


def test_autocast_is_part_of_what_is_compiled():
    torch._dynamo.reset()
    x, w = leaf(2, 3, 8, 8).detach(), leaf(4, 3, 3, 3).detach()
    compiled = torch.compile(F.conv2d, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x, w).dtype == torch.bfloat16
    assert compiled(x, w).dtype == torch.float32


def test_forward_mode_drops_no_tangent():
    """It is not there: that must be an error and not an answer without its derivative."""
    import torch.autograd.forward_ad as forward_ad

    x, w = leaf(2, 3, 6, 6).detach(), leaf(4, 3, 3, 3).detach()
    calls = [lambda t: F.conv2d(t, w), lambda t: F.conv2d(x, t[..., :3, :3]), F.relu, lambda t: F.max_pool2d(t, 2)]
    with forward_ad.dual_level():
        for call in calls:
            for tensor in (x, x.clone().requires_grad_()):
                with pytest.raises(NotSupported, match="no forward-mode derivative; accepted: reverse mode"):
                    call(forward_ad.make_dual(tensor, torch.ones_like(x)))
        torch.testing.assert_close(F.conv2d(x, w), T.conv2d(x, w), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotSupported, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: F.conv2d(t, w), (x,), (x,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    x, w = leaf(5, 2, 3, 6, 6).detach(), leaf(4, 3, 3, 3).detach()
    mapped = torch.vmap(lambda t: F.conv2d(t, w))(x)
    torch.testing.assert_close(mapped, torch.stack([F.conv2d(t, w) for t in x]))
    pooled, index = torch.vmap(lambda t: F.max_pool2d(t, 2, return_indices=True))(x)
    assert torch.equal(pooled, torch.stack([F.max_pool2d(t, 2) for t in x])) and index.shape == pooled.shape


# ---- tensors that are not what they look like ----------------------------------------------------------------


def test_negative_views_are_read_with_their_sign():
    c = torch.randn(2, 3, 6, 6, dtype=torch.complex64)
    x, w = torch.imag(c.conj()), leaf(4, 3, 3, 3).detach()
    assert x.is_neg()
    torch.testing.assert_close(F.conv2d(x, w), T.conv2d(-c.imag, w), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(F.relu(x), T.relu(-c.imag))
    torch.testing.assert_close(F.max_pool2d(x, 2), T.max_pool2d(-c.imag, 2))
    v = w.clone().requires_grad_()
    (dw,) = torch.autograd.grad(F.conv2d(x, v).sum(), v)
    (want,) = torch.autograd.grad(T.conv2d(x, v).sum(), v)
    torch.testing.assert_close(dw, want, rtol=1e-5, atol=1e-4)


ODD = {
    "complex": (lambda x: x.to(torch.complex64), "dtype: found complex64; accepted: f64, f32"),
    "sparse": (lambda x: x.to_sparse(), "x: found a tensor of layout torch.sparse_coo; accepted: a dense tensor"),
    "mkldnn": (lambda x: x.to_mkldnn(), "x: found a tensor of layout torch._mkldnn; accepted: a dense tensor"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "dtype: found qint8; accepted: f64"),
    "integers": (lambda x: x.long(), "x: found i64[2,3,6,6]@nchw; accepted: a floating-point type"),
    "truth values": (lambda x: x > 0, "x: found bool[2,3,6,6]@nchw; accepted: a floating-point type"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_another_kind_are_a_clear_error(kind):
    make, expected = ODD[kind]
    x, w = make(torch.ones(2, 3, 6, 6)), torch.ones(1, 3, 1, 1)
    for call in (F.relu, lambda x: F.max_pool2d(x, 2), lambda x: F.conv2d(x, w)):
        with pytest.raises(InvalidArgument) as caught:
            call(x)
        assert str(caught.value).startswith(expected)


def test_meta_tensors_give_shapes():
    x, w = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta", requires_grad=True)
    y = F.conv2d(x, w, padding=1, stride=2)
    assert y.is_meta and y.shape == (2, 4, 4, 4)
    last = F.conv2d(x.to(memory_format=torch.channels_last), w)
    assert last.is_contiguous(memory_format=torch.channels_last)
    values, index = F.max_pool2d(F.relu(y), 2, return_indices=True)
    assert values.shape == index.shape == (2, 4, 2, 2) and index.dtype == torch.int64
    assert F.linear(values.flatten(1), torch.empty(7, 16, device="meta")).shape == (2, 7)
    y.sum().backward()
    assert w.grad.is_meta and w.grad.shape == w.shape
    with pytest.raises(InvalidArgument, match="groups: found 2"):
        F.conv2d(x, w, groups=2)


def test_subclasses_modes_and_torch_function_see_the_call():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mine(torch.Tensor):
        pass

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w = leaf(1, 3, 5, 5).detach(), leaf(4, 3, 3, 3)
    expected = F.conv2d(x, w)
    assert type(F.conv2d(x.as_subclass(Mine), w)) is Mine
    for mode in (Dispatch, Function):
        seen: list[str] = []
        with mode():
            y = F.conv2d(x, w)
        assert torch.equal(y, expected) and y.requires_grad
        assert [name for name in seen if "lucidnn.conv_fprop" in name], seen
    assert isinstance(F.conv2d(x, torch.nn.Parameter(w)).grad_fn, torch.autograd.graph.Node)


@pytest.mark.parametrize("device", DEVICES)
def test_both_roads_end_in_the_same_kernel(device):
    x, w, b = leaf(2, 3, 7, 7, device=device), leaf(4, 3, 3, 3, seed=1, device=device), leaf(4, seed=2, device=device)
    with observe() as direct:
        y = F.conv2d(x, w, b, padding=1)
        dx, dw, db = torch.autograd.grad(y.sum(), (x, w, b))
    with observe() as dispatched:
        z = ops.conv_fprop(x, w, b, None, None, *CONV, *PLAIN)
        gradients = torch.autograd.grad(z.sum(), (x, w, b))
    assert [p.problem for p in direct] == [p.problem for p in dispatched] and len(direct) == 4
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dw, db), (z, *gradients), strict=True))


def test_alignment_and_strides_are_seen_on_the_hot_path():
    """A plan for aligned addresses is not used for others, nor one for one stride where there is another."""
    base, w = torch.randn(2, 3, 8, 9), leaf(4, 3, 3, 3).detach()
    for view in (base[..., :8], base[..., 1:], base[..., :8].contiguous(), base[:, :, ::2, :8], base[..., :8].mT):
        with observe() as plans:
            y = F.conv2d(view, w)
        assert plans[0].problem == Problem.parse(str(plans[0].problem))
        assert (plans[0].problem["x"].strides, plans[0].problem["x"].shape) == (view.stride(), view.shape)
        assert view.data_ptr() % plans[0].problem["x"].alignment == 0
        torch.testing.assert_close(y, T.conv2d(view, w), rtol=1e-5, atol=1e-5)


def test_threads_do_not_share_a_mode():
    x, w = leaf(1, 3, 5, 5), leaf(4, 3, 3, 3)
    found = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: found.append(F.conv2d(x, w).requires_grad))
        thread.start()
        thread.join(60)
        found.append(F.conv2d(x, w).requires_grad)
    assert found == [True, False]


def test_a_second_call_is_one_check_and_one_plan(monkeypatch):
    """What was seen once is described no more; what looks different is, and so is one tensor given twice."""
    from lucidnn.functional import _library
    from lucidnn.functional.pointwise import pointwise_bwd as op

    described = []
    build = _library._build
    monkeypatch.setattr(_library, "_build", lambda *a, **k: described.append(a) or build(*a, **k))
    dy, x = torch.randn(3, 5), torch.randn(3, 5)
    expected = dy * (x > 0)

    def calls(*tensors):
        before = len(described)
        y = op(*tensors, 1.0, "relu", 0.0)
        torch.testing.assert_close(y, tensors[0].detach() * (tensors[1].detach() > 0))
        return len(described) - before, y.requires_grad

    assert _library._guards_are_known()
    assert calls(dy, x)[0] <= 1 and calls(dy, x) == (0, False) == calls(x, dy)
    assert torch.equal(op(dy, x, 1.0, "relu", 0.0), expected)
    dy.requires_grad_()
    assert calls(dy, x)[1] and calls(dy, x) == (0, True)
    with torch.no_grad():
        assert calls(dy, x) == (0, False)
    assert calls(x, x) == (1, False) and calls(x, x) == (0, False)
    assert calls(x.T.contiguous().T, x)[0] == 1  # other strides
    negative = torch.ops.aten._neg_view(x)
    assert torch.equal(op(x, negative, 1.0, "relu", 0.0), x * (x < 0))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_transforms_of_torch_func():
    import torch.nn.functional as theirs

    from lucidnn import functional as ours

    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 1, 2, dtype=torch.float64)

    def loss(f, t):
        return f.conv1d(f.softmax(t, -1).unsqueeze(-2), w).square().sum()

    def forms(f):
        grad = torch.func.grad(functools.partial(loss, f))
        yield grad(x)
        yield torch.func.grad(lambda t: grad(t).square().sum())(x)
        yield torch.func.vmap(grad)(x)
        yield torch.func.jacrev(functools.partial(f.softmax, dim=-1))(x)

    for found, expected in zip(forms(ours), forms(theirs), strict=True):
        torch.testing.assert_close(found, expected)
