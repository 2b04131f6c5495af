"""``transform.tiled``: the tensor transformation on a GPU, any types, strides, padding and folds, in Triton.

Method: a program takes a tile of two axes of y: the one on which y's elements are neighbours and the one on which x's
are, or the next where that is the same; it loads along the latter and stores along the former, and the compiler turns
the tile in shared memory. The tile's other coordinates are worked out once, and the coordinates in x from those in y:
minus the padding, and taken apart by the factors of folds. Elements outside of x are padding.
Axes that are neither padded nor folded are merged where they are one run of memory in all tensors.

Cost: the memory traffic, each tensor once. Limits: values of type int64 are not made of floating-point ones.
"""

import dataclasses
import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import TYPES, WHOLE
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, TritonEngine
from ._stores import LIMITS, cut_of, exact, store

SLOTS = 5


@triton.jit
def _pick(i0, i1, i2, i3, i4, K: tl.constexpr):
    if K == 0:
        r = i0
    elif K == 1:
        r = i1
    elif K == 2:
        r = i2
    elif K == 3:
        r = i3
    else:
        r = i4
    return r


@triton.jit
def _coordinate(
    a, b, o0, o1, o2, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr
):
    """The coordinate along axis K: of the tile's rows or columns, or of the three others."""
    if K == A:
        r = a
    elif K == B:
        r = b
    elif K == O0:
        r = o0
    elif K == O1:
        r = o1
    else:
        r = o2
    return r


@triton.jit
def _within(i, SIZE, inside, CHECKED: tl.constexpr):
    r = inside
    if CHECKED:
        r = inside & (i >= 0) & (i < SIZE)
    return r


@triton.jit
def transform(
    x, z, y, alpha, beta, value, low, high, Y0, Y1, Y2, Y3, Y4, X0, X1, X2, X3, X4, p0, p1, p2, p3, p4,
    x0_stride, x1_stride, x2_stride, x3_stride, x4_stride, y0_stride, y1_stride, y2_stride, y3_stride, y4_stride,
    z0_stride, z1_stride, z2_stride, z3_stride, z4_stride,
    A: tl.constexpr, B: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr,
    FOLD: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, F4: tl.constexpr,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr,
    TYPE: tl.constexpr, CUT: tl.constexpr, WIDE: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    FORM: tl.constexpr = tl.int64 if TYPE == "i64" else (tl.float64 if TYPE == "f64" else tl.float32)
    rows = _pick(Y0, Y1, Y2, Y3, Y4, A)
    columns = _pick(Y0, Y1, Y2, Y3, Y4, B)
    rest = tl.program_id(0)
    tiles = tl.cdiv(columns, BLOCK_B)
    tile_b = rest % tiles
    rest = rest // tiles
    tiles = tl.cdiv(rows, BLOCK_A)
    tile_a = rest % tiles
    rest = rest // tiles
    size = _pick(Y0, Y1, Y2, Y3, Y4, O2)
    o2 = rest % size
    rest = rest // size
    size = _pick(Y0, Y1, Y2, Y3, Y4, O1)
    o1 = rest % size
    o0 = rest // size
    if WIDE:
        tile_a = tile_a.to(tl.int64)
        tile_b = tile_b.to(tl.int64)
        o0 = o0.to(tl.int64)
        o1 = o1.to(tl.int64)
        o2 = o2.to(tl.int64)
    a = (tile_a * BLOCK_A + tl.arange(0, BLOCK_A))[:, None]
    b = (tile_b * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    ok = (a < rows) & (b < columns)
    i0 = _coordinate(a, b, o0, o1, o2, 0, A, B, O0, O1)
    i1 = _coordinate(a, b, o0, o1, o2, 1, A, B, O0, O1)
    i2 = _coordinate(a, b, o0, o1, o2, 2, A, B, O0, O1)
    i3 = _coordinate(a, b, o0, o1, o2, 3, A, B, O0, O1)
    i4 = _coordinate(a, b, o0, o1, o2, 4, A, B, O0, O1)
    at = i0 * y0_stride + i1 * y1_stride + i2 * y2_stride + i3 * y3_stride + i4 * y4_stride
    j0 = i0 - p0
    if FOLD == 1:  # the channel says which of a block's pixels
        j1 = i1 // (F2 * F3 * F4) - p1
        j2 = i2 * F2 + i1 // (F3 * F4) % F2 - p2
        j3 = i3 * F3 + i1 // F4 % F3 - p3
        j4 = i4 * F4 + i1 % F4 - p4
    elif FOLD == 2:  # the pixel's place in its block says which channel; what is outside is rounded as may be
        k2 = i2 - p2
        k3 = i3 - p3
        k4 = i4 - p4
        c = i1 - p1
        # Blocks are counted from a whole block before the start, so that no quotient is of a negative number.
        j2 = (k2 + F2 * Y2) // F2 - Y2
        j3 = (k3 + F3 * Y3) // F3 - Y3
        j4 = (k4 + F4 * Y4) // F4 - Y4
        j1 = ((c * F2 + (k2 - j2 * F2)) * F3 + (k3 - j3 * F3)) * F4 + (k4 - j4 * F4)
    else:
        j1 = i1 - p1
        j2 = i2 - p2
        j3 = i3 - p3
        j4 = i4 - p4
    inside = ok
    inside = _within(j0, X0, inside, C0)
    inside = _within(j1, X1, inside, C1)
    inside = _within(j2, X2, inside, C2)
    inside = _within(j3, X3, inside, C3)
    inside = _within(j4, X4, inside, C4)
    from_ = j0 * x0_stride + j1 * x1_stride + j2 * x2_stride + j3 * x3_stride + j4 * x4_stride
    r = exact(tl.load(x + from_, mask=inside), FORM)
    if alpha is not None:
        r = r * alpha
    if value is not None:
        r = tl.where(inside, r, value)
    if z is not None:
        z_at = i0 * z0_stride + i1 * z1_stride + i2 * z2_stride + i3 * z3_stride + i4 * z4_stride
        s = exact(tl.load(z + z_at, mask=ok), FORM)
        if beta is not None:
            s = s * beta
        r = r + s
    store(y + at, r, ok, low, high, CUT)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One axis of y: sizes in both tensors, padding in front, strides, the factor of a fold, whether it is padded."""

    y: int = 1
    x: int = 1
    before: int = 0
    x_stride: int = 0
    y_stride: int = 0
    z_stride: int = 0
    factor: int = 1
    padded: bool = False


def _slots(problem: Problem) -> list[_Slot]:
    """Five axes; merged where nothing is folded: what is neither padded nor apart in memory, in y's order."""
    op: Any = problem.op
    x, y, z = problem["x"], problem["y"], problem.tensors.get("z")
    pads = op.padding or ((0, 0),) * x.ndim
    factors = (1, 1, *(op.fold or (1,) * (x.ndim - 2)))
    found = []
    for k, (before, after) in enumerate(pads):
        strides = [t.strides[k] if t and t.shape[k] > 1 else 0 for t in (x, y, z)]
        found.append(_Slot(y.shape[k], x.shape[k], before, *strides, factors[k], before > 0 or after > 0))
    if op.fold:  # channels stay second, spatial axes last
        return [*found[:2], *[_Slot()] * (SLOTS - len(found)), *found[2:]]
    merged: list[_Slot] = []
    for one in sorted(
        (one for one in found if one.y != 1 or one.before), key=lambda one: (-one.y_stride, -one.x_stride)
    ):
        last = merged[-1] if merged else None
        if (
            last
            and not (last.padded or one.padded or last.before or one.before)
            and last.x == last.y
            and _run(last, one)
        ):
            merged[-1] = dataclasses.replace(one, y=last.y * one.y, x=last.x * one.x)
        else:
            merged.append(one)
    return [*[_Slot()] * (SLOTS - len(merged)), *merged]


def _run(outer: _Slot, inner: _Slot) -> bool:
    names = ("x_stride", "y_stride", "z_stride")
    return inner.x == inner.y and all(getattr(outer, n) == inner.y * getattr(inner, n) for n in names)


def _tile_axes(slots: list[_Slot]) -> tuple[int, int]:
    """The tile's rows and columns: along columns y's elements are neighbours, along rows x's, if they are not there."""
    axes = range(SLOTS)
    b = min(axes, key=lambda k: (slots[k].y == 1, slots[k].y_stride, -slots[k].y))
    others = [k for k in axes if k != b]
    a = min(others, key=lambda k: (slots[k].y == 1, slots[k].x_stride, -slots[k].y))
    return a, b


class TransformTiled(TritonEngine):
    name = "transform.tiled"
    operations = ("transform_tensor",)

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        floats = problem["x"].dtype not in WHOLE
        r.require(not (floats and problem["y"].dtype == "i64"), "y but of i64", "i64")
        e, op = problem.epilogue, problem.op
        numbers = (e.alpha, e.beta, op.value)  # type: ignore[attr-defined]
        fits = floats or all(abs(f) < 2**24 for f in numbers)
        r.require(fits, "factors of whole numbers below 2^24", numbers)
        if not r:
            tiles = self._tiles(problem, self.configs(problem)[0])
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        slots = _slots(problem)
        a, b = _tile_axes(slots)
        rows, columns = triton.next_power_of_2(slots[a].y), triton.next_power_of_2(slots[b].y)
        turned = slots[b].x_stride > 1 and slots[a].x_stride <= slots[b].x_stride
        found: list[Config] = []
        for side, elements, warps in ((64, 4096, 4), (32, 2048, 4), (128, 8192, 8)):
            width = min(columns, side if turned else elements)
            height = min(rows, elements // width)
            width = min(columns, max(width, elements // height))
            config = {"BLOCK_A": height, "BLOCK_B": width, "num_warps": warps}
            if config not in found:
                found.append(config)
        return found

    def _tiles(self, problem: Problem, config: Config) -> int:
        slots = _slots(problem)
        a, b = _tile_axes(slots)
        outer = math.prod(slot.y for k, slot in enumerate(slots) if k not in (a, b))
        return -(-slots[a].y // config["BLOCK_A"]) * -(-slots[b].y // config["BLOCK_B"]) * outer

    def cost(self, problem: Problem, config: Config) -> float:
        tiles = self._tiles(problem, config)
        waste = tiles * config["BLOCK_A"] * config["BLOCK_B"] / max(problem["y"].numel, 1)
        busy = min(1.0, tiles / problem.target.processors)
        return roofline(problem, flops=0.0, memory_efficiency=0.85 * busy / max(1.0, waste**0.5))

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        op: Any = problem.op
        tensors, epilogue = problem.tensors, problem.epilogue
        slots = _slots(problem)
        a, b = _tile_axes(slots)
        outer = [k for k in range(SLOTS) if k not in (a, b)]
        to = tensors["y"].dtype
        exactly = tensors["x"].dtype in WHOLE
        wide = any(t.dtype == "f64" for t in tensors.values())
        form = "i64" if exactly and to in WHOLE else "f64" if wide or exactly else "f32"
        real = "f64" if form == "f64" else "f32"

        def factor(value: float) -> Argument:
            if value == 1.0:  # an integer 1 would be a constant of another kind, and 1 is left out
                return None
            return int(value) if form == "i64" else Real(value, real)

        padded = any(slot.padded for slot in slots)
        (low, high), cut = LIMITS.get(to, (0, 0)), cut_of(to)
        args: dict[str, Argument] = {
            "x": "x", "z": "z" if "z" in tensors else None, "y": "y",
            "alpha": factor(epilogue.alpha), "beta": factor(epilogue.beta) if "z" in tensors else None,
            "value": None if not padded else int(op.value) if form == "i64" else Real(op.value, real),
            "low": Real(low, "f64") if cut == 1 else None, "high": Real(high, "f64") if cut == 1 else None,
        }  # fmt: skip
        for k, slot in enumerate(slots):
            args |= {f"Y{k}": slot.y, f"X{k}": slot.x, f"p{k}": slot.before}
            args |= {f"x{k}_stride": slot.x_stride, f"y{k}_stride": slot.y_stride}
            args[f"z{k}_stride"] = slot.z_stride if "z" in tensors else None
        tiles = self._tiles(problem, config)
        span = max(*(max(t.span, t.numel) for t in tensors.values()), 0)
        fold = (2 if op.unfold else 1) if op.fold else 0
        constexprs = {
            "A": a, "B": b, **{f"O{i}": k for i, k in enumerate(outer)}, "FOLD": fold,
            **{f"F{k}": slots[k].factor for k in (2, 3, 4)},
            # Channels of an unfolded tensor that lie outside are neighbours of ones that do not: all are checked.
            **{f"C{k}": slot.padded for k, slot in enumerate(slots)},
            "TYPE": form, "CUT": cut, "WIDE": span + (1 << 16) > INT32,
            "BLOCK_A": config["BLOCK_A"], "BLOCK_B": config["BLOCK_B"],
        }  # fmt: skip
        return [Launch(transform, (tiles,), args, constexprs, config["num_warps"], 1)]
