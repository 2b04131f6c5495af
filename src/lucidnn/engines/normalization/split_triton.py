"""``norm.split_triton``: normalization on a GPU in passes over the whole tensor, any sizes and strides, in Triton.

Method. The first pass gives mean and squared distances of a piece of each **column** (a channel, or a set where there
are no groups), a second small one makes statistics of them by Chan's formula, the third scales, shifts and activates.
Backward likewise: sums for each column, totals for each set, dx. Tiles lie along memory, whichever way that is: with
channels last a block takes all channels of some points, and every line is read whole. Partial sums for dscale and dbias
are rows that a last kernel adds in a fixed order. The kernels are in ``engines/_triton/normalization_split.py``.

Cost: x read twice and y written once; backward x and dy twice, dx once; layer and RMS normalization read both once more
for the gradients of their parameters. Limits: four loops over the sets and three inside them after merging.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.normalization import PARAMETER_LOOPS, Parameters, loop_arguments, parameter_loops, summing
from .._triton.normalization_split import (
    norm_split_along,
    norm_split_bwd,
    norm_split_finish,
    norm_split_fwd,
    norm_split_statistics,
    norm_split_sums,
    norm_split_totals,
)
from ._sets import Loop, full_roles, sets

TYPES = ("f64", "f32", "f16", "bf16")
MOST_CHUNKS = 64


class _View:
    """A problem's loops: `column` is the blocked one, `outer` and `inner` from the innermost out."""

    def __init__(self, problem: Problem):
        op: Any = problem.op
        s = sets(problem)
        roles = full_roles(problem)
        self.by_step = not op.name.startswith("group")
        if self.by_step:
            outside = list(s.outside)
            self.column = min(outside, key=lambda loop: loop.step("x")) if outside else Loop(1, {})
            self.outer = [loop for loop in outside if loop is not self.column][::-1]
            self.each, self.sets, inside = 1, self.column.size, s.inside
        else:
            statistics = {r: problem[r].strides for r in op.statistics}
            self.each, self.sets = problem["x"].shape[1] // op.groups, op.groups
            steps = {r: problem[r].strides[1] for r in roles} | {r: t[1] for r, t in statistics.items()}
            self.column = Loop(problem["x"].shape[1], steps)
            images = {r: problem[r].strides[0] for r in roles} | {r: t[0] for r, t in statistics.items()}
            self.outer = [Loop(problem["x"].shape[0], images)]
            inside = s.points
        self.inner = sorted(inside, key=lambda one: -one.step("x"))[::-1]
        self.steps = s.size // self.each
        self.outers = math.prod(loop.size for loop in self.outer)
        near = self.inner[0].step("x") if self.inner else 1 << 62
        self.turned = self.column.size > 1 and self.column.step("x") < near
        self.parameters = s.parameters


_view = functools.lru_cache(maxsize=256)(_View)


class _Plan:
    """Sizes of pieces, and where in the workspace they have their place."""

    def __init__(self, problem: Problem, config: Config):
        v = _view(problem)
        self.real = "f64" if problem["x"].dtype == "f64" else "f32"
        size = 8 if self.real == "f64" else 4
        self.columns = -(-v.column.size // config["BLOCK_C"])
        blocks = -(-v.steps // config["BLOCK_S"])
        wanted = -(-problem.target.processors * config["BLOCKS"] // (self.columns * v.outers))
        self.trips = -(-blocks // max(1, min(wanted, MOST_CHUNKS, blocks)))
        self.chunks = -(-blocks // self.trips)
        self.blocks = blocks
        self.dense = Parameters(problem)
        self.partial = v.outers * self.chunks * v.column.size
        self.sets = v.outers * v.sets
        at = self.dense.end
        self.first, at = at, at + self.partial * size
        self.second, at = at, at + self.partial * size
        self.wanted = {"dscale", "dbias"} & set(problem.outputs)
        if problem.op.name.endswith("bwd"):
            at = -(-at // 16) * 16
            self.c1, at = at, at + self.sets * size
            self.c2, at = at, at + self.sets * size
            if self.wanted and v.by_step:
                self.units = v.outers * self.columns
                share = max(1, 4 * problem.target.processors // blocks)
                self.share = -(-self.units // min(share, self.units))
                self.parts = -(-self.units // self.share)
                at = -(-at // 16) * 16
                self.sums, at = at, at + 2 * self.parts * v.parameters * size
            elif self.wanted:
                self.parts = v.outers * self.chunks
        self.end, self.size = at, size


class SplitTriton(TritonEngine):
    """Pass after pass."""

    name = "norm.split_triton"
    operations = (
        "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd", "group_norm_fwd", "group_norm_bwd",
    )  # fmt: skip

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            v = _view(problem)
            r.require(len(v.outer) <= 3, "at most 4 loops over the sets after merging", len(v.outer) + 1)
            r.require(len(v.inner) <= 3, "at most 3 loops inside a set after merging", len(v.inner))
            r.require(v.steps < INT32 // 2, f"fewer than {INT32 // 2} steps", v.steps)
            most = max(v.outers * v.column.size, v.outers * v.sets) * max(1, v.steps // 1024)
            r.require(most < INT32 // 2, f"fewer than {INT32 // 2} tiles", most)
            for role in ("scale", "bias", "dscale", "dbias"):
                if role in problem.tensors:
                    loops = len(parameter_loops(problem[role]))
                    r.require(loops <= PARAMETER_LOOPS, f"at most {PARAMETER_LOOPS} loops over {role}", loops)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        v = _view(problem)
        found: list[Config] = []
        for elements, warps, many in ((4096, 4, 8), (8192, 8, 4), (2048, 4, 8), (4096, 8, 4)):
            if problem["x"].dtype == "f64":
                elements //= 2
            if v.turned:
                columns = min((256, 128, 64), key=lambda n: (-(-v.column.size // n) * n, -n))  # the least waste
                columns = min(columns, triton.next_power_of_2(v.column.size), elements)
                steps = min(elements // columns, triton.next_power_of_2(v.steps))
            else:
                steps = min(elements, triton.next_power_of_2(v.steps))
                columns = min(elements // steps, triton.next_power_of_2(v.column.size))
            config = {"BLOCK_C": columns, "BLOCK_S": steps, "BLOCKS": many, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return _Plan(problem, config).end

    def cost(self, problem: Problem, config: Config) -> float:
        v, plan = _view(problem), _Plan(problem, config)
        near = v.column if v.turned else (v.inner[0] if v.inner else v.column)
        passes = {"x": 2, "dy": 2, "y": 1, "dx": 1}
        if plan.wanted and v.by_step:
            passes |= {"x": 3, "dy": 3}
        moved = 0
        for role in full_roles(problem):
            t = problem[role]
            moved += passes[role] * t.nbytes * (1 if near.step(role) <= 1 else min(32 // t.itemsize, near.step(role)))
        waste = plan.columns * config["BLOCK_C"] * plan.blocks * config["BLOCK_S"] / (v.column.size * v.steps)
        busy = min(1.0, plan.columns * plan.chunks * v.outers / problem.target.processors)
        backward = problem.op.name.endswith("bwd")
        launches = 3 + len(plan.wanted) + (1 if plan.wanted and v.by_step else 0)
        efficiency = 0.85 * busy / waste**0.25
        moved += 4 * plan.partial * plan.size + (plan.end if backward else 0)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v, plan, op, e = _view(problem), _Plan(problem, config), problem.op, problem.epilogue
        backward = op.name.endswith("bwd")
        activation = ACTIVATIONS[e.activation]
        centered = "mean" in problem.tensors
        warps = config["num_warps"]
        widest = max(t.span for _, t in problem.items) + 65536
        flags: dict[str, Any] = {
            "OUTER": len(v.outer), "INNER": len(v.inner), "TURNED": v.turned, "WIDE": widest > INT32,
            "BLOCK_C": config["BLOCK_C"], "BLOCK_S": config["BLOCK_S"],
        }  # fmt: skip
        numbers: dict[str, Argument] = {"COLUMNS": v.column.size, "STEPS": v.steps}
        numbers |= loop_arguments([loop.size for loop in v.outer], "O") | loop_arguments([n.size for n in v.inner])
        out = "dx" if backward else "y"
        statistics = self._strides(problem, {"m": "mean", "v": "inv_variance"}, False)
        parameter = {f"p_k{i}": v.inner[i].step("parameter") if i < len(v.inner) else None for i in range(3)}
        common = {"mean": "mean", "inverse": "inv_variance"}
        slope: Argument = None if activation.parameter is None else Real(e.parameter, plan.real)
        first, second = Slice(plan.first, plan.real), Slice(plan.second, plan.real)
        small = max(1, min(triton.next_power_of_2(plan.chunks * v.each), 1024))
        few = max(1, min(1024 // small, triton.next_power_of_2(v.sets)))
        chunked = (v.outers * plan.chunks * plan.columns,)
        every = (v.outers * plan.blocks * plan.columns,)
        by_set = (v.outers * -(-v.sets // few),)
        found = list(plan.dense.launches)
        if not backward:
            args = {"x": "x", "means": first if centered else None, "squares": second, "CHUNKS": plan.chunks}
            args |= numbers | {"TRIPS": plan.trips, "EACH": v.each} | self._strides(problem, {"x": "x"})
            constants = flags | {"CENTERED": centered, "STAGES": 2}
            found.append(Launch(norm_split_statistics, chunked, args, constants, warps, 1))
            args = {
                "x": "x", "means": first if centered else None, "squares": second, **common,
                "epsilon": Real(op.epsilon, plan.real), "COLUMNS": v.column.size, "STEPS": v.steps,  # type: ignore
                "CHUNKS": plan.chunks, "PER": plan.trips * config["BLOCK_S"], "SETS": v.sets, "EACH": v.each,
                **loop_arguments([loop.size for loop in v.outer], "O"), **statistics,
                **self._strides(problem, {"x": "x"}, False),
            }  # fmt: skip
            constants = {"OUTER": len(v.outer), "CENTERED": centered, "WIDE": flags["WIDE"]}
            constants |= {"BLOCK_G": few, "BLOCK": small}
            found.append(Launch(norm_split_finish, by_set, args, constants, 4, 1))
            args = {"x": "x", "y": "y", **plan.dense.where, **common, "parameter": slope, "CHUNKS": plan.blocks}
            args |= numbers | statistics | parameter | {"EACH": v.each}
            args |= self._strides(problem, {"x": "x", "y": "y"})
            constants = flags | {"BY_STEP": v.by_step, "ACT": activation.code}
            found.append(Launch(norm_split_fwd, every, args, constants, warps, 1))
            return found
        both = self._strides(problem, {"x": "x", "dy": "dy"})
        constants = flags | {"BY_STEP": v.by_step, "ACT": activation.code}
        sources = {"x": "x", "dy": "dy", **plan.dense.where, **common, "parameter": slope, "EACH": v.each}
        totals = {"c1": Slice(plan.c1, plan.real), "c2": Slice(plan.c2, plan.real)}
        if "dx" in problem.outputs or not v.by_step:
            args = sources | numbers | both | statistics | parameter
            args |= {"plain": first, "against": second, "CHUNKS": plan.chunks, "TRIPS": plan.trips}
            found.append(Launch(norm_split_sums, chunked, args, constants | {"STAGES": 2}, warps, 1))
        if "dx" in problem.outputs:
            args = {"plain": first, "against": second, "scale": plan.dense.where["scale"], **totals}
            args |= {"COLUMNS": v.column.size, "STEPS": v.steps, "CHUNKS": plan.chunks, "SETS": v.sets, "EACH": v.each}
            blocks = {"BY_STEP": v.by_step, "BLOCK_G": few, "BLOCK": small}
            found.append(Launch(norm_split_totals, by_set, args, blocks, 4, 1))
            args = sources | numbers | both | statistics | parameter | totals
            args |= {"dx": "dx", "CHUNKS": plan.blocks, "SETS": v.sets} | self._strides(problem, {"y": out})
            found.append(Launch(norm_split_bwd, every, args, constants, warps, 1))
        if plan.wanted and v.by_step:
            args = {"x": "x", "dy": "dy", **common, "sums": Slice(plan.sums, plan.real), "COUNT": v.parameters}
            args |= {"UNITS": plan.units, "TRIPS": plan.share, "PARTS": plan.parts}
            args |= numbers | both | statistics | parameter
            found.append(Launch(norm_split_along, (plan.blocks * plan.parts,), args, flags, warps, 1))
            places = {"dscale": plan.sums, "dbias": plan.sums + plan.parts * v.parameters * plan.size}
        else:
            places = {"dscale": plan.second, "dbias": plan.first}
        for role in sorted(plan.wanted):
            found.append(summing(problem, role, Slice(places[role], plan.real), plan.parts))
        return found

    def _strides(self, problem: Problem, names: dict[str, str], full: bool = True) -> dict[str, Argument]:
        """Stride arguments of some tensors; statistics have none inside."""
        v = _view(problem)
        found: dict[str, Argument] = {}
        for name, role in names.items():
            there = role in problem.tensors
            found[f"{name}_c_stride"] = v.column.step(role) if there else None
            for i in range(3):
                found[f"{name}_{i}_stride"] = v.outer[i].step(role) if there and i < len(v.outer) else None
                if full:
                    found[f"{name}_k{i}_stride"] = v.inner[i].step(role) if there and i < len(v.inner) else None
        return found
