"""Tile shapes of GEMM-like kernels: which are worth trying on a target, best guess first, and a guess of the
time.

The guess is a roofline for one processor: the tiles dealt to it, each at the part of the peak rate that a tile of this
shape was seen to reach on an H200, or the latency of its loop over the reduction where that is longer; to which come
what it takes to fill and to empty each tile, what is loaded one element at a time (`one_by_one`), and what the split
results cost to write and read again.  It only ranks; measured rows overrule it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.descriptor import DTYPES
from ...core.heuristics import LAUNCH
from ...core.target import Target

# (BLOCK_M, BLOCK_N, num_warps, num_stages, part of the peak rate), for matrix units and for the vector units.
# Three stages where a fourth would keep a second block off the processor.
_MATRIX = (
    (128, 256, 8, 3, 0.69), (256, 128, 8, 3, 0.69), (128, 128, 8, 3, 0.59), (128, 128, 4, 4, 0.59),
    (256, 64, 8, 4, 0.50), (128, 64, 4, 4, 0.46), (64, 128, 4, 4, 0.47), (64, 64, 4, 4, 0.36), (128, 32, 4, 4, 0.29),
    (64, 32, 4, 4, 0.25), (128, 16, 4, 4, 0.15), (64, 16, 4, 4, 0.13),
)  # fmt: skip
# On vector units a thread's share decides: with 32 sums it loads 3 operands for 8 products, with 16 one for 2. More
# than 32 do not fit into registers, because each trip sums for itself.
_VECTOR = (
    (128, 64, 8, 4, 0.57), (64, 128, 8, 4, 0.57), (64, 64, 4, 4, 0.57), (128, 32, 4, 4, 0.60), (64, 32, 2, 4, 0.60),
    (64, 64, 8, 4, 0.45), (128, 32, 8, 4, 0.45), (64, 32, 4, 4, 0.42), (32, 64, 4, 4, 0.42), (32, 32, 4, 4, 0.30),
    (128, 16, 4, 4, 0.38), (64, 16, 4, 4, 0.28), (16, 16, 4, 4, 0.10),
)  # fmt: skip
STEP_LATENCY = 0.14e-6  # seconds a trip of the loop takes where one block has a processor for itself
LOAD_LATENCY = 0.6e-6  # the same where a trip waits for loads that go through registers
FILL = 0.7e-6  # seconds until a tile's first operands are there
# Instructions that an element costs which is loaded by itself, not 16 bytes at a time past the registers: its address,
# its mask, the load and the store to shared memory; and where its neighbours are far from it in memory, the waiting.
NEAR, FAR = 18, 80


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What a kernel multiplies: `batch` independent products (M, K) x (K, N), the reduction K in `pieces` of
    its own.

    `pieces` are taps, on average, each of `depth` elements: the loop makes ``ceil(depth / BLOCK_K)`` trips for every
    one.
    """

    m: int
    n: int
    depth: int
    pieces: float
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


def start(target: Target, kernels: int) -> float:
    """Seconds until the work of kernels that follow each other starts: half the time of one that is launched alone."""
    return 0.5 * LAUNCH[target.kind] * kernels


def one_by_one(config: Mapping[str, Any], target: Target, near: float = 0.0, far: float = 0.0) -> float:
    """Seconds a trip takes for elements that are loaded one at a time.

    More than 64 of them a thread leave no registers for their addresses.
    """
    lanes = target.flops("f32") / 2 / target.processors
    held = (near + far) / (32 * config["num_warps"])
    return (NEAR * near + FAR * far) / lanes * max(1.0, held / 64) ** 2


def seconds(gemm: Gemm, config: Mapping[str, Any], target: Target, loading: float = 0.0) -> float:
    """Estimated time of the products with this tile and, where it has one, its SPLIT_K, without the launch.

    `loading` is what a trip spends besides, on the `one_by_one`.
    """
    m, n, k, split = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], config.get("SPLIT_K", 1)
    tiles = math.ceil(gemm.m / m) * math.ceil(gemm.n / n) * gemm.batch * split
    each = math.ceil(tiles / target.processors)
    peak = target.flops(gemm.dtype, gemm.math) / target.processors
    turns = trips(gemm, config)
    work = each * turns * (2.0 * m * n * k / (peak * _rate(gemm, m, n, k, config["num_warps"])) + loading)
    space = shared_bytes(config, gemm.itemsize, target)
    together = max(1, min(each, target.shared_memory // max(space, 1), 32 // config["num_warps"]))
    rounds = math.ceil(each / together)
    emptied = 0.5 * (1 + together) * m * n * gemm.itemsize / (0.5 * target.bandwidth / target.processors)
    latency = STEP_LATENCY if loading == 0 else LOAD_LATENCY
    time = max(work, rounds * turns * latency) + rounds * (FILL + emptied)
    if split > 1:
        time += 8.0 * split * gemm.m * gemm.n * gemm.batch / target.bandwidth
    return time


def _rate(gemm: Gemm, m: int, n: int, k: int, warps: int) -> float:
    """Part of the peak that a tile reaches; that of the next smaller one where it is not listed.

    Rows of less than 64 bytes make trips so short on matrix units that they wait for each other.
    """
    table = _MATRIX if gemm.on_matrix_units else _VECTOR
    listed = [r for bm, bn, w, _, r in table if (bm, bn, w) == (m, n, warps)]
    rate = max(listed or [r for bm, bn, _, _, r in table if bm * bn <= m * n], default=table[-1][-1])
    return rate * (min(1.0, k * gemm.itemsize / 64) if gemm.on_matrix_units else 1.0)
