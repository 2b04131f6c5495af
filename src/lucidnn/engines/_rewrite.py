"""Describes copies that pad, turn around, fold, convert and finish a tensor, and makes the function that runs them.

A `Rewrite` fills a `Place` (a tensor of the problem, or a part of the workspace) from another one. On each spatial axis
a mode says which positions of the source stand for a position of the result; `adjoint` asks for the gradient of that
copy, in which each position gathers all that it stood for. The kernels are ``_numba/rewrite.py`` and
``_triton/rewrite.py``; both read each element of the source once and sum in a fixed order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..core.descriptor import DTYPES, TensorDescriptor
from ..core.engine import Run
from ..core.operation import Epilogue
from ..core.problem import Problem
from ..ops.convolution import five_strides, three

MODES = ("as_is", "turned", "reflect", "replicate", "circular")  # a mode's number in the Triton kernel
FLOAT8 = ("f8e4m3", "f8e5m2")
_CPU_BLOCK = 32_768  # elements that are worth a thread


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operand lies: a tensor of the problem by its role, or the workspace from byte `offset` on."""

    tensor: TensorDescriptor
    role: str | None = None
    offset: int = 0

    def view(self, named: dict[str, Any], workspace: Any) -> torch.Tensor:
        """The operand as a framework tensor."""
        if self.role is not None:
            return named[self.role]
        t = self.tensor
        flat = workspace[self.offset : self.offset + t.span * t.itemsize].view(getattr(torch, DTYPES[t.dtype][0]))
        return flat.as_strided(t.shape, t.strides)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One copy. `modes`, `before` and `after` have an entry for D, H and W; paddings belong to the padded side."""

    source: Place
    target: Place
    modes: tuple[str, str, str] = ("as_is",) * 3
    before: tuple[int, int, int] = (0, 0, 0)
    after: tuple[int, int, int] = (0, 0, 0)
    adjoint: bool = False
    epilogue: Epilogue = Epilogue()
    scale: str | None = None  # roles
    bias: str | None = None
    z: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of the spatial axes without padding."""
        return three((self.target if self.adjoint else self.source).tensor.shape[2:], 1)

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.source.tensor.nbytes + self.target.tensor.nbytes * (2 if self.z else 1)

    @property
    def arithmetic(self) -> str:
        """The type of sums. Whole ones have 32 bits once an int32 bias is added, more than float32 holds."""
        return "f64" if {"f64", "i32"} & {self.source.tensor.dtype, self.target.tensor.dtype} else "f32"

    def lists(self, axis: int) -> list[list[int]]:
        """For each position of the result along an axis, the positions of the source that it sums, in order.

        Examples
        --------
        >>> short, long = (Place(TensorDescriptor("f32", (1, 1, n))) for n in (4, 7))
        >>> pad = Rewrite(short, long, ("as_is", "as_is", "reflect"), (0, 0, 2), (0, 0, 1))
        >>> [i for (i,) in pad.lists(2)]
        [2, 1, 0, 1, 2, 3, 2]
        >>> dataclasses.replace(pad, source=long, target=short, adjoint=True).lists(2)
        [[2], [1, 3], [0, 4, 6], [5]]
        """
        size, mode = self.sizes[axis], self.modes[axis]
        padded = range(-self.before[axis], size + self.after[axis])
        if mode == "turned":
            places = [size - 1 - i for i in padded]
        elif mode == "reflect":
            places = [size - 1 - abs(size - 1 - abs(i)) for i in padded]
        elif mode == "replicate":
            places = [min(max(i, 0), size - 1) for i in padded]
        else:
            places = [i % size for i in padded]
        if not self.adjoint:
            return [[i] for i in places]
        found: list[list[int]] = [[] for _ in range(size)]
        for place, i in enumerate(places):
            found[i].append(place)
        return found

    def terms(self, axis: int) -> int:
        """How many positions of the source the Triton kernel asks for: its own, one from either side, or a run."""
        if self.adjoint and self.modes[axis] in ("reflect", "circular"):
            return 3
        return max(map(len, self.lists(axis)))


def rewriting(problem: Problem, rewrites: Sequence[Rewrite]) -> Run:
    """The function that runs copies one after another; it takes tensors and workspace as a plan's function does."""
    if not rewrites:
        return lambda tensors, workspace: None
    if problem.target.is_gpu:
        from ._triton.launch import Program

        return Program(problem, [_launch(problem, r) for r in rewrites])
    roles = tuple(problem.tensors)
    steps = [_cpu_step(problem, r) for r in rewrites]

    def run(tensors: tuple[Any, ...], workspace: Any) -> None:
        named = dict(zip(roles, tensors, strict=True))
        for step in steps:
            step(named, workspace)

    return run


def _shape(t: TensorDescriptor) -> tuple[int, ...]:
    return (*t.shape[:2], *three(t.shape[2:], 1))


def _vector_step(problem: Problem, role: str | None) -> int:
    """Elements from one channel's scale or bias to the next; 0 where one serves all."""
    t = problem.tensors.get(role or "")
    return t.strides[0] if t is not None and t.shape[0] > 1 else 0


def _by_pixel(r: Rewrite) -> bool:
    return r.target.tensor.strides[1] == 1 and r.target.tensor.shape[1] > 1


def _launch(problem: Problem, r: Rewrite) -> Any:
    import triton

    from ..ops.activation import ACTIVATIONS
    from ._triton.launch import Launch, Real, Slice
    from ._triton.rewrite import rewrite

    def argument(place: Place) -> Any:
        return Slice(place.offset, place.tensor.dtype) if place.role is None else place.role

    shape, sizes = _shape(r.target.tensor), r.sizes
    totals = [n + a + b for n, a, b in zip(sizes, r.before, r.after, strict=True)]
    e, kind = r.epilogue, r.arithmetic
    z_strides = five_strides(problem[r.z]) if r.z else (0,) * 5
    names = ("n", "c", "d", "h", "w")
    numbers = {"count": math.prod(shape)} | dict(zip("NCDHW", shape, strict=True))
    for i, axis in enumerate("dhw"):
        numbers |= {f"size_{axis}": sizes[i], f"before_{axis}": r.before[i], f"total_{axis}": totals[i]}
    for prefix, strides in (
        ("src", five_strides(r.source.tensor)),
        ("z", z_strides),
        ("dst", five_strides(r.target.tensor)),
    ):
        numbers |= {f"{prefix}_{name}": step for name, step in zip(names, strides, strict=True)}
    block = 1024
    return Launch(
        rewrite,
        (triton.cdiv(math.prod(shape), block),),
        {
            "src": argument(r.source), "dst": argument(r.target), "scale": r.scale, "bias": r.bias, "z": r.z,
            "alpha": None if e.alpha == 1.0 else Real(e.alpha, kind),
            "beta": None if e.beta in (0.0, 1.0) else Real(e.beta, kind),
            "parameter": None if ACTIVATIONS[e.activation].parameter is None else Real(e.parameter, kind),
            "scale_step": _vector_step(problem, r.scale), "bias_step": _vector_step(problem, r.bias), **numbers,
        },
        {
            **{f"TERMS_{axis}": r.terms(i) for i, axis in enumerate("DHW")},
            **{f"MODE_{axis}": MODES.index(r.modes[i]) for i, axis in enumerate("DHW")},
            "ADJOINT": r.adjoint, "BY_PIXEL": _by_pixel(r), "ACT": ACTIVATIONS[e.activation].code,
            "DOUBLE": kind == "f64", "BLOCK": block,
        },
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _cpu_step(problem: Problem, r: Rewrite) -> Any:
    if {r.source.tensor.dtype, r.target.tensor.dtype} & {*FLOAT8}:
        return _convert_float8(r)
    from . import _numba as nb
    from ._numba import rewrite as kernels

    e, shape = r.epilogue, _shape(r.target.tensor)
    vectors = [role for role in (r.scale, r.bias, r.z) if role is not None]
    bare = e == Epilogue() and not vectors
    lists = [r.lists(axis) for axis in range(3)]
    single = all(len(one) == 1 for axis in lists for one in axis)
    # Along W, the longest run over which source and result advance together.
    first, last, shift = _run(lists[2]) if single else (0, 0, 0)
    head = [
        *shape, *five_strides(r.target.tensor), *five_strides(r.source.tensor),
        *(five_strides(problem[r.z]) if r.z else (0,) * 5),
        _vector_step(problem, r.scale), _vector_step(problem, r.bias), int(r.z is not None), int(_by_pixel(r)),
        int(bare), int(single), first, last, shift,
    ]  # fmt: skip
    at, tail = kernels.HEAD, []
    for axis in lists:
        starts = [0]
        for one in axis:
            starts.append(starts[-1] + len(one))
        places = [i for one in axis for i in one]
        head += [at, at + len(starts)]
        at += len(starts) + len(places)
        tail += [*starts, *places]
    table = torch.tensor([*head, *tail], dtype=torch.int64)
    scalars = torch.tensor([e.alpha, e.beta, e.parameter], dtype=torch.float64)
    code, acc = nb.ACTIVATIONS[e.activation], nb.token(r.arithmetic)
    tokens = [nb.token(problem[role].dtype) if role else acc for role in (r.bias, r.z)]
    like, out = nb.token(r.source.tensor.dtype), nb.token(r.target.tensor.dtype)
    limit = min(problem.target.processors, 1 + r.target.tensor.numel // _CPU_BLOCK)

    def step(named: dict[str, Any], workspace: Any) -> None:
        base = 0 if workspace is None else workspace.data_ptr()
        source, target = (base + p.offset if p.role is None else named[p.role].data_ptr() for p in (r.source, r.target))
        others = [0 if role is None else named[role].data_ptr() for role in (r.scale, r.bias, r.z)]
        kernels.rewrite(
            min(nb.threads(), limit), table.data_ptr(), scalars.data_ptr(), source, *others, target, code, like, acc,
            *tokens, out,
        )  # fmt: skip

    return step


def _run(places: list[list[int]]) -> tuple[int, int, int]:
    best, first = (0, 0), 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i][0] != places[i - 1][0] + 1:
            best = max(best, (i - first, -first))
            first = i
    count, first = best[0], -best[1]
    return first, first + count, places[first][0] - first


def _convert_float8(r: Rewrite) -> Any:
    """Plain conversion, which is all that is asked of float8 on a CPU: Numba has no such type, the framework has."""
    assert dataclasses.replace(r, source=r.target) == Rewrite(r.target, r.target)
    largest = torch.finfo(getattr(torch, DTYPES[r.target.tensor.dtype][0])).max

    def step(named: dict[str, Any], workspace: Any) -> None:
        with torch.no_grad():
            source, target = r.source.view(named, workspace), r.target.view(named, workspace)
            if r.target.tensor.dtype in FLOAT8:
                source = source.clamp(-largest, largest)  # where the type's own conversion gives NaN or infinity
            target.copy_(source)

    return step
