"""cuDNN's pointwise modes: the table in the documentation, run, against formulas in the framework's arithmetic."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as TF
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

TABLE = Path(__file__).resolve().parents[2] / "docs" / "pointwise-modes.md"
ROWS = re.findall(r"^\| `([A-Z_]+)` \| `(F\..+?)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
ATTRIBUTES = {
    "relu": {"relu_lower_clip": -0.5, "relu_upper_clip": 0.8, "relu_lower_clip_slope": 0.1},
    "elu": {"elu_alpha": 0.7},
    "softplus": {"softplus_beta": 2.0},
    "swish": {"swish_beta": 1.5},
    "gen": {"axis": 1},
}
_G = torch.Generator().manual_seed(1)
TENSORS = {name: torch.randn(3, 5, generator=_G) for name in ("x", "b", "dy")}
TENSORS["b"][0] = TENSORS["x"][0]  # ties
TENSORS |= {"p": TENSORS["x"].abs() + 0.25, "t": TENSORS["dy"] > 0}


def _relu(v):
    return torch.where(v >= 0.8, 0.8, torch.where(v > -0.5, v, -0.5 + 0.1 * (v + 0.5)))


ACTIVATIONS = {
    "RELU": _relu,
    "TANH": torch.tanh,
    "SIGMOID": torch.sigmoid,
    "ELU": lambda v: TF.elu(v, 0.7),
    "GELU": TF.gelu,
    "SOFTPLUS": lambda v: TF.softplus(v, 2.0),
    "SWISH": lambda v: v * torch.sigmoid(1.5 * v),
    "GELU_APPROX_TANH": lambda v: TF.gelu(v, approximate="tanh"),
}
FORMULAS = {
    "ADD": torch.add, "ADD_SQUARE": lambda x, b: x + b * b, "DIV": torch.div, "MAX": torch.maximum,
    "MIN": torch.minimum, "MOD": torch.fmod, "MUL": torch.mul, "POW": torch.pow, "SUB": torch.sub,
    "ABS": torch.abs, "CEIL": torch.ceil,
    "COS": torch.cos, "EXP": torch.exp, "FLOOR": torch.floor, "LOG": torch.log, "NEG": torch.neg,
    "RSQRT": torch.rsqrt, "SIN": torch.sin, "SQRT": torch.sqrt, "TAN": torch.tan, "ERF": torch.erf,
    "IDENTITY": lambda x: x, "RECIPROCAL": torch.reciprocal, "CMP_EQ": torch.eq, "CMP_NEQ": torch.ne,
    "CMP_GT": torch.gt, "CMP_GE": torch.ge, "CMP_LT": torch.lt, "CMP_LE": torch.le,
    "LOGICAL_AND": torch.logical_and, "LOGICAL_OR": torch.logical_or, "LOGICAL_NOT": torch.logical_not,
    "GEN_INDEX": lambda x: torch.arange(5).expand(3, 5), "BINARY_SELECT": lambda x, b, t: torch.where(t, x, b),
}  # fmt: skip


def expected(mode: str, given: list[torch.Tensor]) -> torch.Tensor:
    name, _, way = mode.rpartition("_")
    if name not in ACTIVATIONS:
        return FORMULAS[mode](*given)
    if way == "FWD":
        return ACTIVATIONS[name](given[0])
    dy, x = given[0], given[1].clone().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[name](x), x, dy)[0]


def test_the_table_has_every_mode_once():
    modes = {*FORMULAS, *(f"{name}_{way}" for name in ACTIVATIONS for way in ("FWD", "BWD"))}
    assert len(modes) == 50 and sorted(mode for mode, _ in ROWS) == sorted(modes)
    assert {mode.lower() for mode in modes} == set(F.POINTWISE_MODES)


@pytest.mark.parametrize("mode, call", ROWS)
def test_the_function_is_the_mode(mode, call):
    names = re.findall(r"\b(dy|x|b|p|t)\b", call.partition("(")[2].partition("=")[0])
    given = [TENSORS[name] for name in dict.fromkeys(names)]
    want = expected(mode, given)
    torch.testing.assert_close(eval(call, {"F": F}, TENSORS), want)
    more = ATTRIBUTES.get(mode.lower().partition("_")[0], {})
    torch.testing.assert_close(F.pointwise_mode(mode.lower(), *given, **more), want)


def test_a_relu_with_limits_is_differentiable_and_takes_what_is_not_a_number():
    x = torch.linspace(-2, 2, 7, dtype=torch.float64).requires_grad_()
    dy = torch.linspace(1, 3, 7, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x: F.clipped_relu(x, -0.5, 1.1, 0.25), (x,))
    assert gradgradcheck(lambda x: F.clipped_relu(x, -0.5, 1.1, 0.25), (x,))
    assert gradcheck(lambda dy, x: F.clipped_relu_backward(dy, x, -0.5, 1.1, 0.25), (dy, x))
    assert gradcheck(lambda dy, x: F.activation_backward(dy, x, "silu", beta=2.0), (dy, x))
    odd = torch.tensor([-math.inf, math.nan, math.inf, 0.0])
    assert torch.equal(F.clipped_relu(odd).nan_to_num(7.0), torch.relu(odd).nan_to_num(7.0))
    assert F.clipped_relu(odd, upper=6.0)[2] == 6 and F.clipped_relu_backward(odd, -torch.ones(4))[1] == 0


BAD = {
    "a mode": (lambda x: F.pointwise_mode("relu", x), "mode: found 'relu'"),
    "a tensor missing": (lambda x: F.pointwise_mode("tanh_bwd", x), "b: found no b; accepted: tanh_bwd reads x and b"),
    "a tensor too many": (lambda x: F.pointwise_mode("tanh_fwd", x, x), "b: found b; accepted: tanh_fwd reads x"),
    "limits": (lambda x: F.clipped_relu(x, 1.0, 0.0), "lower: found 1.0"),
    "a slope": (lambda x: F.pointwise_tensor("exp", x, slope=1.0), "slope: found 1.0; accepted: 0.0 for exp"),
    "a scale": (lambda x: F.swish(x, 0.0), "beta: found 0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        call(torch.ones(3))
