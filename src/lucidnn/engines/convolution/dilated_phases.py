"""``conv.dilated_phases``: a dilated convolution on a CPU as a dense one, every d-th pixel a smaller image.

Method. With dilation d an output pixel reads only input pixels whose positions differ by multiples of d. The pixels
p = d * i + a of every phase a therefore form an image of their own, and the taps, which lie d apart in the whole, are
neighbours in it. The phases are copied into the workspace, one after another along the batch axis, so that one plain
convolution with dilation 1 and d^2 times as many images (2-D) serves them all; its result is put back in place. Where
the sizes are no multiple of d, the last pixels of some phases are zeros. Padding stays with the inner problem: of p
points, the first ceil(p / d) of a phase. In between runs whichever engine is best for the dense problem, Winograd not
least: configurations are the others' names and configurations.

Cost: the inner engine's, and each image read and written once more. Direct convolution reads a slab of the image that
grows with d^2 and leaves the cache with many channels; that is where this pays. Workspace: the copies and the inner
engine's own. Limits: stride 1 along dilated axes; at most 256 phases for a filter gradient. The inner engine's notes
hold here, and settings that keep a note or an engine out keep it out of the inside, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch

from ...core.descriptor import DTYPES, TensorDescriptor
from ...core.engine import Config, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._inner import ALIGN, OuterEngine

TYPES = ("f64", "f32", "f16", "bf16")
MOST_PHASES = 256  # of a filter gradient: with 576 it took 306 ms where others took 230
UNFIT = frozenset({"reference", "nondeterministic", "fft"})


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One spatial axis: the phases' sizes, the pixel (at most 0) that is the first of phase 0, and inner padding."""

    dilation: int
    x_size: int
    y_size: int
    lead: int
    padding: tuple[int, int]

    @classmethod
    def of(cls, size: int, out: int, taps: int, padding: tuple[int, int], dilation: int) -> _Axis:
        """
        >>> _Axis.of(7, 7, 3, (2, 2), 2)
        _Axis(dilation=2, x_size=4, y_size=4, lead=0, padding=(1, 1))
        """
        if dilation == 1:
            return cls(1, size, out, 0, padding)
        before, lead = divmod(padding[0], dilation)
        x_size = -(-(size + lead) // dilation)
        y_size = max(-(-out // dilation), x_size + before - taps + 1)
        return cls(dilation, x_size, y_size, lead, (before, y_size + taps - 1 - before - x_size))


class _Images:
    """Tensors of images, taken apart into phases and put together: where they lie and how they are copied."""

    def __init__(self, tensor: TensorDescriptor, axes: list[_Axis], sizes: tuple[int, ...], leads: list[int]):
        phases = [axis.dilation for axis in axes]
        shape = (math.prod(phases) * tensor.shape[0], tensor.shape[1], *sizes)
        self.outer = tensor
        self.inner = TensorDescriptor.make(tensor.dtype, shape, tensor.layout if tensor.is_channels_last else "")
        self.dtype = getattr(torch, DTYPES[tensor.dtype][0])
        self.bytes = -(-self.inner.nbytes // ALIGN) * ALIGN
        # For each phase, the slices of its own image and of the whole one; all are one copy where they fill both.
        space = [*zip(tensor.shape[2:], sizes, phases, leads, strict=True)]
        self.whole = all(lead == 0 and size == n * d for size, n, d, lead in space)
        self.pairs: list[tuple[int, tuple[slice, ...], tuple[slice, ...]]] = []
        n, c, *steps = tensor.strides
        step_n, step_c, *inner_steps = self.inner.strides
        batch = [step_n * tensor.shape[0] * math.prod(phases[i + 1 :]) for i in range(len(phases))]
        if self.whole:
            order = (*phases, tensor.shape[0], tensor.shape[1], *sizes)
            self.there = order, (*steps, n, c, *(s * d for s, d in zip(steps, phases, strict=True)))
            self.here = order, (*batch, step_n, step_c, *inner_steps)
            return
        for number, phase in enumerate(itertools.product(*map(range, phases))):
            here, there = [slice(None)] * 2, [slice(None)] * 2
            for a, (size, _, d, lead) in zip(phase, space, strict=True):
                first = 1 if a < lead else 0  # of the phase's pixels, the first that lies in the image
                start = a - lead + first * d
                count = max(0, -(-(size - start) // d))
                here.append(slice(first, first + count))
                there.append(slice(min(start, size), size, d))
            self.pairs.append((number * tensor.shape[0], tuple(here), tuple(there)))

    def apart(self, image: torch.Tensor, phases: torch.Tensor) -> None:
        """Copy an image into its phases; what lies outside of it is zero."""
        if self.whole:
            phases.as_strided(*self.here).copy_(image.as_strided(*self.there))
            return
        phases.zero_()
        for first, here, there in self.pairs:
            phases[first : first + image.shape[0]][here].copy_(image[there])

    def together(self, phases: torch.Tensor, image: torch.Tensor) -> None:
        """Copy phases into the image."""
        if self.whole:
            image.as_strided(*self.there).copy_(phases.as_strided(*self.here))
            return
        for first, here, there in self.pairs:
            image[there].copy_(phases[first : first + image.shape[0]][here])


@dataclasses.dataclass(frozen=True)
class _Plan:
    inner: Problem
    images: dict[str, _Images]  # by role, in the order of the workspace
    workspace: int


@functools.lru_cache(maxsize=256)
def _plan(problem: Problem) -> _Plan:
    op: Any = problem.op
    x, w, y = (problem[role] for role in (op.x_role, op.w_role, op.y_role))
    axes = [_Axis.of(*n) for n in zip(x.shape[2:], y.shape[2:], w.shape[2:], op.padding, op.dilation, strict=True)]
    images = {}
    for role, t in problem.items:
        like = problem.outputs[0] if role == "z" else role
        if like == op.x_role:
            images[role] = _Images(t, axes, tuple(a.x_size for a in axes), [a.lead for a in axes])
        elif like == op.y_role:
            images[role] = _Images(t, axes, tuple(a.y_size for a in axes), [0] * len(axes))
    tensors = {role: images[role].inner if role in images else t for role, t in problem.items}
    plain = dataclasses.replace(op, padding=tuple(a.padding for a in axes), dilation=(1,) * len(axes))
    inner = Problem.create(plain, tensors, problem.target, problem.epilogue, problem.math)
    return _Plan(inner, images, sum(i.bytes for i in images.values()))


class DilatedPhases(OuterEngine):
    """Any direction of a dilated convolution, through whichever engine takes the dense one."""

    name = "conv.dilated_phases"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        op: Any = problem.op
        r.require(max(op.dilation) > 1, "a dilation over 1", op.dilation)
        fits = all(d == 1 or s == 1 for d, s in zip(op.dilation, op.stride, strict=True))
        r.require(fits, "stride 1 along dilated axes", f"stride {op.stride}, dilation {op.dilation}")
        if problem.op.name == "conv_wgrad":  # whose sums are written and read again for every block of phases
            phases = math.prod(op.dilation)
            r.require(phases <= MOST_PHASES, f"at most {MOST_PHASES} phases for a filter gradient", phases)
        self.require_inner(r, problem)
        return r

    def inner(self, problem: Problem) -> Problem:
        return _plan(problem).inner

    def own_workspace(self, problem: Problem) -> int:
        return _plan(problem).workspace

    def unfit(self, problem: Problem) -> frozenset[str]:
        return UNFIT

    def cost(self, problem: Problem, config: Config) -> float:
        p = _plan(problem)
        # Copies whose elements lie apart reach a part of the memory's rate, and less with few pixels a row.
        moved = sum(2 * i.bytes / min(1, i.inner.shape[-1] / 16) for i in p.images.values())
        calls = sum(1 if i.whole else 1 + len(i.pairs) for i in p.images.values())
        copies = roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.3, launches=calls)
        return copies + self.inner_cost(problem, config)

    def build(self, problem: Problem, config: Config) -> Run:
        p = _plan(problem)
        inner = self.build_inner(problem, config)
        at, pieces = 0, {}
        for role, images in p.images.items():
            pieces[role] = (at, at + images.inner.nbytes)
            at += images.bytes
        roles, outputs = tuple(problem.tensors), set(problem.outputs)

        def run(tensors: tuple[Any, ...], workspace: Any) -> None:
            operands = []
            for role, tensor in zip(roles, tensors, strict=True):
                images = p.images.get(role)
                if images is None:
                    operands.append(tensor)
                    continue
                begin, end = pieces[role]
                phases = workspace[begin:end].view(images.dtype)
                operands.append(phases.as_strided(images.inner.shape, images.inner.strides))
                if role not in outputs:
                    images.apart(tensor, operands[-1])
            inner(tuple(operands), workspace)
            for role in outputs & set(p.images):
                index = roles.index(role)
                p.images[role].together(operands[index], tensors[index])

        return run
