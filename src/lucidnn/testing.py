"""Running an engine under suspicion: poisoned outputs and workspaces, guard bands, comparison in float64.

Used by the tests and by ``lucidnn verify``; for an engine of your own::

    check = verify(problem, engine, engine.configs(problem)[0], torch.device("cpu"))
    assert not check.fault
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .core import numerics
from .core.descriptor import DTYPES, TensorDescriptor
from .core.engine import Config, Engine, Run
from .core.problem import Problem

GUARD = 4096  # bytes before and after every buffer that must stay as they were; a multiple of 16
_POISON = 0xFF  # every float type reads these bytes as NaN


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
        torch.as_strided(flat, numerics.distinct(t), t.strides).zero_()
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
    run(
        (*(inputs[r] for r in problem.inputs), *outputs.values()),
        given["workspace"] if workspace_size else None,
    )
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
        torch.as_strided(elements, numerics.distinct(t), t.strides).fill_(False)
        start = tensor.data_ptr() - buffer.data_ptr()
        outside[start : start + t.span * t.itemsize] = elements.repeat_interleave(t.itemsize)
    return outside


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
        With the relative error of every output, and a fault where an error passes `numerics.tolerance`, memory outside
        was written, an input changed, or the runs differ though the engine has not the note ``nondeterministic``.
    """
    import torch

    inputs, buffers = {}, {}
    for role in problem.inputs:
        inputs[role], buffers[role] = allocate(problem[role], device)
    numerics.fill(problem, inputs, seed)
    before = {role: buffer.clone() for role, buffer in buffers.items()}
    run, size = engine.build(problem, config), engine.workspace_size(problem, config)
    outputs, fault = run_guarded(problem, run, size, inputs, device)
    again, second = run_guarded(problem, run, size, inputs, device)
    errors, difference = numerics.disagreement(problem, outputs, numerics.reference(problem, inputs, device))
    faults = [fault, second, difference]
    for role, buffer in buffers.items():
        if not torch.equal(buffer, before[role]):
            faults.append(f"changed its input {role}, or memory around it")
    for role, out in outputs.items():
        same = torch.equal(out.contiguous().view(torch.uint8), again[role].contiguous().view(torch.uint8))
        if not same and "nondeterministic" not in engine.notes:
            faults.append(f"two runs differ in {role}")
    return Check(errors, next(filter(None, faults), ""))
