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
from .core.engine import Config, Engine
from .core.problem import Problem

GUARD = 256  # bytes before and after every output and workspace that must stay as they were
_POISON = 0xFF  # every float type reads these bytes as NaN


def allocate(t: TensorDescriptor, device: Any, poison: bool = False) -> tuple[Any, Any]:
    """A tensor of this description inside a larger buffer: gives (tensor, buffer).

    The buffer has a guard band on both sides; its bytes, and with `poison` the tensor's too, read as NaN.
    """
    import torch

    lead = GUARD if t.alignment == 16 else GUARD + t.alignment
    nbytes = t.span * t.itemsize
    buffer = torch.full((lead + nbytes + GUARD,), _POISON, dtype=torch.uint8, device=device)
    shift = -buffer.data_ptr() % 16  # allocators align to 16 or more, this only makes sure
    lead += shift
    if lead + nbytes + GUARD > buffer.numel():
        buffer = torch.full((lead + nbytes + GUARD,), _POISON, dtype=torch.uint8, device=device)
    dtype = getattr(torch, DTYPES[t.dtype][0])
    if t.alignment < t.itemsize:
        raise ValueError(f"{t}: elements must be aligned to their own size")
    flat = buffer[lead : lead + nbytes].view(dtype)
    tensor = torch.as_strided(flat, t.shape, t.strides)
    if not poison and nbytes:
        flat.zero_()
    return tensor, buffer


@dataclasses.dataclass(frozen=True)
class Check:
    """Outcome for one engine: `error` by output role, and what went wrong ('' where all is well)."""

    errors: Mapping[str, float]
    fault: str = ""


def run_guarded(problem: Problem, engine: Engine, config: Config, inputs: Mapping[str, Any], device: Any) -> tuple[dict[str, Any], str]:
    """Build and run once on poisoned, guarded memory: gives the outputs and a fault ('' if none)."""
    import torch

    run = engine.build(problem, config)
    outputs, buffers = {}, {}
    for role in problem.outputs:
        outputs[role], buffers[role] = allocate(problem[role], device, poison=True)
    size = engine.workspace_size(problem, config)
    workspace, buffers["workspace"] = allocate(TensorDescriptor("u8", (size,)), device, poison=True)
    before = {role: tensor.clone() for role, tensor in inputs.items()}
    run((*(inputs[r] for r in problem.inputs), *outputs.values()), workspace if size else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for role, buffer in buffers.items():
        t = problem.tensors.get(role) or TensorDescriptor("u8", (size,))
        touched = torch.ones_like(buffer, dtype=torch.bool)
        tensor = outputs.get(role, workspace)
        start = tensor.data_ptr() - buffer.data_ptr() if t.numel else 0
        inside = torch.zeros(buffer.numel() // t.itemsize + 1, dtype=torch.bool, device=device)
        if t.numel:
            torch.as_strided(inside, t.shape, t.strides).fill_(True)
        bytes_inside = inside.repeat_interleave(t.itemsize)[: buffer.numel() - start]
        touched[start:][bytes_inside] = False
        if not bool((buffer[touched] == _POISON).all()):
            return outputs, f"wrote outside {role}"
    for role, tensor in inputs.items():
        if not torch.equal(tensor.contiguous().view(torch.uint8), before[role].contiguous().view(torch.uint8)):
            return outputs, f"changed its input {role}"
    return outputs, ""


def verify(problem: Problem, engine: Engine, config: Config, device: Any, seed: int = 0) -> Check:
    """Run an engine on fresh inputs and hold it to the reference and to its memory.

    Returns
    -------
    Check
        With the relative error of every output, and a fault where an error passes `tolerance`, memory outside was
        written, or an input changed.
    """
    inputs = {role: allocate(problem[role], device)[0] for role in problem.inputs}
    numerics.fill(problem, inputs, seed)
    outputs, fault = run_guarded(problem, engine, config, inputs, device)
    errors, difference = numerics.disagreement(problem, outputs, numerics.reference(problem, inputs, device))
    return Check(errors, fault or difference)
