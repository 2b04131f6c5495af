"""Nests of up to four loops behind one index of a tile, for kernels over tensors of any strides.

An index along a tile's side is taken apart into the indices of the loops it stands for, the innermost first, by
multiplications (`index.divide`); sizes and strides are runtime numbers, so that one kernel serves many shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton
import triton.language as tl

from .index import reciprocal, split
from .launch import Argument

NEST = 4  # loops that an index can stand for


@triton.jit
def indices(
    i, S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift, LOOPS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The indices of `LOOPS` loops, the innermost first; those of loops that are not there are 0."""
    i0 = i
    i1 = i * 0
    i2 = i * 0
    i3 = i * 0
    if LOOPS > 1:
        i1, i0 = split(i, S0, s0_mul, s0_shift, WIDE)
    if LOOPS > 2:
        i2, i1 = split(i1, S1, s1_mul, s1_shift, WIDE)
    if LOOPS > 3:
        i3, i2 = split(i2, S2, s2_mul, s2_shift, WIDE)
    return i0, i1, i2, i3


@triton.jit
def offset(i0, i1, i2, i3, s0, s1, s2, s3, LOOPS: tl.constexpr):
    """Where the indices lead in a tensor: each times its stride."""
    at = i0 * 0
    if LOOPS > 0:
        at += i0 * s0
    if LOOPS > 1:
        at += i1 * s1
    if LOOPS > 2:
        at += i2 * s2
    if LOOPS > 3:
        at += i3 * s3
    return at


def nest_arguments(name: str, sizes: Sequence[int]) -> dict[str, Argument]:
    """Sizes and reciprocals for `indices`: ``NAME0`` to ``NAME2``, ``name0_mul`` and so on; sizes innermost first."""
    args: dict[str, Argument] = {}
    for i in range(NEST - 1):
        used = i + 1 < len(sizes)
        args[f"{name.upper()}{i}"] = sizes[i] if used else None
        args[f"{name}{i}_mul"], args[f"{name}{i}_shift"] = reciprocal(sizes[i]) if used else (None, None)
    return args


def stride_arguments(name: str, strides: Mapping[str, Sequence[int]] | Sequence[int] | None) -> dict[str, Argument]:
    """``name0_stride`` to ``name3_stride``, innermost first; None for loops or tensors that are not there."""
    given = list(strides or ())  # type: ignore[arg-type]
    return {f"{name}{i}_stride": given[i] if i < len(given) else None for i in range(NEST)}
