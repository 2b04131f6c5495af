"""Proof: lists of problems, what "agrees with the definition" means, and running an engine under suspicion.

The reference engine answers in float64; an error measure and its bound say whether another engine agrees. `verify`
runs an engine on poisoned outputs and workspaces between guard bands. Used by the tests, by `lucidnn.find` and by
``lucidnn verify``; for an engine of your own::

    check = verify(problem, engine, engine.configs(problem)[0], torch.device("cpu"))
    assert not check.fault
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .core import registry
from .core.descriptor import DTYPES, TensorDescriptor
from .core.engine import Config, Engine, Run
from .core.errors import ProblemSyntaxError
from .core.problem import Problem
from .core.target import Target

GUARD = 4096  # bytes before and after every buffer that must stay as they were; a multiple of 16
_POISON = 0xFF  # every float type reads these bytes as NaN

# Unit roundoff of what an operand or result is rounded to.
EXACT = ("u8", "i32", "i64", "bool")
LIMITS = {"i8": (-128.0, 127.0), "f8e4m3": (-448.0, 448.0), "f8e5m2": (-57344.0, 57344.0)}  # results are cut off there
_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f8e4m3": 2.0**-4, "f8e5m2": 2.0**-3}


def tolerance(problem: Problem, role: str) -> float:
    """Largest accepted ``|out - ref| / |ref|`` (Frobenius): rounding of the result, and of a sum over the reduction.

    Rounding errors of a sum of n terms grow like sqrt(n) for random data; products of 16-bit numbers are exact in
    float32. TF32 keeps 11 bits of an operand, rounded or (as hardware does) cut off; the share of a single product in a
    small result can be the worst one. Rounding to int8 is an absolute error, which `disagreement` sees to.

    Examples
    --------
    >>> tolerance(Problem.parse("conv_fprop x=bf16[2,64,8,8] w=bf16[8,64,3,3]"), "y") < 1e-2
    True
    """
    out, operand = problem[role], problem.items[0][1].dtype
    arithmetic = _ROUNDOFF["f64" if operand == "f64" else "f32"]
    if operand.startswith("f8"):
        arithmetic = 2.0**-14  # matrix units keep no more of a sum of float8 products
    terms = max(problem.flops / max(2 * out.numel, 1), 1.0)
    error = 2 * _ROUNDOFF.get(out.dtype, 0.0) + 4 * arithmetic * math.sqrt(terms)
    if problem.math == "tf32":
        error += 2.0**-10 * (1 + out.numel**-0.5)
    return error


def empty(t: TensorDescriptor, device: Any) -> Any:
    """An uninitialised framework tensor of this description (alignment is the allocator's)."""
    import torch

    return torch.empty_strided(t.shape, t.strides, dtype=getattr(torch, DTYPES[t.dtype][0]), device=device)


def distinct(t: TensorDescriptor) -> tuple[int, ...]:
    """Shape without repetition: an expanded axis (stride 0), whose points share their elements, counts once."""
    return tuple(n if s else min(n, 1) for n, s in zip(t.shape, t.strides, strict=True))


# Kinds of inputs: as the operation samples them (standard normal); with a mean of 16; over 16 powers of two; with one
# NaN and both infinities among the first input's values.
KINDS = ("plain", "large mean", "wide range", "NaN and inf")


def fill(problem: Problem, tensors: Mapping[str, Any], seed: int = 0, kind: str = "plain") -> None:
    """Write fresh random values of one of the `KINDS` into the inputs. Whole numbers are always as sampled."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for number, role in enumerate(problem.inputs):
        t = problem[role]
        values = problem.op.sample(role, problem.tensors, distinct(t), generator)
        if values.is_floating_point() and number < len(problem.op.inputs):
            if kind == "large mean":
                values = values + (16.0 if number == 0 else 0.0)
            elif kind == "wide range":
                values = values * 2.0 ** torch.randint(-8, 9, values.shape, generator=generator)
            elif kind == "NaN and inf" and number == 0 and values.numel():
                places = torch.randint(0, values.numel(), (3,), generator=generator)
                for place, value in zip(places.tolist(), (math.nan, math.inf, -math.inf), strict=True):
                    values.view(-1)[place] = value
        tensors[role].as_strided(distinct(t), t.strides).copy_(values)


def buffers(problem: Problem, device: Any, seed: int = 0) -> dict[str, Any]:
    """A tensor for every role of a problem: inputs filled, outputs not."""
    tensors = {role: empty(t, device) for role, t in problem.items}
    fill(problem, tensors, seed)
    return tensors


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


def strangers(out: Any, ref: Any) -> int:
    """How many elements are NaN or infinite (of either sign) in one tensor and not the same in the other."""
    import torch

    out, ref = out.double(), ref.double()
    same = (out == ref) | (out.isnan() & ref.isnan()) | (torch.isfinite(out) & torch.isfinite(ref))
    return int((~same).sum())


def disagreement(
    problem: Problem, outputs: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, float], str]:
    """Relative error of every output, and a sentence on the first that passes its bound ('' where none does).

    The whole tensor's error must keep to `tolerance`. Each element's must keep to twice the rounding of its own value
    and eight times the sum's error at the tensor's scale: one missing term shows, however large the tensor is. Where
    the tensor is smaller than such sums usually are (a few of them may cancel), their usual size is the scale. A result
    of type int8 is a whole number at most a half from the value cut off at its limits, give or take the sum's error.
    """
    import torch

    # Only where there is a limit: clamping makes float32 of whole numbers, which cannot hold all of them.
    kinds = {role: problem[role].dtype for role in problem.outputs}
    expected = {role: t.clamp(*LIMITS[kinds[role]]) if kinds[role] in LIMITS else t for role, t in expected.items()}
    errors = {role: relative_error(outputs[role], expected[role]) for role in problem.outputs}
    for role, error in errors.items():
        if problem[role].dtype in EXACT:
            if error:
                return errors, f"{role}: relative error {error:.2e}, and whole numbers must agree"
        elif problem[role].numel:
            limit, ref = tolerance(problem, role), expected[role].double()
            whole = problem[role].dtype == "i8"
            rounding = 0.0 if whole else 2 * _ROUNDOFF[problem[role].dtype]
            size = float(ref.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
            usual = abs(problem.epilogue.alpha) * math.sqrt(max(problem.flops / (2 * ref.numel()), 1.0))
            scale = max(size, usual)
            if not whole and not error * size <= rounding * size + (limit - rounding) * scale:
                return errors, f"{role}: relative error {error:.2e} is over the bound {limit:.2e}"
            off = (outputs[role].double() - ref).abs().nan_to_num(0.0)  # infinities were compared above
            if whole:
                own = torch.full_like(ref, 0.5)
            else:
                type_ = torch.finfo(outputs[role].dtype)  # below its normal numbers rounding is to whole steps
                own = (rounding * ref.abs()).clamp(min=type_.smallest_normal * type_.eps)
            excess = off - (own + 8 * (limit - rounding) * scale)
            worst = int(excess.argmax())
            if float(excess.flatten()[worst]) > 0:
                place = [worst // math.prod(ref.shape[i + 1 :]) % n for i, n in enumerate(ref.shape)]
                found = float(outputs[role][tuple(place)])
                return (errors, f"{role}: element {place} is {found:.7g}, should be {float(ref[tuple(place)]):.7g}")
    return errors, ""


def read_problems(path: str | Path, target: Target | None = None) -> list[Problem]:
    """Problems of a file, one a line; ``#`` starts a comment.

    Raises
    ------
    ProblemSyntaxError
        Names file and line.
    """
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = line.partition("#")[0].rstrip()
        if not line:
            continue
        try:
            problems.append(Problem.parse(line, target))
        except ProblemSyntaxError as error:
            raise ProblemSyntaxError(line, error.position, f"{path}:{number}: {error.message}") from None
    return problems


def allocate(t: TensorDescriptor, device: Any, poison: bool = False) -> tuple[Any, Any]:
    """A tensor of this description inside a larger buffer: gives (tensor, buffer).

    The buffer has a guard band on both sides. Its bytes read as NaN, also those between the tensor's elements; the
    elements are zero, or NaN with `poison`. The address is a multiple of the alignment and of no higher power of two.
    """
    import torch

    if t.alignment < t.itemsize:
        raise ValueError(f"{t}: elements must be aligned to their own size")
    nbytes = t.span * t.itemsize
    buffer = torch.full((GUARD + 32 + nbytes + GUARD,), _POISON, dtype=torch.uint8, device=device)
    start = GUARD + -buffer.data_ptr() % 16 + t.alignment % 16
    flat = buffer[start : start + nbytes].view(getattr(torch, DTYPES[t.dtype][0]))
    if not poison and t.numel:
        torch.as_strided(flat, distinct(t), t.strides).zero_()
    return torch.as_strided(flat, t.shape, t.strides), buffer


@dataclasses.dataclass(frozen=True)
class Check:
    """Outcome for one engine: `errors` by output role, and what went wrong ('' where all is well)."""

    errors: Mapping[str, float]
    fault: str = ""


def run_guarded(
    problem: Problem, run: Run, workspace_size: int, inputs: Mapping[str, Any], device: Any
) -> tuple[dict[str, Any], str]:
    """Call what an engine built on poisoned, guarded memory: gives the outputs and a fault ('' if none)."""
    import torch

    described = {role: problem[role] for role in problem.outputs}
    described["workspace"] = TensorDescriptor("u8", (workspace_size,))
    given, buffers = {}, {}
    for role, t in described.items():
        given[role], buffers[role] = allocate(t, device, poison=True)
    outputs = {role: given[role] for role in problem.outputs}
    run((*(inputs[r] for r in problem.inputs), *outputs.values()), given["workspace"] if workspace_size else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for role, buffer in buffers.items():
        if not bool((buffer[_outside(described[role], given[role], buffer)] == _POISON).all()):
            return outputs, f"wrote outside {role}"
    return outputs, ""


def _outside(t: TensorDescriptor, tensor: Any, buffer: Any) -> Any:
    """Mask of the buffer's bytes that belong to no element of the tensor."""
    import torch

    outside = torch.ones_like(buffer, dtype=torch.bool)
    if t.numel:
        elements = torch.ones(t.span, dtype=torch.bool, device=buffer.device)
        torch.as_strided(elements, distinct(t), t.strides).fill_(False)
        start = tensor.data_ptr() - buffer.data_ptr()
        outside[start : start + t.span * t.itemsize] = elements.repeat_interleave(t.itemsize)
    return outside


def repeats(problem: Problem, engine: Engine, first: Mapping[str, Any], second: Mapping[str, Any], role: str) -> bool:
    """Whether two runs agree on a result: to the bit, or within rounding where the engine is not deterministic."""
    import torch

    if "nondeterministic" in engine.notes:
        return relative_error(second[role], first[role]) <= tolerance(problem, role)
    a, b = (t[role].reshape(-1).contiguous().view(torch.uint8) for t in (first, second))
    return torch.equal(a, b)


def verify(problem: Problem, engine: Engine, config: Config, device: Any, seed: int = 0) -> Check:
    """Run an engine on fresh inputs, twice, and hold it to the reference, to its memory and to itself.

    Parameters
    ----------
    problem : Problem
        One that the engine takes.
    engine : Engine
    config : mapping
        One of ``engine.configs(problem)``.
    device : torch.device
        Of the problem's target.
    seed : int
        Of the inputs' random values.

    Returns
    -------
    Check
        With the relative error of every output, and a fault where an error passes `tolerance`, memory outside
        was written, an input changed, or the runs differ though the engine has not the note ``nondeterministic``.
    """
    import torch

    inputs, buffers = {}, {}
    for role in problem.inputs:
        inputs[role], buffers[role] = allocate(problem[role], device)
    fill(problem, inputs, seed)
    before = {role: buffer.clone() for role, buffer in buffers.items()}
    run, size = engine.build(problem, config), engine.workspace_size(problem, config)
    expected = reference(problem, inputs, device)
    outputs, fault = run_guarded(problem, run, size, inputs, device)
    again, second = run_guarded(problem, run, size, inputs, device)
    faults = [fault, second]
    for role, buffer in buffers.items():
        if not torch.equal(buffer, before[role]):
            faults.append(f"changed its input {role}, or memory around it")
    errors, difference = disagreement(problem, outputs, expected)
    faults.append(difference)
    faults += [f"two runs differ in {role}" for role in outputs if not repeats(problem, engine, outputs, again, role)]
    return Check(errors, next(filter(None, faults), ""))
