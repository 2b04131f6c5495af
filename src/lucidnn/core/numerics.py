"""What "agrees with the definition" means: random inputs, the reference's outputs, an error measure and its bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from . import registry
from .descriptor import DTYPES, TensorDescriptor
from .problem import Problem

# Unit roundoff of what an operand or result is rounded to.
EXACT = ("u8", "i32", "i64")
_ROUNDOFF = {
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "f8e4m3": 2.0**-4,
    "f8e5m2": 2.0**-3,
}


def tolerance(problem: Problem, role: str) -> float:
    """Largest accepted ``|out - ref| / |ref|`` (Frobenius): rounding of the result, and of a sum over the reduction.

    Rounding errors of a sum of n terms grow like sqrt(n) for random data; products of 16-bit numbers are exact in
    float32. TF32 rounds operands to 11 bits.

    Examples
    --------
    >>> tolerance(Problem.parse("conv_fprop x=bf16[2,64,8,8] w=bf16[8,64,3,3]"), "y") < 1e-2
    True
    """
    out = problem[role]
    arithmetic = "f64" if problem.items[0][1].dtype == "f64" else "f32"
    terms = max(problem.flops / max(2 * out.numel, 1), 1.0)
    error = 2 * _ROUNDOFF[out.dtype] + 4 * _ROUNDOFF[arithmetic] * math.sqrt(terms)
    if problem.math == "tf32":
        error += 2.0**-11
    return error


def empty(t: TensorDescriptor, device: Any) -> Any:
    """An uninitialised framework tensor of this description (alignment is the allocator's)."""
    import torch

    return torch.empty_strided(t.shape, t.strides, dtype=getattr(torch, DTYPES[t.dtype][0]), device=device)


def distinct(t: TensorDescriptor) -> tuple[int, ...]:
    """Shape without repetition: an expanded axis (stride 0), whose points share their elements, counts once."""
    return tuple(n if s else min(n, 1) for n, s in zip(t.shape, t.strides, strict=True))


def fill(problem: Problem, tensors: Mapping[str, Any], seed: int = 0) -> None:
    """Write fresh random values into the inputs: standard normal, or what the operation says of a role."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for role in problem.inputs:
        t = problem[role]
        values = problem.op.sample(role, problem.tensors, distinct(t), generator)
        tensors[role].as_strided(distinct(t), t.strides).copy_(values)


def reference(problem: Problem, inputs: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Outputs of the reference engine, in float64 (integers as they are)."""
    precise = dict(problem.items)
    for role in problem.outputs:
        t = problem[role]
        precise[role] = TensorDescriptor(t.dtype if t.dtype in EXACT else "f64", t.shape)
    exact = dataclasses.replace(problem, items=tuple(precise.items()))
    engines = registry.for_operation(problem.op.name)
    engine = next(e for e in engines if "reference" in e.notes and problem.target.kind in e.targets)
    outputs = {role: empty(exact[role], device) for role in problem.outputs}
    engine.build(exact, {})((*(inputs[r] for r in problem.inputs), *outputs.values()), None)
    return outputs


def relative_error(out: Any, ref: Any) -> float:
    """``|out - ref| / |ref|`` in float64; infinite where NaN or infinity stands in one and not in the other."""
    import torch

    out, ref = out.double(), ref.double()
    strange = ~torch.isfinite(ref)
    if bool((strange != ~torch.isfinite(out)).any()) or not torch.equal(
        out[strange].nan_to_num(), ref[strange].nan_to_num()
    ):
        return math.inf
    out, ref = out[~strange], ref[~strange]
    scale = float(ref.norm())
    difference = float((out - ref).norm())
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def disagreement(
    problem: Problem, outputs: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, float], str]:
    """Relative error of every output, and a sentence on the first that passes its bound ('' where none does).

    The whole tensor's error must keep to `tolerance`. Each element's must keep to twice the rounding of its own value
    and eight times the sum's error at the tensor's scale: one missing term shows, however large the tensor is.
    """
    errors = {role: relative_error(outputs[role], expected[role]) for role in problem.outputs}
    for role, error in errors.items():
        limit = 0.0 if problem[role].dtype in EXACT else tolerance(problem, role)
        if not error <= limit:
            return errors, f"{role}: relative error {error:.2e} is over the bound {limit:.2e}"
        if limit and problem[role].numel:
            rounding, ref = 2 * _ROUNDOFF[problem[role].dtype], expected[role].double()
            off = (outputs[role].double() - ref).abs().nan_to_num(0.0)  # infinities were compared above
            scale = float(ref.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
            excess = off - (rounding * ref.abs() + 8 * (limit - rounding) * scale)
            worst = int(excess.argmax())
            if float(excess.flatten()[worst]) > 0:
                place = [worst // math.prod(ref.shape[i + 1 :]) % n for i, n in enumerate(ref.shape)]
                found = float(outputs[role][tuple(place)])
                return (
                    errors,
                    f"{role}: element {place} is {found:.7g}, should be {float(ref[tuple(place)]):.7g}",
                )
    return errors, ""
