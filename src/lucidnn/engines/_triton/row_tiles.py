"""What Triton kernels over rows share: where a tile of rows and their elements lies, and how its sizes are chosen.

A program has `BLOCK_M` neighbouring rows (m, along the innermost kept loop) and goes over their elements (k) in steps
of `BLOCK_K`. The other kept loops are the program's own number, cut by scalar divisions; k is cut by divisions only
where the reduced axes are several loops. `place_outer` and `place_inner` turn both into offsets.

A row whose start is not aligned to 16 bytes would be read element by element. With one row a program it is read from
the aligned place before, `ALIGN` elements or fewer early, and only its first and last step are masked.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config
from .._row_loops import RowLoops
from .index import INT32
from .launch import Argument

OUTER, REDUCED = 3, 4  # most loops of either kind beside m


@triton.jit
def place_outer(o, O0, O1, s0, s1, s2, LOOPS: tl.constexpr):
    """The offset of outer point number o; the innermost loop first."""
    at = o * 0
    if LOOPS == 1:
        at = o * s0
    if LOOPS == 2:
        at = (o % O0) * s0 + (o // O0) * s1
    if LOOPS == 3:
        at = (o % O0) * s0 + (o // O0 % O1) * s1 + (o // O0 // O1) * s2
    return at


@triton.jit
def place_inner(k, K0, K1, K2, s0, s1, s2, s3, LOOPS: tl.constexpr):
    """The offsets of reduced points k; the innermost loop first."""
    if LOOPS == 1:
        at = k * s0
    elif LOOPS == 2:
        at = (k % K0) * s0 + (k // K0) * s1
    elif LOOPS == 3:
        at = (k % K0) * s0 + (k // K0 % K1) * s1 + (k // K0 // K1) * s2
    else:
        at = (k % K0) * s0 + (k // K0 % K1) * s1 + (k // K0 // K1 % K2) * s2 + (k // K0 // K1 // K2) * s3
    return at


@triton.jit
def visit(most, total, v):
    """Take v into sums of exponentials relative to the largest value so far, lane by lane: one exponential each.

    `most` starts at the lowest finite number and `total` at 0, so that minus infinity adds nothing; NaN ends in total.
    """
    e = tl.exp(-tl.abs(v - most))
    is_larger = v > most
    total = tl.where(is_larger, total * e + 1.0, total + e)
    most = tl.where(is_larger, v, most)
    return most, total


def outer_loops(loops: RowLoops) -> tuple[int, ...]:
    """Kept loops beside m, the innermost first; loops of one point are none."""
    return tuple(reversed(loops.kept[:-1]))


def arguments(loops: RowLoops, roles: dict[str, str]) -> dict[str, Argument]:
    """Sizes and, for each prefix with its role, strides: None for a role that the problem does not have."""
    outer, reduced = outer_loops(loops), tuple(reversed(loops.reduced))
    args: dict[str, Argument] = {"M": loops.kept[-1], "K": loops.length}
    args |= {f"O{i}": outer[i] if i + 1 < len(outer) else None for i in range(OUTER - 1)}
    args |= {f"K{i}": reduced[i] if i + 1 < len(reduced) else None for i in range(REDUCED - 1)}
    for prefix, role in roles.items():
        kept, inner = loops.kept_strides.get(role), loops.reduced_strides.get(role)
        args[f"{prefix}_m_stride"] = kept[-1] if kept else None
        for i in range(OUTER):
            args[f"{prefix}_o{i}_stride"] = kept[-2 - i] if kept and i < len(outer) else None
        for i in range(REDUCED):
            args[f"{prefix}_k{i}_stride"] = inner[-1 - i] if inner and i < len(reduced) else None
    return args


def constants(loops: RowLoops, config: Config, spans: list[int]) -> dict[str, Any]:
    """Constexprs that go with `arguments`."""
    edge = config["BLOCK_M"] + 2 * config["BLOCK_K"]
    return {
        "OUTERS": len(outer_loops(loops)), "REDUCES": len(loops.reduced),
        "WIDE": max(loops.rows + edge, loops.length + edge, *spans) > INT32,
        "BLOCK_M": config["BLOCK_M"], "BLOCK_K": config["BLOCK_K"],
    }  # fmt: skip


def blocks(loops: RowLoops, config: Config) -> int:
    """Programs over all rows."""
    return loops.rows // max(loops.kept[-1], 1) * -(-loops.kept[-1] // config["BLOCK_M"])


def alignment(loops: RowLoops, config: Config, itemsize: int, roles: list[str], aligned: bool) -> int:
    """Elements in 16 bytes where rows of all roles start off that alignment in the same way; 1 elsewhere."""
    per = 16 // itemsize
    steps = {role: loops.kept_strides[role] for role in roles}
    unit = len(loops.reduced) == 1 and all(loops.reduced_strides[role] == (1,) for role in roles)
    one = config["BLOCK_M"] == 1 and len(set(steps.values())) == 1 and unit and aligned
    return per if one and per > 1 and any(s % per for s in steps[roles[0]]) else 1


def tile_configs(loops: RowLoops, elements: tuple[int, ...], most: int) -> list[Config]:
    """Tiles worth trying: whole rows where `most` elements or fewer hold them, else steps; the best guess first."""
    m, k = (triton.next_power_of_2(n) for n in (loops.kept[-1], loops.length))
    found: list[Config] = []

    def add(block_m: int, block_k: int, each: int) -> None:
        warps = max(1, min(block_m * block_k // (32 * each), 16))
        config = {"BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": warps, "num_stages": 2}
        if config not in found:
            found.append(config)

    if loops.lanes_reduced:
        for each in (16, 32, 8):
            if k <= most:
                add(min(m, max(1, min(elements[0], each * 128) // k)), k, each)
        if k > most // 4:
            for size in elements:
                add(1, min(size, k), 16)
    else:
        for lanes in (64, 32, 128):
            wide = min(m, lanes)
            if wide * k <= most:
                add(wide, k, 32)
        for lanes in (128, 64):
            wide = min(m, lanes)
            add(wide, min(k, max(1, elements[0] // wide)), 16)
    return found


def waste(loops: RowLoops, config: Config) -> float:
    """How much larger the tiles are than the problem."""
    rows = blocks(loops, config) * config["BLOCK_M"]
    length = -(-loops.length // config["BLOCK_K"]) * config["BLOCK_K"]
    return rows * length / max(loops.rows * loops.length, 1)


def fits(loops: RowLoops) -> list[tuple[bool, str, object]]:
    """What the loops must be like, as (fulfilled, requirement, found)."""
    return [
        (len(loops.kept) <= OUTER + 1, f"at most {OUTER + 1} kept axes that are no one run of memory", len(loops.kept)),
        (len(loops.reduced) <= REDUCED, f"at most {REDUCED} reduced axes likewise", len(loops.reduced)),
        (math.prod(loops.kept) <= INT32, f"at most {INT32} rows", math.prod(loops.kept)),
        (loops.length <= INT32 // 2, f"rows of at most {INT32 // 2} elements", loops.length),
    ]
