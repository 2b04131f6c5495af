"""``norm.rows_triton``: layer and RMS normalization on a GPU, each set whole in the registers of a block, in Triton.

Method. A block takes one or more neighbouring sets, reads them once, takes the mean, then the squared distances from
it, and writes the result: nothing is read twice. Blocks of the backward pass take one run of sets after another and
keep the sums for dscale and dbias in registers meanwhile; each writes one partial row, and a second small kernel adds
those in a fixed order. Tiles lie on their side where neighbours in memory belong to different sets.

Cost: one pass over memory. Limits: sets of at most 32768 elements (8192 where dscale and dbias are wanted, half of that
for float64).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.epilogue import convert
from .._triton.index import INT32, columns, rows
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.normalization import (
    PARAMETER_LOOPS,
    Parameters,
    inner_places,
    loop_arguments,
    outer_places,
    parameter_loops,
    steps,
    summing,
)
from ._sets import Loop, full_roles, sets

TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def norm_rows_fwd(
    x, y, scale, bias, mean, inverse, epsilon, ROWS, SIZE, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_r_stride, x_0_stride, x_1_stride, x_2_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    y_r_stride, y_0_stride, y_1_stride, y_2_stride, y_k0_stride, y_k1_stride, y_k2_stride,
    m_r_stride, m_0_stride, m_1_stride, m_2_stride, v_r_stride, v_0_stride, v_1_stride, v_2_stride,
    p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, X_RUN: tl.constexpr, Y_RUN: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if TURNED else 1
    blocks = tl.cdiv(ROWS, BLOCK_R)
    outer = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WIDE:
        outer = outer.to(tl.int64)
        row = row.to(tl.int64)
    lane = tl.arange(0, BLOCK_L)
    i0, i1, i2 = outer_places(outer, O0, O1, OUTER)
    k0, k1, k2 = inner_places(lane, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    in_rows = row < ROWS
    in_lanes = lane < SIZE
    ok = rows(in_rows, TURNED) & columns(in_lanes, TURNED)
    if X_RUN:
        inside = lane * x_k0_stride
    else:
        inside = steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER)
    at = steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER)
    v = tl.load(x + at + (rows(row * x_r_stride, TURNED) + columns(inside, TURNED)), mask=ok, other=0.0)
    v = convert(v, FLOAT)
    if mean is not None:
        center = tl.sum(v, axis=AXIS) / SIZE
        at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER)
        tl.store(mean + at + row * m_r_stride, center, mask=in_rows)
        v = tl.where(ok, v - rows(center, TURNED), 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(v * v, axis=AXIS) / SIZE + epsilon)
    at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER)
    tl.store(inverse + at + row * v_r_stride, factor, mask=in_rows)
    v = v * rows(factor, TURNED)
    along = steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
    if scale is not None:
        v = v * columns(convert(tl.load(scale + along, mask=in_lanes, other=0.0), FLOAT), TURNED)
    if bias is not None:
        v = v + columns(convert(tl.load(bias + along, mask=in_lanes, other=0.0), FLOAT), TURNED)
    if Y_RUN:
        inside = lane * y_k0_stride
    else:
        inside = steps(k0, k1, k2, y_k0_stride, y_k1_stride, y_k2_stride, INNER)
    at = steps(i0, i1, i2, y_0_stride, y_1_stride, y_2_stride, OUTER)
    v = convert(v, y.dtype.element_ty)
    tl.store(y + at + (rows(row * y_r_stride, TURNED) + columns(inside, TURNED)), v, mask=ok)


@triton.jit
def norm_rows_bwd(
    x, dy, dx, scale, mean, inverse, sums, ROWS, SIZE, UNITS, TRIPS, PARTS, COUNT, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_r_stride, x_0_stride, x_1_stride, x_2_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    dy_r_stride, dy_0_stride, dy_1_stride, dy_2_stride, dy_k0_stride, dy_k1_stride, dy_k2_stride,
    y_r_stride, y_0_stride, y_1_stride, y_2_stride, y_k0_stride, y_k1_stride, y_k2_stride,
    m_r_stride, m_0_stride, m_1_stride, m_2_stride, v_r_stride, v_0_stride, v_1_stride, v_2_stride,
    p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, X_RUN: tl.constexpr, DY_RUN: tl.constexpr, Y_RUN: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if TURNED else 1
    blocks = tl.cdiv(ROWS, BLOCK_R)
    first = tl.program_id(0) * TRIPS
    trips = tl.minimum(TRIPS, UNITS - first)
    lane = tl.arange(0, BLOCK_L)
    k0, k1, k2 = inner_places(lane, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    in_lanes = lane < SIZE
    x_inside = lane * x_k0_stride if X_RUN else steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER)
    dy_inside = lane * dy_k0_stride if DY_RUN else steps(k0, k1, k2, dy_k0_stride, dy_k1_stride, dy_k2_stride, INNER)
    if dx is not None:
        y_inside = lane * y_k0_stride if Y_RUN else steps(k0, k1, k2, y_k0_stride, y_k1_stride, y_k2_stride, INNER)
    along = steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
    if scale is not None:
        s = columns(convert(tl.load(scale + along, mask=in_lanes, other=0.0), FLOAT), TURNED)
    dscale = tl.zeros((BLOCK_L, BLOCK_R) if TURNED else (BLOCK_R, BLOCK_L), dtype=FLOAT)
    dbias = tl.zeros((BLOCK_L, BLOCK_R) if TURNED else (BLOCK_R, BLOCK_L), dtype=FLOAT)
    for trip in tl.range(0, trips, num_stages=STAGES):
        unit = first + trip
        outer = unit // blocks
        row = (unit % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        if WIDE:
            outer = outer.to(tl.int64)
            row = row.to(tl.int64)
        i0, i1, i2 = outer_places(outer, O0, O1, OUTER)
        in_rows = row < ROWS
        ok = rows(in_rows, TURNED) & columns(in_lanes, TURNED)
        at = steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER)
        v = tl.load(x + at + (rows(row * x_r_stride, TURNED) + columns(x_inside, TURNED)), mask=ok, other=0.0)
        at = steps(i0, i1, i2, dy_0_stride, dy_1_stride, dy_2_stride, OUTER)
        g = tl.load(dy + at + (rows(row * dy_r_stride, TURNED) + columns(dy_inside, TURNED)), mask=ok, other=0.0)
        v = convert(v, FLOAT)
        g = convert(g, FLOAT)
        if mean is not None:
            at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER)
            v = v - rows(tl.load(mean + at + row * m_r_stride, mask=in_rows, other=0.0), TURNED)
        at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER)
        factor = tl.load(inverse + at + row * v_r_stride, mask=in_rows, other=0.0)
        v = tl.where(ok, v * rows(factor, TURNED), 0.0)
        if sums is not None:
            dscale += g * v
            dbias += g
        if dx is not None:
            if scale is not None:
                g = g * s
            c2 = tl.sum(g * v, axis=AXIS) / SIZE
            r = g - v * rows(c2, TURNED)
            if mean is not None:
                r = r - rows(tl.sum(g, axis=AXIS) / SIZE, TURNED)
            r = convert(r * rows(factor, TURNED), dx.dtype.element_ty)
            at = steps(i0, i1, i2, y_0_stride, y_1_stride, y_2_stride, OUTER)
            tl.store(dx + at + (rows(row * y_r_stride, TURNED) + columns(y_inside, TURNED)), r, mask=ok)
    if sums is not None:
        part = tl.program_id(0).to(tl.int64) * COUNT
        R_AXIS: tl.constexpr = 1 - AXIS
        tl.store(sums + part + along, tl.sum(dscale, axis=R_AXIS), mask=in_lanes)
        tl.store(sums + (part + PARTS * COUNT) + along, tl.sum(dbias, axis=R_AXIS), mask=in_lanes)


class _View:
    """A problem's loops: `row` is the blocked one, `outer` and `inner` from the innermost out."""

    def __init__(self, problem: Problem):
        s = sets(problem)
        outside = list(s.outside)
        self.inner = sorted(s.inside, key=lambda one: -one.step("x"))[::-1]
        near = min(outside, key=lambda loop: loop.step("x"), default=None)
        self.turned = bool(near and self.inner and near.step("x") < self.inner[0].step("x"))
        self.row = (near if self.turned else outside[-1]) if outside else Loop(1, {})
        self.outer = [loop for loop in outside if loop is not self.row][::-1]
        self.size, self.count, self.parameters = s.size, s.count, s.parameters

    def run(self, role: str) -> bool:
        """Whether a set is one run of evenly spaced elements in a tensor."""
        return all(b.step(role) == a.size * a.step(role) for a, b in zip(self.inner, self.inner[1:], strict=False))

    @property
    def outer_count(self) -> int:
        return math.prod(loop.size for loop in self.outer)


_view = functools.lru_cache(maxsize=256)(_View)


def _wants_parameters(problem: Problem) -> bool:
    return bool({"dscale", "dbias"} & set(problem.outputs))


class RowsTriton(TritonEngine):
    """Whole sets in registers."""

    name = "norm.rows_triton"
    operations = ("layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if r:
            return r
        v = _view(problem)
        wants = _wants_parameters(problem)
        most = (8192 if wants else 16384 if "dx" in problem.outputs else 32768) // (
            2 if problem["x"].dtype == "f64" else 1
        )
        r.require(v.size <= most, f"at most {most} elements a set", v.size)
        r.require(len(v.outer) <= 3, "at most 4 loops over the sets after merging", len(v.outer) + 1)
        r.require(len(v.inner) <= 3, "at most 3 loops inside a set after merging", len(v.inner))
        for role in ("scale", "bias", "dscale", "dbias"):
            if role in problem.tensors:
                loops = len(parameter_loops(problem[role]))
                r.require(loops <= PARAMETER_LOOPS, f"at most {PARAMETER_LOOPS} loops over {role}", loops)
        r.require(v.count <= INT32, f"at most {INT32} sets", v.count)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        v = _view(problem)
        block = triton.next_power_of_2(v.size)
        backward = problem.op.name.endswith("bwd")
        found = []
        for elements, each in ((4096, 32), (4096, 16), (2048, 32), (8192, 32)):
            if backward:
                each = min(each, 16)
            height = max(1, min(elements // block, triton.next_power_of_2(v.row.size)))
            if v.turned:
                height = max(height, min(32, triton.next_power_of_2(v.row.size), max(1, 16384 // block)))
            warps = max(1, min(16, triton.next_power_of_2(height * block) // (32 * each)))
            config = {"BLOCK_R": height, "num_warps": max(warps, 2), "num_stages": 1}
            if backward:
                for per_processor in (2, 4):
                    more = {**config, "BLOCKS": per_processor, "STAGES": 2 if height * block <= 8192 else 1}
                    if more not in found:
                        found.append(more)
            elif config not in found:
                found.append(config)
        return found[:4]

    def _units(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        """Blocks of sets, those that one block of threads takes, and blocks of threads."""
        v = _view(problem)
        units = v.outer_count * -(-v.row.size // config["BLOCK_R"])
        if problem.op.name.endswith("fwd"):
            return units, 1, units
        wanted = problem.target.processors * config["BLOCKS"] * max(1, 8 // config["num_warps"])
        if not _wants_parameters(problem):
            wanted *= 8
        trips = -(-units // wanted)
        return units, trips, -(-units // trips)

    def _layout(self, problem: Problem, config: Config) -> tuple[Parameters, int, int]:
        """Dense parameters, and where the partial sums start and how many rows of them there are."""
        dense = Parameters(problem)
        return dense, dense.end, self._units(problem, config)[2]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        dense, start, parts = self._layout(problem, config)
        if not _wants_parameters(problem):
            return dense.end
        return start + 2 * parts * _view(problem).parameters * (8 if problem["x"].dtype == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        v = _view(problem)
        waste = triton.next_power_of_2(v.size) / v.size
        _, _, programs = self._units(problem, config)
        busy = min(1.0, programs / problem.target.processors)
        roles = full_roles(problem)
        inner = v.row if v.turned else (v.inner[0] if v.inner else v.row)
        moved = sum(
            problem[r].nbytes * (1 if inner.step(r) <= 1 else min(32 // problem[r].itemsize, inner.step(r)))
            for r in roles
        )
        if not v.turned and len(v.inner) > 1 and not v.run("x"):  # short pieces, and addresses one by one
            piece = v.inner[0].size * problem["x"].itemsize
            moved *= max(1.3, 32 / piece)
        _, start, parts = self._layout(problem, config)
        if _wants_parameters(problem):
            moved += 4 * (self.workspace_size(problem, config) - start)
        launches = 1 + len({"dscale", "dbias"} & set(problem.outputs))
        efficiency = 0.85 * busy / waste**0.25
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v, op = _view(problem), problem.op
        backward = op.name.endswith("bwd")
        real = "f64" if problem["x"].dtype == "f64" else "f32"
        dense, start, parts = self._layout(problem, config)
        units, trips, programs = self._units(problem, config)
        args: dict[str, Argument] = {
            "x": "x", "mean": "mean", "inverse": "inv_variance", "scale": dense.where["scale"],
            "ROWS": v.row.size, "SIZE": v.size,
            **loop_arguments([loop.size for loop in v.outer], "O"), **loop_arguments([loop.size for loop in v.inner]),
        }  # fmt: skip
        out = "dx" if backward else "y"
        names = {"x": "x", "y": out, "m": "mean", "v": "inv_variance"} | ({"dy": "dy"} if backward else {})
        for name, role in names.items():
            there = role in problem.tensors
            args[f"{name}_r_stride"] = v.row.step(role) if there else None
            for i in range(3):
                args[f"{name}_{i}_stride"] = v.outer[i].step(role) if there and i < len(v.outer) else None
                if name not in ("m", "v"):
                    inside = v.inner[i].step(role) if i < len(v.inner) else 0 if i == 0 else None
                    args[f"{name}_k{i}_stride"] = inside if there else None
        for i in range(3):
            args[f"p_k{i}"] = v.inner[i].step("parameter") if i < len(v.inner) else None
        block = triton.next_power_of_2(v.size)
        spans = [t.span for role, t in problem.items]
        constexprs: dict[str, Any] = {
            "OUTER": len(v.outer), "INNER": len(v.inner), "X_RUN": v.run("x"), "Y_RUN": v.run(out),
            "TURNED": v.turned, "BLOCK_R": config["BLOCK_R"],
            "BLOCK_L": block,
            "WIDE": max(spans) + config["BLOCK_R"] > INT32 or v.count + config["BLOCK_R"] > INT32,
        }  # fmt: skip
        if not backward:
            args |= {"y": "y", "bias": dense.where["bias"], "epsilon": Real(op.epsilon, real)}  # type: ignore[attr-defined]
            kernel = norm_rows_fwd
        else:
            wants = _wants_parameters(problem)
            place = Slice(start, real)
            args |= {
                "dy": "dy", "dx": "dx", "sums": place if wants else None, "UNITS": units, "TRIPS": trips,
                "PARTS": parts, "COUNT": v.parameters,
            }  # fmt: skip
            constexprs |= {"DY_RUN": v.run("dy"), "STAGES": config["STAGES"]}
            kernel = norm_rows_bwd
        found = [*dense.launches, Launch(kernel, (programs,), args, constexprs, config["num_warps"], 1)]
        if backward:
            size = parts * v.parameters * (8 if real == "f64" else 4)
            for role, offset in (("dscale", start), ("dbias", start + size)):
                if role in problem.outputs:
                    found.append(summing(problem, role, Slice(offset, real), parts))
        return found
