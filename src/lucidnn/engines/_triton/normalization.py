"""What the Triton normalizations share: loops as index arithmetic, parameters made dense, gradients added up.

A tensor's elements are reached by up to three loops outside a set, one blocked loop of sets side by side, and up to
three loops inside a set (`lucidnn.engines.normalization._sets`); loops are numbered from the innermost out. Scales and
biases are read as dense rows: one that is strided is copied into the workspace first (`Parameters`), and gradients of
them are added up from partial rows and written to whatever strides theirs have (`norm_sum`).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ...core.descriptor import TensorDescriptor
from ...core.problem import Problem
from .epilogue import convert
from .index import divide, reciprocal
from .launch import Argument, Launch, Slice

PARAMETER_LOOPS = 3
ROLES = ("x", "dy", "y", "dx")


@triton.jit
def outer_places(o, O0, O1, OUTER: tl.constexpr):
    """Indices of up to three loops, the innermost first, from a number that counts through them."""
    i0 = o
    i1 = o * 0
    i2 = o * 0
    if OUTER > 1:
        i1 = o // O0
        i0 = o - i1 * O0
    if OUTER > 2:
        i2 = i1 // O1
        i1 = i1 - i2 * O1
    return i0, i1, i2


@triton.jit
def inner_places(p, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER: tl.constexpr):
    """The same for a vector of int32 numbers, without divisions."""
    k0 = p
    k1 = p * 0
    k2 = p * 0
    if INNER > 1:
        k1 = divide(p, i0_mul, i0_shift)
        k0 = p - k1 * I0
    if INNER > 2:
        k2 = divide(k1, i1_mul, i1_shift)
        k1 = k1 - k2 * I1
    return k0, k1, k2


@triton.jit
def steps(k0, k1, k2, s0, s1, s2, LOOPS: tl.constexpr):
    """Elements to a place of up to three loops."""
    at = k0 * 0
    if LOOPS > 0:
        at += k0 * s0
    if LOOPS > 1:
        at += k1 * s1
    if LOOPS > 2:
        at += k2 * s2
    return at


@triton.jit
def shift_of(first):
    """What to take off the values of a set, so that those far from 0 lose nothing in sums: its first one, if finite."""
    return tl.where(first - first == 0, first, 0.0).to(first.dtype)


@triton.jit
def norm_dense(
    source, out, COUNT, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, s0, s1, s2, LOOPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A strided parameter as a dense row."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0, k1, k2 = inner_places(p, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, LOOPS)
    ok = p < COUNT
    tl.store(out + p, tl.load(source + steps(k0, k1, k2, s0, s1, s2, LOOPS), mask=ok), mask=ok)


@triton.jit
def norm_sum(
    parts, out, PARTS, COUNT, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, s0, s1, s2,
    LOOPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of `PARTS` dense rows, in a fixed order."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK_S, BLOCK), dtype=parts.dtype.element_ty)
    at = tl.arange(0, BLOCK_S).to(tl.int64)[:, None] * COUNT + p[None, :]
    for first in range(0, PARTS, BLOCK_S):
        ok = (first + tl.arange(0, BLOCK_S) < PARTS)[:, None] & (p < COUNT)[None, :]
        acc += tl.load(parts + at, mask=ok, other=0.0)
        at += BLOCK_S * COUNT
    k0, k1, k2 = inner_places(p, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, LOOPS)
    total = convert(tl.sum(acc, axis=0), out.dtype.element_ty)
    tl.store(out + steps(k0, k1, k2, s0, s1, s2, LOOPS), total, mask=p < COUNT)


def loop_arguments(sizes: Sequence[int], letter: str = "I") -> dict[str, Argument]:
    """Sizes and reciprocals of the two innermost of up to three loops, innermost first."""
    found: dict[str, Argument] = {}
    for i in range(2):
        used = i + 1 < len(sizes)
        found[f"{letter}{i}"] = sizes[i] if used else None
        if letter == "I":
            found[f"i{i}_mul"], found[f"i{i}_shift"] = reciprocal(sizes[i]) if used else (None, None)
    return found


def parameter_loops(t: TensorDescriptor) -> list[tuple[int, int]]:
    """Size and stride of a parameter's loops, merged, innermost first."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(t.shape, t.strides, strict=True):
        if size > 1:
            if found and found[-1][1] == size * stride:
                size *= found.pop()[0]
            found.append((size, stride))
    return found[::-1]


def _addressed(t: TensorDescriptor) -> tuple[dict[str, Argument], int]:
    loops = parameter_loops(t)
    args = loop_arguments([size for size, _ in loops])
    return args | {f"s{i}": loops[i][1] if i < len(loops) else None for i in range(3)}, len(loops)


class Parameters:
    """Where kernels find dense scales and biases, and the launches and workspace that this takes."""

    def __init__(self, problem: Problem, offset: int = 0):
        self.launches: list[Launch] = []
        self.where: dict[str, Argument] = {}
        self.end = offset
        for role in ("scale", "bias"):
            t = problem.tensors.get(role)
            self.where[role] = role if t else None
            if t is not None and not t.is_contiguous:
                place = Slice(self.end, t.dtype)
                args, count = _addressed(t)
                args |= {"source": role, "out": place, "COUNT": t.numel}
                grid = (-(-t.numel // 1024),)
                self.launches.append(Launch(norm_dense, grid, args, {"LOOPS": count, "BLOCK": 1024}))
                self.where[role] = place
                self.end += -(-t.numel * t.itemsize // 16) * 16


def summing(problem: Problem, role: str, place: Slice, parts: int) -> Launch:
    """The launch that adds up partial rows of a parameter's gradient."""
    t = problem[role]
    args, count = _addressed(t)
    args |= {"parts": place, "out": role, "PARTS": parts, "COUNT": t.numel}
    block = min(triton.next_power_of_2(t.numel), 32)
    block_s = max(1, min(triton.next_power_of_2(parts), 4096 // block))
    constexprs = {"LOOPS": count, "BLOCK_S": block_s, "BLOCK": block}
    return Launch(norm_sum, (-(-t.numel // block),), args, constexprs, 4, 2)
