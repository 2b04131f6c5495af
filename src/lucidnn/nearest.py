"""The nearest problem that an engine takes: what to say beside its reasons when it was asked for by name.

A best-first search over small changes of the problem (leave out a role, an attribute back at its default, another type,
a dense layout, a channel count rounded up, ...). The next problem to change is the one to which the engine objects
least; among equals the one with the fewest changes. Stands above `lucidnn.core`, which loads it by name: it knows which
operations have shapes that follow from one another.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from .core.descriptor import TensorDescriptor
from .core.engine import Engine
from .core.errors import InvalidArgument
from .core.operation import Epilogue
from .core.problem import Problem
from .ops.convolution import Convolution

TRIES = 400  # problems that the engine is asked about
TYPES = ("f32", "bf16", "f16", "f64")
ROUNDED = (8, 16)  # channel counts that vector loads and matrix units like


def nearest(problem: Problem, engine: Engine) -> Problem | None:
    """A problem that the engine takes, a few changes away; None where none was found.

    Parameters
    ----------
    problem : Problem
        One that the engine refuses.
    engine : Engine
        Of the problem's operation and target.

    Examples
    --------
    >>> from lucidnn.core import registry
    >>> p = Problem.parse("conv_fprop x=f32[1,3,5,5] w=f32[4,3,1,1] stride=2 act=relu on=cpu:avx2:2")
    >>> print(nearest(p, registry.get("conv.pointwise_gemm")))
    conv_fprop x=f32[1,3,5,5]@nchw w=f32[4,3,1,1]@nchw y=f32[1,4,5,5]@nchw on=cpu:avx2:2
    """
    order = itertools.count()
    queue = [(len(engine.reasons(problem)), 0, next(order), problem)]
    seen = {problem}
    while queue and len(seen) < TRIES:
        _, steps, _, here = heapq.heappop(queue)
        for changed in _changes(here):
            if changed in seen:
                continue
            seen.add(changed)
            reasons = engine.reasons(changed)
            if not reasons:
                return changed
            heapq.heappush(queue, (len(reasons), steps + 1, next(order), changed))
    return None


def hint(problem: Problem, engine: Engine) -> str:
    """The nearest problem in words that follow on "does not take ..."; '' where there is none to name."""
    if problem.target.kind not in engine.targets or not engine.reasons(problem):  # a setting keeps it out, perhaps
        return ""
    found = nearest(problem, engine)
    return f"; the nearest that it takes: {found}" if found else ""


def _changes(p: Problem) -> Iterator[Problem]:
    """All problems one change away that are well-formed."""
    plain, tensors, e = Epilogue(), dict(p.items), p.epilogue
    for role in p.op.optional:
        if role in tensors:
            rest = {r: t for r, t in tensors.items() if r != role}
            yield from _made(p, tensors=rest, epilogue=dataclasses.replace(e, beta=0.0) if role == "z" else e)
    if e.activation != "identity":
        yield from _made(p, epilogue=dataclasses.replace(e, activation="identity", parameter=0.0))
    if e.alpha != 1.0:
        yield from _made(p, epilogue=dataclasses.replace(e, alpha=plain.alpha))
    for mode in p.op.math_modes:
        if mode != p.math:
            yield from _made(p, math=mode)
    for field in dataclasses.fields(p.op):
        if not p.op.is_default(field.name):
            yield from _made(p, op=dataclasses.replace(p.op, **{field.name: field.default}))
    for kind in TYPES:
        changed = {r: dataclasses.replace(t, dtype=kind) for r, t in tensors.items() if r != "scale"}
        yield from _made(p, tensors=tensors | changed)
    for last in (False, True):
        yield from _made(p, tensors={r: _dense(t, last) for r, t in tensors.items()})
    if p.is_empty:
        filled = {r: _resized(t, tuple(max(n, 1) for n in t.shape)) for r, t in tensors.items()}
        yield from _made(p, tensors=filled)
    if isinstance(p.op, Convolution):
        yield from _convolutions(p, p.op)


def _convolutions(p: Problem, op: Convolution) -> Iterator[Problem]:
    x, w = p[op.x_role], p[op.w_role]
    ndim = x.ndim - 2
    if not op.flip:
        yield from _made(p, op=dataclasses.replace(op, flip=True))
    if set(op.dilation) == {1}:  # wider, with as much more padding
        pads = tuple((a + (r - 1) // 2, b + r // 2) for (a, b), r in zip(op.padding, w.shape[2:], strict=True))
        yield from _made(p, op=dataclasses.replace(op, dilation=(2,) * ndim, padding=pads))
    yield from _made(p, tensors={**dict(p.items), op.x_role: _resized(x, (0, *x.shape[1:]))})
    for size in (1, 3):
        yield from _made(p, tensors={**dict(p.items), op.w_role: _resized(w, (*w.shape[:2], *(size,) * ndim))})
    if op.groups > 1:
        whole = _resized(w, (w.shape[0], x.shape[1], *w.shape[2:]))
        yield from _made(p, op=dataclasses.replace(op, groups=1), tensors={**dict(p.items), op.w_role: whole})
        if x.shape[1] != op.groups:  # depthwise
            single = _resized(w, (x.shape[1], 1, *w.shape[2:]))
            changed = dataclasses.replace(op, groups=x.shape[1])
            yield from _made(p, op=changed, tensors={**dict(p.items), op.w_role: single})
    elif x.shape[1] > 1:
        single = _resized(w, (x.shape[1], 1, *w.shape[2:]))
        changed = dataclasses.replace(op, groups=x.shape[1])
        yield from _made(p, op=changed, tensors={**dict(p.items), op.w_role: single})
    if op.stride != w.shape[2:]:  # patches
        yield from _made(p, op=dataclasses.replace(op, stride=w.shape[2:]))
    for unit in ROUNDED:
        c, k = (-(-n // (unit * op.groups)) * unit * op.groups for n in (x.shape[1], w.shape[0]))
        resized = {
            op.x_role: _resized(x, (x.shape[0], c, *x.shape[2:])),
            op.w_role: _resized(w, (k, c // op.groups, *w.shape[2:])),
        }
        yield from _made(p, tensors=dict(p.items) | resized)
    for n in (1, 2):  # channels of a group
        resized = {
            op.x_role: _resized(x, (x.shape[0], n * op.groups, *x.shape[2:])),
            op.w_role: _resized(w, (w.shape[0], n, *w.shape[2:])),
        }
        yield from _made(p, tensors=dict(p.items) | resized)


def _dense(t: TensorDescriptor, last: bool) -> TensorDescriptor:
    made = TensorDescriptor.make(t.dtype, t.shape)
    if not last or t.ndim < 3:
        return made
    layout = {3: "nwc", 4: "nhwc", 5: "ndhwc"}[t.ndim]
    return TensorDescriptor.make(t.dtype, t.shape, layout)


def _resized(t: TensorDescriptor, shape: tuple[int, ...]) -> TensorDescriptor:
    return t if t.shape == shape else _dense(dataclasses.replace(t, shape=shape, strides=None), t.is_channels_last)


def _made(p: Problem, **changes: Any) -> Iterator[Problem]:
    """The changed problem, its other shapes made to fit; nothing where it is ill-formed."""
    op = changes.get("op", p.op)
    tensors: Mapping[str, TensorDescriptor] = changes.get("tensors", dict(p.items))
    try:
        fitted = dict(tensors)
        if isinstance(op, Convolution):
            x, w = fitted[op.x_role], fitted[op.w_role]
            op = op.resolved({role: fitted[role] for role in op.inputs})
            y = (x.shape[0], w.shape[0], *op.output_sizes(x, w))
            fitted[op.y_role] = _resized(fitted[op.y_role], y)
            out = fitted[op.outputs[0]]
            for role in ("z", "bias", "scale"):
                if role in fitted:
                    t = fitted[role]
                    one = (1,) if role == "scale" and t.shape == (1,) else (out.shape[1],)
                    fitted[role] = _resized(t, out.shape if role == "z" else one)
        yield Problem.create(op, fitted, p.target, changes.get("epilogue", p.epilogue), changes.get("math", p.math))
    except (InvalidArgument, ValueError):
        return
