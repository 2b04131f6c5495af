"""``conv.rewritten``: padding modes, flipped filters, scales and 8-bit types, by way of a plain convolution.

Method. What is rare about the problem is moved into copies. The padded input is written out with what its padding mode
puts there; a flipped filter is turned around; 8-bit operands become float32 (float64 where sums of int8 products pass
2^24, up to which float32 is exact), on a GPU float16, which holds all their values; and where a scale, a type or the
gradient of padding needs it, the plain convolution leaves its sums in the workspace, from which one more copy makes the
result, epilogue included. In between runs whichever engine is best for the plain problem: this one's configurations are
the others' names and configurations, so that cost model, timing and tuned rows choose among them as they do elsewhere.

Cost: the inner engine's, and each rewritten tensor read and written once more. Workspace: the copies and the inner
engine's own. Limits: the inner engines'; on a GPU at most 1,024 int8 products a sum. The inner engine's notes hold
here, and settings that keep a note or an engine out keep it out of the inside, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from ...core.descriptor import TensorDescriptor
from ...core.engine import Config, Refusals, Run
from ...core.heuristics import roofline
from ...core.operation import Epilogue
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._inner import ALIGN, OuterEngine
from .._rewrite import FLOAT8, Place, Rewrite, rewriting

EIGHT_BITS = ("i8", *FLOAT8)
EXACT_TERMS = 2**24 // 128**2  # products of int8 that float32 sums exactly
UNFIT = frozenset({"reference", "nondeterministic"})
INEXACT = frozenset({"winograd", "fft", "reduced_precision"})


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The plain problem, the copies before and after it, where its operands lie, and the workspace of the copies."""

    inner: Problem
    before: tuple[Rewrite, ...]
    after: tuple[Rewrite, ...]
    places: tuple[Place, ...]  # of the inner problem's tensors
    workspace: int


class _Builder:
    """Collects copies and lays them out in the workspace."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.workspace = 0
        self.before: list[Rewrite] = []
        self.after: list[Rewrite] = []

    def part(self, dtype: str, like: TensorDescriptor, shape: tuple[int, ...] | None = None) -> Place:
        """A piece of workspace for a dense tensor in the layout of `like`."""
        layout = like.layout if like.is_channels_last else ""
        place = Place(TensorDescriptor.make(dtype, shape or like.shape, layout), None, self.workspace)
        self.workspace += -(-place.tensor.span * place.tensor.itemsize // ALIGN) * ALIGN
        return place

    def operand(self, role: str, dtype: str, shape: tuple[int, ...] | None = None, **how: Any) -> Place:
        """An input, copied where its type or anything else has to change."""
        here = Place(self.problem[role], role)
        if dtype != here.tensor.dtype and here.tensor.dtype in FLOAT8:
            converted = self.part(dtype, here.tensor)
            self.before.append(Rewrite(here, converted))
            here = converted
        if how or dtype != here.tensor.dtype:
            target = self.part(dtype, here.tensor, shape)
            self.before.append(Rewrite(here, target, **how))
            here = target
        return here

    def result(self, source: Place, **how: Any) -> None:
        """The output, made from the sums in `source` with the problem's epilogue."""
        (role,) = self.problem.outputs
        here = Place(self.problem[role], role)
        given = {name: name for name in ("scale", "bias", "z") if name in self.problem.tensors}
        how |= {"epilogue": self.problem.epilogue, **given}
        if here.tensor.dtype in FLOAT8 and not self.problem.target.is_gpu:
            wide = self.part(source.tensor.dtype, here.tensor)
            self.after += [Rewrite(source, wide, **how), Rewrite(wide, here)]
        else:
            self.after.append(Rewrite(source, here, **how))


def _deep(problem: Problem) -> bool:
    """Whether float32 cannot hold every sum of int8 products."""
    return problem.items[0][1].dtype == "i8" and math.prod(Geometry.of(problem).w.shape[1:]) > EXACT_TERMS


@functools.lru_cache(maxsize=256)
def _plan(problem: Problem) -> _Plan:
    g, op = Geometry.of(problem), problem.op
    direction = op.name.removeprefix("conv_")
    (out,) = problem.outputs
    roles = {"x": op.x_role, "w": op.w_role, "y": op.y_role}  # type: ignore[attr-defined]
    types = {role: problem[role].dtype for role in roles.values()}
    convert = any(kind in EIGHT_BITS for kind in types.values())
    wide = "f64" if "f64" in types.values() or _deep(problem) else "f32"
    operands = "f16" if problem.target.is_gpu else wide
    padded, flipped = g.padding_mode != "zeros", g.flip
    finish = convert or "scale" in problem.tensors
    finish = finish or (direction == "dgrad" and padded) or (direction == "wgrad" and flipped)
    build = _Builder(problem)
    ndim = g.x.ndim - 2
    shape = (*g.x.shape[:2], *(n + sum(p) for n, p in zip(g.x.shape[2:], op.padding, strict=True))) if padded else None
    pads: dict[str, Any] = {}
    if padded:
        modes = tuple("as_is" if not b + a else g.padding_mode for b, a in zip(g.pad, g.pad_after, strict=True))
        pads = {"modes": modes, "before": g.pad, "after": g.pad_after}
    turn = {"modes": ("turned",) * 3} if flipped else {}
    how = {"x": pads, "w": turn, "y": {}}
    places: dict[str, Place] = {}
    for part, role in roles.items():
        if role != out:
            kind = operands if convert else types[role]
            places[role] = build.operand(role, kind, shape if part == "x" else None, **how[part])
    epilogue = problem.epilogue
    if finish:
        places[out] = build.part(wide, problem[out], shape if direction == "dgrad" else None)
        epilogue = Epilogue()
    else:
        places |= {role: Place(t, role) for role, t in problem.items if role not in places}
    plain = dataclasses.replace(
        op, padding_mode="zeros", flip=False, **({"padding": ((0, 0),) * ndim} if padded else {})
    )
    tensors = {role: place.tensor for role, place in places.items()}
    inner = Problem.create(plain, tensors, problem.target, epilogue, problem.math)
    if finish:
        back = dict(how["x" if direction == "dgrad" else "w" if direction == "wgrad" else "y"])
        if direction == "dgrad" and padded:
            back["adjoint"] = True
        build.result(places[out], **back)
    ordered = tuple(places[role] for role in inner.tensors)
    return _Plan(inner, tuple(build.before), tuple(build.after), ordered, build.workspace)


class Rewritten(OuterEngine):
    """Any direction of a convolution with rare parts, through whichever engine takes the rest."""

    name = "conv.rewritten"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"runtime_compilation"})
    takes = frozenset({"padding_mode", "flip", "scale"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        eight = any(t.dtype in EIGHT_BITS for _, t in problem.items)
        r.require(bool(problem.rare) or eight, "a padding mode, a flipped filter, a scale or an 8-bit type", "none")
        exact = not (problem.target.is_gpu and _deep(problem))
        r.require(exact, f"at most {EXACT_TERMS} int8 products a sum", math.prod(Geometry.of(problem).w.shape[1:]))
        self.require_inner(r, problem)
        return r

    def inner(self, problem: Problem) -> Problem:
        return _plan(problem).inner

    def own_workspace(self, problem: Problem) -> int:
        return _plan(problem).workspace

    def unfit(self, problem: Problem) -> frozenset[str]:
        whole = problem.items[0][1].dtype == "i8"  # sums that have to be exact
        return UNFIT | INEXACT if whole else UNFIT

    def cost(self, problem: Problem, config: Config) -> float:
        p = _plan(problem)
        copies = [*p.before, *p.after]
        moved = roofline(
            problem, flops=0.0, bytes=sum(c.bytes for c in copies), memory_efficiency=0.3, launches=len(copies)
        )
        return moved + self.inner_cost(problem, config)

    def build(self, problem: Problem, config: Config) -> Run:
        p = _plan(problem)
        inner = self.build_inner(problem, config)
        before, after = rewriting(problem, p.before), rewriting(problem, p.after)
        roles = tuple(problem.tensors)

        def run(tensors: tuple[Any, ...], workspace: Any) -> None:
            before(tensors, workspace)
            named = dict(zip(roles, tensors, strict=True))
            operands = tuple(place.view(named, workspace) for place in p.places)
            inner(operands, workspace)
            after(tensors, workspace)

        return run
