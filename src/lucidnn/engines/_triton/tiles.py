"""Tile shapes of GEMM-like kernels: which are worth trying on a target, best guess first, and a guess of the
time.

The guess is a roofline for one processor: the tiles dealt to it, each at the part of the peak rate that a
tile of this shape has been seen to reach, or the latency of its loop over the reduction where that is longer,
plus what the split results cost to write and read again.  It only ranks; measured rows overrule it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.descriptor import DTYPES
from ...core.target import Target

# (BLOCK_M, BLOCK_N, num_warps, num_stages, part of the peak rate), for matrix units and for the vector units.
# Three stages where a fourth would keep a second block off the processor.
_MATRIX = (
    (128, 256, 8, 3, 0.68), (256, 128, 8, 3, 0.66), (128, 128, 8, 3, 0.56), (128, 128, 4, 4, 0.55),
    (256, 64, 8, 4, 0.48), (128, 64, 4, 4, 0.42), (64, 128, 4, 4, 0.40), (64, 64, 4, 4, 0.30), (128, 32, 4, 4, 0.24),
    (64, 32, 4, 4, 0.17), (128, 16, 4, 4, 0.13), (64, 16, 4, 4, 0.09),
)  # fmt: skip
# On vector units a thread's share decides: with 32 sums it loads 3 operands for 8 products, with 16 one for 2. More
# than 32 do not fit into registers, because each trip sums for itself.
_VECTOR = (
    (128, 64, 8, 4, 0.42), (64, 128, 8, 4, 0.42), (64, 64, 4, 4, 0.38), (128, 32, 4, 4, 0.34), (64, 32, 2, 4, 0.32),
    (64, 64, 8, 4, 0.30), (128, 32, 8, 4, 0.30), (64, 32, 4, 4, 0.28), (32, 64, 4, 4, 0.28), (32, 32, 4, 4, 0.18),
    (128, 16, 4, 4, 0.18), (64, 16, 4, 4, 0.14), (16, 16, 4, 4, 0.04),
)  # fmt: skip
STEP_LATENCY = 0.25e-6  # seconds a trip of the loop takes where one block has a processor for itself
THROUGH_REGISTERS = 4.0  # times longer, where matrix units would read shared memory themselves


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What a kernel multiplies: `batch` independent products (M, K) x (K, N), the reduction K in `pieces` of
    its own.

    `pieces` are taps, each of `depth` elements: the loop makes ``ceil(depth / BLOCK_K)`` trips for every one.
    """

    m: int
    n: int
    depth: int
    pieces: int
    batch: int
    dtype: str
    math: str

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def on_matrix_units(self) -> bool:
        return self.itemsize < 4 or (self.dtype == "f32" and self.math == "tf32")


def block_k(gemm: Gemm, target: Target) -> int:
    """Depth of a trip: 128 bytes of each row, less where the reduction is short (and on AMD GPUs' smaller memory)."""
    if not gemm.on_matrix_units:
        return 16
    widest = 128 // gemm.itemsize // (2 if target.kind == "hip" else 1)
    least = 32 if gemm.itemsize == 1 else 16  # products that a matrix instruction sums at once
    return next(k for k in (128, 64, 32, 16) if k <= widest and (k == least or k <= 2 * gemm.depth - 16))


def shared_bytes(config: Mapping[str, Any], itemsize: int, target: Target) -> int:
    """Shared memory of the loop's operands: every stage has its own (on AMD GPUs one stage lives in
    registers).
    """
    stages = config["num_stages"] - (1 if target.kind == "hip" else 0)
    return stages * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * itemsize


def shapes(gemm: Gemm, target: Target) -> Iterator[dict]:
    """Valid tile shapes, in no order."""
    smallest_m = 64 if gemm.on_matrix_units else 16
    for m, n, warps, most_stages, _ in _MATRIX if gemm.on_matrix_units else _VECTOR:
        if (n > 16 and n >= 2 * gemm.n) or (m > smallest_m and m >= 2 * gemm.m):
            continue  # half the tile or more would be empty
        for stages in range(2 if target.kind == "hip" else most_stages, 1, -1):
            config = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": block_k(gemm, target)}
            config |= {"num_warps": warps, "num_stages": stages}
            if shared_bytes(config, gemm.itemsize, target) <= target.shared_memory - 2048:
                yield config
                break


def ranked(gemm: Gemm, configs: Iterable[dict], target: Target, most: int = 8) -> list[dict]:
    """The configs with the shortest estimates, best first; no stage is asked for that the loop never fills."""
    found = sorted(configs, key=lambda config: seconds(gemm, config, target))[:most]
    return [{**c, "num_stages": min(c["num_stages"], trips(gemm, c))} for c in found]


def trips(gemm: Gemm, config: Mapping[str, Any]) -> int:
    """Turns of the loop over the reduction, of the longest part where it is split."""
    return math.ceil(gemm.pieces * math.ceil(gemm.depth / config["BLOCK_K"]) / config.get("SPLIT_K", 1))


def seconds(gemm: Gemm, config: Mapping[str, Any], target: Target) -> float:
    """Estimated time of the products with this tile and, where it has one, its SPLIT_K, without the launch."""
    m, n, k, split = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], config.get("SPLIT_K", 1)
    tiles = math.ceil(gemm.m / m) * math.ceil(gemm.n / n) * gemm.batch * split
    each = math.ceil(tiles / target.processors)
    peak = target.flops(gemm.dtype, gemm.math) / target.processors
    work = each * trips(gemm, config) * 2.0 * m * n * k / (peak * _rate(gemm, m, n, config["num_warps"]))
    space = shared_bytes(config, gemm.itemsize, target)
    together = max(1, min(each, target.shared_memory // max(space, 1), 32 // config["num_warps"]))
    time = max(work, math.ceil(each / together) * trips(gemm, config) * STEP_LATENCY)
    if split > 1:
        time += 1e-6 + 8.0 * split * gemm.m * gemm.n * gemm.batch / target.bandwidth
    return time


def _rate(gemm: Gemm, m: int, n: int, warps: int) -> float:
    """Part of the peak that a tile reaches; that of the next smaller one where it is not listed."""
    table = _MATRIX if gemm.on_matrix_units else _VECTOR
    listed = [r for bm, bn, w, _, r in table if (bm, bn, w) == (m, n, warps)]
    return max(listed or [r for bm, bn, _, _, r in table if bm * bn <= m * n], default=table[-1][-1])
