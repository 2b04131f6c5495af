"""What the GPU engines share on the host: the tiles of a problem, how they are dealt to blocks, kernel arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import triton

from ...core.descriptor import contiguous_strides
from ...core.engine import Config
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.batch_normalization import LARGE, statistics_type
from .._triton.index import INT32
from .._triton.launch import Argument, Real
from ._view import View

MOST_PARTS = 2048
# Elements of a tile, warps, stages, and parts a processor, best guess first. As many parts as there can be blocks at a
# time, by the registers that each takes: a few more would run alone when the others are done.
_STATISTICS = ((4096, 8, 4, 2), (2048, 4, 3, 4), (4096, 8, 3, 3), (8192, 8, 3, 2))
_SUMS = ((2048, 8, 3, 4), (2048, 4, 3, 4), (4096, 8, 3, 2), (1024, 4, 4, 8))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A problem under one configuration.

    Attributes
    ----------
    turned : bool
        Values of a channel, not channels, are neighbours in memory: a tile's rows are channels.
    rows, lanes, chunks, blocks : int
        Places along the outer summed axes, values along the innermost, blocks of lanes, and blocks of channels.
    row_parts, chunk_parts : int
        Parts that statistics are found in.
    row_trips, chunk_trips : int
        Rows and blocks of lanes that a block of the elementwise pass takes.
    """

    view: View
    turned: bool
    rows: int
    lanes: int
    chunks: int
    blocks: int
    row_parts: int
    chunk_parts: int
    row_trips: int
    chunk_trips: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Tiles:
        view = View.of(problem)
        lanes = view.summed[-1]
        rows = view.values // lanes
        chunks, blocks = -(-lanes // config["BLOCK_P"]), -(-view.channels // config["BLOCK_C"])
        wanted = max(1, min(config["PARTS"] * problem.target.processors // blocks, MOST_PARTS))
        wanted = max(1, min(wanted, rows * chunks // 4))
        row_parts = min(rows, wanted)
        chunk_parts = max(1, min(chunks, wanted // row_parts))
        trips = config["TRIPS"]
        while trips > 1 and blocks * rows * chunks < trips * 8 * problem.target.processors:
            trips //= 2
        row_trips = min(rows, trips)
        chunk_trips = max(1, min(chunks, trips // row_trips))
        return cls(
            view, not view.channels_inner, rows, lanes, chunks, blocks, row_parts, chunk_parts, row_trips, chunk_trips
        )

    @property
    def parts(self) -> int:
        return self.row_parts * self.chunk_parts

    @property
    def grid(self) -> int:
        """Blocks of the elementwise pass."""
        return self.blocks * -(-self.rows // self.row_trips) * -(-self.chunks // self.chunk_trips)


def configs(problem: Problem, large: int) -> list[Config]:
    """Tiles that fit a problem, best guess first; `large` is how many large tensors a kernel reads."""
    view = View.of(problem)
    channels, lanes = view.channels, view.summed[-1]
    found: list[Config] = []
    wide = 2 if problem["x"].dtype == "f64" else 1
    for elements, warps, stages, parts in _SUMS if large > 1 else _STATISTICS:
        elements //= wide
        if view.channels_inner:
            block = min(
                (n for n in (16, 32, 64, 128) if n <= max(16, triton.next_power_of_2(channels))),
                key=lambda n: (-(-channels // n) * n, -n),
            )
            pixels = max(1, min(elements // block, triton.next_power_of_2(lanes)))
        else:
            widest = min(triton.next_power_of_2(lanes), elements)
            # The block of lanes that wastes least; of equals the widest.
            pixels = min(
                (n for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= widest),
                default=widest,
                key=lambda n: (-(-lanes // n) * n * (1.0 + 0.02 * (elements // n)), -n),
            )
            block = max(1, min(elements // pixels, triton.next_power_of_2(channels)))
        config = {"BLOCK_P": pixels, "BLOCK_C": block, "PARTS": parts, "TRIPS": 4}
        config |= {"num_warps": warps, "num_stages": stages}
        if config not in found:
            found.append(config)
    return found


def common(problem: Problem, tiles: Tiles, config: Config) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Sizes, and constants of kernels that walk over tiles."""
    v = tiles.view
    kept, outer = v.kept[::-1], v.summed[-2::-1]
    args: dict[str, Argument] = {"C": v.channels, "ROWS": tiles.rows, "LANES": tiles.lanes, "CHUNKS": tiles.chunks}
    for i in range(3):
        args[f"K{i}"] = kept[i] if i + 1 < len(kept) else None
        args[f"R{i}"] = outer[i] if i + 1 < len(outer) else None
    reach = v.channels + config["BLOCK_C"], tiles.lanes + config["BLOCK_P"]
    constexprs = {
        "KEPT": len(kept), "OUTER": len(outer), "TURNED": tiles.turned,
        "WIDE": max(*reach, *(t.span for _, t in problem.items)) > INT32,
        "BLOCK_P": config["BLOCK_P"], "BLOCK_C": config["BLOCK_C"], "STAGES": config["num_stages"],
    }  # fmt: skip
    return args, constexprs


def strided(view: View, role: str, name: str | None = None) -> dict[str, Argument]:
    """Steps of a tensor along kept axes and, for a large one, along rows and lanes; None where there are none."""
    summed, kept = view.strides.get(role, ((), ()))
    name = name or role
    kept, summed = kept[::-1], summed[::-1]
    args: dict[str, Argument] = {f"{name}_k{i}_stride": kept[i] if i < len(kept) else None for i in range(4)}
    if role in LARGE:
        args[f"{name}_l_stride"] = summed[0] if summed else None
        args |= {f"{name}_r{i}_stride": summed[i + 1] if i + 1 < len(summed) else None for i in range(3)}
    return args


def dense(view: View, name: str) -> dict[str, Argument]:
    """Steps along kept axes of an array in the workspace."""
    steps = contiguous_strides(view.kept)[::-1]
    return {f"{name}_k{i}_stride": steps[i] if i < len(steps) else None for i in range(4)}


def numbers(problem: Problem) -> dict[str, Argument]:
    """Epsilon and the activation's parameter."""
    real = statistics_type(problem["x"].dtype)
    has = ACTIVATIONS[problem.epilogue.activation].parameter is not None
    epsilon = getattr(problem.op, "epsilon", 0.0)
    return {"epsilon": Real(epsilon, real), "parameter": Real(problem.epilogue.parameter, real) if has else None}
