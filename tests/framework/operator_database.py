"""The framework's own operator database as a judge: its sample inputs and its error inputs, native and overridden.

Nobody here wrote these inputs. For each entry and type every sample runs twice, by the framework's kernels and with
`lucidnn.torch` enabled; values, types, shapes, strides, first and (float64) second derivatives have to agree. A call
that fell through does not count as a pass: a reason has to be among those that the test's table names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import lucidnn.torch

BOUND = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference, as a part of the largest value or of 1: what two right kernels differ by in their sums' order."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is looked for in an entry of the database.

    Parameters
    ----------
    operators : tuple of str
        Overridden operators of which each has to be reached by some sample.
    falls : tuple of str
        Words of which one stands in every accepted reason to fall through.
    samples : int
        How many samples the default run takes, spread over all; the longer profile takes every one.
    double : float
        Bound in float64, where the framework's own kernel is not that exact.
    """

    operators: tuple[str, ...]
    falls: tuple[str, ...] = ()
    samples: int = 5
    double: float = BOUND[torch.float64]


@functools.cache
def _entries() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {o.name + (f".{o.variant_test_name}" if o.variant_test_name else ""): o for o in op_db}


def parameters(cases: dict[str, Case]) -> Any:
    """(name, dtype, whether all samples): float32, and bfloat16 for a third; all types in the longer profile."""
    brief = [(name, torch.float32, False) for name in cases]
    brief += [(name, torch.bfloat16, False) for name in list(cases)[::3]]
    whole = [pytest.param(name, dtype, True, marks=pytest.mark.slow) for name in cases for dtype in BOUND]
    return pytest.mark.parametrize("name, dtype, whole", [*brief, *whole], ids=str)


def _samples(name: str, dtype: torch.dtype, device: str, case: Case, whole: bool) -> Iterator[Any]:
    entry = _entries()[name]
    torch.manual_seed(0)
    grad = entry.supports_autograd and dtype in entry.supported_backward_dtypes(device)
    found = list(entry.sample_inputs(device, dtype, requires_grad=grad))
    if whole and entry.reference_inputs_func is not None:
        found = list(entry.reference_inputs(device, dtype, requires_grad=grad))
    step = 1 if whole else max(1, -(-len(found) // case.samples))
    return itertools.islice(found, 0, None, step)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.detach().untyped_storage().clone()  # with what is between its elements: it may be a view
    twin = torch.empty(0, dtype=value.dtype, device=value.device)
    return twin.set_(storage, value.storage_offset(), value.shape, value.stride()).requires_grad_(value.requires_grad)


def _run(entry: Any, sample: Any, twice: bool) -> list[torch.Tensor]:
    """Outputs, then the derivatives, of a sample run on a copy of its tensors."""
    input, args, kwargs = tree_map(_copy, (sample.input, list(sample.args), sample.kwargs))
    torch.manual_seed(1)  # for what draws numbers
    result = entry.op(input, *args, **kwargs)
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    leaves = [t for t in tree_flatten((input, args, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    smooth = [t for t in outputs if t.requires_grad]
    if not leaves or not smooth:
        return outputs

    def weights(tensors: Any, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(t.shape, generator=generator).to(t) for t in tensors]

    first = torch.autograd.grad(smooth, leaves, weights(smooth, 2), create_graph=twice, allow_unused=True)
    found = [*outputs, *_plain(first, leaves)]
    again = [t for t in first if t is not None and t.requires_grad]
    if twice and again:
        second = torch.autograd.grad(again, leaves, weights(again, 3), allow_unused=True)
        found += _plain(second, leaves)
    return found


def _plain(gradients: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients, zero where the input is no finite number: they mean little there, and native kernels differ."""
    found = []
    for t, leaf in zip(gradients, leaves, strict=True):
        odd = ~leaf.detach().isfinite()
        if t is not None:
            found.append(t.detach().clone().masked_fill_(odd, 0.0) if odd.any() else t)
    return found


def _strides(t: torch.Tensor) -> list[int]:
    """Steps along the axes that have more than one element; the others tell nothing."""
    return [] if t.numel() == 0 else [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _compare(told: str, native: list[torch.Tensor], found: list[torch.Tensor], exact: Any, double: float) -> None:
    """Hold results to the native ones, or, where these are mostly rounding, both to those of float64."""
    assert len(native) == len(found), told
    for i, (a, b) in enumerate(zip(native, found, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {i} of {told}"
        assert _strides(a) == _strides(b), f"result {i} of {told}: strides {a.stride()} natively, {b.stride()} found"
        if a.dtype not in BOUND or a.numel() == 0:
            assert torch.equal(a, b), f"result {i} of {told}"
            continue
        bound = double if a.dtype == torch.float64 else BOUND[a.dtype]
        a, b = a.detach().double(), b.detach().double()
        finite = a[a.isfinite()].abs()
        scale = max(float(finite.max()), 1.0) if finite.numel() else 1.0
        near = torch.isclose(b, a, rtol=bound, atol=bound * scale, equal_nan=True)
        if not near.all() and native[i].dtype != torch.float64:
            truth = exact()[i].detach()
            allowed = bound * scale + 4 * (a - truth).abs().nan_to_num().max()
            near = torch.isclose(b, truth, rtol=0, atol=float(allowed), equal_nan=True)
        said = f"natively {a[~near][:5].tolist()}, found {b[~near][:5].tolist()}"
        assert near.all(), f"result {i} of {told}: {said}, largest {scale}"


def _double(sample: Any) -> Any:
    def double(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.dtype not in BOUND:
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return sample.transform(double)


def check(name: str, dtype: torch.dtype, whole: bool, case: Case, device: str = "cpu") -> None:
    """Hold an entry of the database under lucidnn to the framework's own results."""
    entry = _entries()[name]
    if dtype not in entry.supported_dtypes(device):
        pytest.skip(f"the framework has no {name} in {dtype}")
    twice = dtype == torch.float64 and entry.supports_gradgrad
    reached: dict[str, int] = {}
    for sample in _samples(name, dtype, device, case, whole):
        try:
            native = _run(entry, sample, twice)
        except NotImplementedError:  # for this type, whatever the database says
            continue
        except RuntimeError:  # some second derivatives of the framework fail on some of its own samples
            twice = False
            native = _run(entry, sample, twice)
        lucidnn.torch.reset_calls()
        with lucidnn.torch.enable():
            found = _run(entry, sample, twice)
        for operator, calls in lucidnn.torch.calls().items():
            reached[operator] = reached.get(operator, 0) + calls["taken"]
            for reason in calls["fallen"]:
                assert any(word in reason for word in case.falls), f"{operator} fell through: {reason}"
        exact = functools.partial(_run, entry, _double(sample), False)
        _compare(f"{name} for {sample.summary()}", native, found, exact, case.double)
    missing = [operator for operator in case.operators if not reached.get(operator)]
    assert not missing or dtype != torch.float32, f"never taken: {missing}; taken: {reached}"


def check_errors(name: str, device: str = "cpu") -> None:
    """What the framework refuses has to be refused under lucidnn by the same type of error in the same words."""
    entry = _entries()[name]
    assert entry.error_inputs_func is not None, f"the framework's database has no error inputs of {name}"
    for wrong in entry.error_inputs(device):
        said = []
        sample = wrong.sample_input
        for context in (contextlib.nullcontext, lucidnn.torch.enable):
            try:
                with context():
                    entry.op(sample.input, *sample.args, **sample.kwargs)
            except Exception as error:
                said.append((type(error), str(error)))
            else:
                said.append(None)
        assert said[0] == said[1], f"{name}: natively {said[0]}, under lucidnn {said[1]}"
        assert said[0] is not None, f"{name}: the framework raised nothing"
