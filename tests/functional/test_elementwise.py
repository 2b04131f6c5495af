"""Arithmetic and activations on tensors against the framework: values, strides, gradients, bad arguments."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as TF
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, LucidnnError, NotSupported


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "min": torch.minimum,
    "max": torch.maximum,
    "mod": torch.fmod,
    "cmp_eq": torch.eq,
    "cmp_neq": torch.ne,
    "cmp_gt": torch.gt,
    "cmp_ge": torch.ge,
    "cmp_lt": torch.lt,
    "cmp_le": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
}
UNARY = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "exp": torch.exp,
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "erf": torch.erf,
    "reciprocal": torch.reciprocal,
    "logical_not": torch.logical_not,
}
POSITIVE = {"sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log}


@pytest.mark.parametrize("name", BINARY)
def test_two_tensors_as_the_framework(name):
    nan, inf = math.nan, math.inf
    odd = torch.tensor([nan, inf, -inf, 0.0, 1.0, -2.0])
    pairs = [
        (values(3, 4, 5), values(4, 1, seed=1)),
        (values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), values(3, 1, 1, seed=1)),
        (values(3, 4).bfloat16(), values(3, 4, seed=1)),
        (odd[:, None].expand(6, 6), odd.expand(6, 6)),
    ]
    if name not in ("div", "mod"):
        whole = torch.arange(-4, 6)
        pairs += [(whole, whole.flip(0).int()), (whole > 0, whole % 2 == 0)]
    for x, b in pairs:
        if x.dtype == torch.bool and name in ("add", "sub", "mul", "min", "max"):
            continue
        got, want = F.pointwise_tensor(name, x, b), BINARY[name](x, b)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", UNARY | POSITIVE)
def test_one_tensor_as_the_framework(name):
    x = values(3, 4, 5, 2).contiguous(memory_format=torch.channels_last)
    x = x.abs() + 0.1 if name in POSITIVE else x
    got, want = F.pointwise_tensor(name, x), (UNARY | POSITIVE)[name](x)
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_the_other_modes_and_utilities():
    x, b = values(3, 4), values(3, 4, seed=1)
    torch.testing.assert_close(F.pointwise_tensor("pow", x.abs(), 1.7), x.abs() ** 1.7)
    torch.testing.assert_close(F.pointwise_tensor("add_square", x, b), x + b * b)
    assert torch.equal(F.pointwise_tensor("binary_select", x, b, x > 0), torch.where(x > 0, x, b))
    assert torch.equal(F.pointwise_tensor("gen_index", x, axis=1), torch.arange(4).expand(3, 4))
    assert torch.equal(F.pointwise_tensor("clip", x, lower=-0.5, upper=0.5), x.clamp(-0.5, 0.5))
    want = torch.maximum(2 * x, -b) + 0.5 * x
    torch.testing.assert_close(F.op_tensor("max", x, b, alpha1=2.0, alpha2=-1.0, beta=0.5, c=x), want)
    torch.testing.assert_close(F.op_tensor("not", x), 1 - x)
    torch.testing.assert_close(F.add_tensor(b[0], x, alpha=2.0, beta=-1.0), 2 * b[0] - x)
    assert torch.equal(F.scale_tensor(x, -2.0), -2 * x)
    assert torch.equal(F.set_tensor(x, 3.0), torch.full_like(x, 3.0))
    found = F.transform_tensor(values(2, 3, 4, 5), dtype=torch.bfloat16, memory_format=torch.channels_last)
    assert found.dtype == torch.bfloat16 and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, values(2, 3, 4, 5).bfloat16())
    edge = torch.tensor([math.nan, math.inf, -math.inf, 2.5, 3.5, -200.0])
    assert F.transform_tensor(edge, dtype=torch.int8).tolist() == [0, 127, -128, 2, 4, -128]


ACTIVATIONS = {
    "relu": (),
    "leaky_relu": (0.2,),
    "elu": (0.7,),
    "sigmoid": (),
    "tanh": (),
    "silu": (),
    "gelu": ("tanh",),
    "softplus": (2.0,),
    "hardswish": (),
    "hardsigmoid": (),
    "relu6": (),
    "hardtanh": (-0.5, 0.7),
    "mish": (),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_the_framework(name):
    ours, theirs, more = getattr(F, name), getattr(TF, name), ACTIVATIONS[name]
    x = values(3, 4, 5) * 3
    for given in ((), more):
        if name == "gelu" and given:
            torch.testing.assert_close(F.gelu(x, approximate="tanh"), TF.gelu(x, approximate="tanh"))
        else:
            torch.testing.assert_close(ours(x, *given), theirs(x, *given))
    x = x.double().requires_grad_()
    assert gradcheck(lambda x: ours(x, *more), (x,)) and gradgradcheck(lambda x: ours(x, *more), (x,))


@pytest.mark.parametrize(
    "name", [n for n in (*BINARY, *UNARY, *POSITIVE, "pow", "add_square", "not") if "_" not in n[3:]]
)
def test_gradients_twice(name):
    if name in ("mod", "ceil", "floor"):
        return
    x = (values(2, 3, dtype=torch.float64).abs() + 0.3).requires_grad_()
    b = (values(3, seed=1, dtype=torch.float64).abs() + 0.4).requires_grad_()
    z = values(2, 1, seed=2, dtype=torch.float64).requires_grad_()

    def call(x, *rest):
        two = name in BINARY or name in ("pow", "add_square")
        return F.pointwise_tensor(name, x, *rest[:two], alpha1=0.5, alpha2=1.5 if two else 1.0, beta=2.0, z=rest[-1])

    given = (x, b, z) if name in BINARY or name in ("pow", "add_square") else (x, z)
    assert gradcheck(call, given) and gradgradcheck(call, given)


def test_the_operator_passes_the_frameworks_checks_and_compiles():
    x, b = values(3, 4, dtype=torch.float64).requires_grad_(), values(4, seed=1, dtype=torch.float64)
    attributes = ("mul", 2.0, 1.0, 0.0, 0, 0.0, 0.0, 0.0, None)
    torch.library.opcheck(torch.ops.lucidnn.elementwise_fwd.default, (x, b, None, None, *attributes))

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def f(x, b):
        return F.pointwise_tensor("add", F.silu(x), b) * F.pointwise_tensor("cmp_gt", x, b)

    torch.testing.assert_close(f(x, b), (TF.silu(x) + b) * (x > b))


BAD = {
    "a mode": (lambda x: F.pointwise_tensor("median", x), "mode: found 'median'"),
    "a tensor missing": (lambda x: F.pointwise_tensor("add", x), "b: found nothing; accepted: add reads x and b"),
    "a tensor too many": (lambda x: F.pointwise_tensor("exp", x, x), "b: found .*exp reads x"),
    "shapes": (lambda x: F.pointwise_tensor("add", x, x[:, :3]), r"b: found shape \[3, 3\]"),
    "kinds": (lambda x: F.pointwise_tensor("add", x, x.long()), "b: found i64.*a floating-point type, as x"),
    "whole numbers": (lambda x: F.pointwise_tensor("exp", x.long()), "x: found i64.*a floating-point type for exp"),
    "a factor": (lambda x: F.pointwise_tensor("add", x.int(), x.int(), alpha1=0.5), "alpha1: found 0.5; acc"),
    "an axis": (lambda x: F.pointwise_tensor("gen_index", x, axis=2), "axis: found 2; accepted: an axis from -2 to 1"),
    "limits": (lambda x: F.hardtanh(x, 1.0, -1.0), "min_val: found 1.0"),
    "an op": (lambda x: F.op_tensor("sub", x, x), "op: found 'sub'; accepted: add, mul"),
    "an approximation": (lambda x: F.gelu(x, approximate="erf"), "approximate: found 'erf'"),
    "no tensor": (lambda x: F.mish(1.0), "input: found float"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, message = BAD[name]
    with pytest.raises(LucidnnError, match=message):
        call(values(3, 4))


def test_a_low_threshold_is_refused():
    with pytest.raises(NotSupported, match="threshold of 1; accepted: 20 or more"):
        F.softplus(values(3), 1.0, 1)
    with pytest.raises(InvalidArgument, match="beta"):
        F.softplus(values(3), 0)
