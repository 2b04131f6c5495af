"""``pool.max_direct``: max pooling on a CPU for every shape, stride and type, both directions, in Numba.

Method: sixteen neighbouring outputs are the lanes of a vector (see ``_numba/vector.py``); their largest values so
far and the places of these stay in registers while the points of the window pass by in order. The lanes are
columns (W) or channels, whichever lie closer together in memory: columns for nchw, channels for nhwc. Lanes
whose point lies in the padding sit that point out. 16-bit values are compared as float32, which is exact.

Backward is a gather, also with sixteen elements of dx as lanes. A window point reaches only every stride-th
column, so columns are taken phase by phase: those with one remainder modulo the stride are met by neighbouring
windows. Each element of dx is summed by one thread in one order, in float32 (float64 for float64): the result
does not depend on the threads, and overlapping windows need no atomics.

Cost: (window points) vector reads for sixteen outputs, from the first-level cache for all but the first.
Limit: the window's extent, counted in places of the flat plane, is below 2^31.
"""

import math

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import PoolGeometry
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.stack import stack

CHUNK = 512  # lanes that one unit of work has at most
BLOCK = 4 * nv.LANES  # channels whose largest values stay in registers
PARTS = 64
TYPES = ("f64", "f32", "f16", "bf16")
INDEX_KINDS = {"none": 0, "u8": 1, "i32": 2, "i64": 3}
NOWHERE = -(1 << 40)

# What the table of 64-bit integers holds, and where: one number, or one for each of five or three axes.
COLUMNS, UNITS, KIND, SIZES = 0, 1, 2, 3
X, Y, INDEX = 8, 13, 18
IN, WINDOW, STRIDE, PAD, DILATION, OUT, TABLES = 23, 26, 29, 32, 35, 38, 41


@register_jitable
def _coordinates(unit, t):
    """A unit of work's place along the five axes of `SIZES`; the last one counts chunks of lanes."""
    rest, chunk = unit // t[SIZES + 4], unit % t[SIZES + 4]
    rest, i3 = rest // t[SIZES + 3], rest % t[SIZES + 3]
    rest, i2 = rest // t[SIZES + 2], rest % t[SIZES + 2]
    return rest // t[SIZES + 1], rest % t[SIZES + 1], i2, i3, chunk


@register_jitable
def _inside(start, dilation, window, size):
    """The window points from `start` on, `dilation` apart, that lie in 0 to `size`: the first, one past the last."""
    first, last = 0, window
    if start < 0:
        first = min((dilation - 1 - start) // dilation, window)
    if start + (window - 1) * dilation >= size:
        last = max((size - start + dilation - 1) // dilation, first)
    return first, last


@register_jitable
def _largest_of_block(x, at, t, points, y, to, places):
    """The largest values of whole windows for `BLOCK` neighbouring channels; their places by number."""
    b0, b1 = nv.read_all(x, at), nv.read_all(x, at + nv.LANES)
    b2, b3 = nv.read_all(x, at + 2 * nv.LANES), nv.read_all(x, at + 3 * nv.LANES)
    p0 = nv.fill(np.int32(0))
    p1, p2, p3 = p0, p0, p0
    for k in range(1, points):
        spot, number = at + t[TABLES + k], nv.fill(nb.cast(t[TABLES + points + k], np.int32(0)))
        v = nv.read_all(x, spot)
        take = nv.exceeds(v, b0)
        b0, p0 = nv.select(take, v, b0), nv.select(take, number, p0)
        v = nv.read_all(x, spot + nv.LANES)
        take = nv.exceeds(v, b1)
        b1, p1 = nv.select(take, v, b1), nv.select(take, number, p1)
        v = nv.read_all(x, spot + 2 * nv.LANES)
        take = nv.exceeds(v, b2)
        b2, p2 = nv.select(take, v, b2), nv.select(take, number, p2)
        v = nv.read_all(x, spot + 3 * nv.LANES)
        take = nv.exceeds(v, b3)
        b3, p3 = nv.select(take, v, b3), nv.select(take, number, p3)
    nv.write(y, to, 1, b0, nv.LANES)
    nv.write(y, to + nv.LANES, 1, b1, nv.LANES)
    nv.write(y, to + 2 * nv.LANES, 1, b2, nv.LANES)
    nv.write(y, to + 3 * nv.LANES, 1, b3, nv.LANES)
    nv.write(places, 0, 1, p0, nv.LANES)
    nv.write(places, nv.LANES, 1, p1, nv.LANES)
    nv.write(places, 2 * nv.LANES, 1, p2, nv.LANES)
    nv.write(places, 3 * nv.LANES, 1, p3, nv.LANES)


@nb.kernel
def _forward_part(part, parts, x_address, y_address, index_address, table, like):
    t = nb.pointer(table, np.int64(0))
    x, y = nb.pointer(x_address, like), nb.pointer(y_address, like)
    narrow, middle = nb.pointer(index_address, np.uint8(0)), nb.pointer(index_address, np.int32(0))
    wide = nb.pointer(index_address, np.int64(0))
    lowest = nv.fill(nb.cast(-np.inf, nb.accumulator(like)))
    nowhere = nv.fill(np.int32(-1))
    columns, kind = t[COLUMNS] != 0, t[KIND]
    stride, width, reach, taps = t[STRIDE + 2], t[IN + 2], t[DILATION + 2], t[WINDOW + 2]
    points = t[WINDOW] * t[WINDOW + 1] * taps
    steps, numbers = TABLES, TABLES + points  # how far a window point is in x from the first, and its number
    ends, places = np.empty(2 * taps, np.int64), stack(BLOCK, np.int32(0))
    begin, end_unit = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    n, i1, i2, i3, chunk = _coordinates(begin, t)
    for unit in range(begin, end_unit):
        if unit > begin:
            chunk += 1
            if chunk == t[SIZES + 4]:
                chunk, i3 = 0, i3 + 1
                if i3 == t[SIZES + 3]:
                    i3, i2 = 0, i2 + 1
                    if i2 == t[SIZES + 2]:
                        i2, i1 = 0, i1 + 1
                        if i1 == t[SIZES + 1]:
                            i1, n = 0, n + 1
        if columns:
            o, p, end = i2, i3, t[OUT + 2]
            step, y_step, index_step = stride * t[X + 4], t[Y + 4], t[INDEX + 4]
        else:
            o, p, end = i1, i2, t[SIZES]
            step, y_step, index_step = t[X + 1], t[Y + 1], t[INDEX + 1]
        z0 = o * t[STRIDE] - t[PAD]
        y0 = p * t[STRIDE + 1] - t[PAD + 1]
        # The window points whose row is inside the input.
        a0, a1 = _inside(z0, t[DILATION], t[WINDOW], t[IN])
        b0, b1 = _inside(y0, t[DILATION + 1], t[WINDOW + 1], t[IN + 1])
        rows = (a1 - a0) * (b1 - b0) == t[WINDOW] * t[WINDOW + 1]
        first_lane, last_lane = chunk * CHUNK, min(chunk * CHUNK + CHUNK, end)
        if not columns and step == 1 and y_step == 1 and rows:
            x0 = i3 * stride - t[PAD + 2]
            blocks = (last_lane - first_lane) // BLOCK if x0 >= 0 and x0 + (taps - 1) * reach < width else 0
            at = n * t[X] + first_lane + z0 * t[X + 2] + y0 * t[X + 3] + x0 * t[X + 4]
            to = n * t[Y] + first_lane + o * t[Y + 2] + p * t[Y + 3] + i3 * t[Y + 4]
            to_index = n * t[INDEX] + first_lane * index_step + o * t[INDEX + 2] + p * t[INDEX + 3] + i3 * t[INDEX + 4]
            start = (z0 * t[IN + 1] + y0) * width + x0
            for _ in range(blocks):
                _largest_of_block(x, at, t, points, y, to, places)
                if kind:
                    for lane in range(0, BLOCK, nv.LANES):
                        place = nv.read_all(places, lane)
                        if kind == 1:
                            nv.write(narrow, to_index + lane * index_step, index_step, place, nv.LANES)
                            continue
                        flat = nv.add(nv.widen(place), nv.fill(start))
                        if kind == 2:
                            nv.write(middle, to_index + lane * index_step, index_step, flat, nv.LANES)
                        else:
                            nv.write(wide, to_index + lane * index_step, index_step, flat, nv.LANES)
                at, to, to_index = at + BLOCK, to + BLOCK, to_index + BLOCK * index_step
            first_lane += blocks * BLOCK
        for lane in range(first_lane, last_lane, nv.LANES):
            c, q = (i1, lane) if columns else (lane, i3)
            many = min(end - lane, nv.LANES)
            x0 = q * stride - t[PAD + 2]
            spread = (many - 1) * stride if columns else 0
            inside = x0 >= 0 and x0 + spread + (taps - 1) * reach < width
            whole = inside and rows and many == nv.LANES
            at = n * t[X] + c * t[X + 1] + z0 * t[X + 2] + y0 * t[X + 3] + x0 * t[X + 4]
            best, place = lowest, nowhere
            if whole and step == 1:
                best, place = nv.read_all(x, at), nv.fill(np.int32(0))  # the first point counts whatever it is
                for k in range(1, points):
                    v = nv.read_all(x, at + t[steps + k])
                    take = nv.exceeds(v, best)
                    best = nv.select(take, v, best)
                    place = nv.select(take, nv.fill(nb.cast(t[numbers + k], np.int32(0))), place)
            elif whole and step == 2:
                best, place = nv.read_pairs(x, at), nv.fill(np.int32(0))
                for k in range(1, points):
                    v = nv.read_pairs(x, at + t[steps + k])
                    take = nv.exceeds(v, best)
                    best = nv.select(take, v, best)
                    place = nv.select(take, nv.fill(nb.cast(t[numbers + k], np.int32(0))), place)
            else:
                # Which lanes have window column s inside: lane i is at x0 + s * reach + i * stride.
                for s in range(taps):
                    ends[2 * s], ends[2 * s + 1] = 0, many
                    w = x0 + s * reach
                    if not inside and columns:
                        if w < 0:
                            ends[2 * s] = (stride - 1 - w) // stride
                        if w + spread >= width:
                            ends[2 * s + 1] = (width - w + stride - 1) // stride
                    elif w < 0 or w >= width:
                        ends[2 * s + 1] = 0
                for a in range(a0, a1):
                    for b in range(b0, b1):
                        k = (a * t[WINDOW + 1] + b) * taps
                        for s in range(taps):
                            first, last = ends[2 * s], ends[2 * s + 1]
                            if first >= last:
                                continue
                            v = nv.read(x, at + t[steps + k + s], step, first, last)
                            take = nv.either(nv.negative(place), nv.exceeds(v, best))
                            take = nv.both(take, nv.between(first, last))
                            best = nv.select(take, v, best)
                            number = nv.fill(nb.cast(t[numbers + k + s], np.int32(0)))
                            place = nv.select(take, number, place)
            at = n * t[Y] + c * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
            nv.write(y, at, y_step, best, many)
            at = n * t[INDEX] + c * t[INDEX + 1] + o * t[INDEX + 2] + p * t[INDEX + 3] + q * t[INDEX + 4]
            none = nv.negative(place)
            if kind == 1:
                nv.write(narrow, at, index_step, nv.select(none, nv.fill(np.int32(0)), place), many)
            elif kind > 1:
                start = nv.ramp((z0 * t[IN + 1] + y0) * width + x0, stride if columns else 0)
                flat = nv.select(none, nv.fill(np.int64(-1)), nv.add(nv.widen(place), start))
                if kind == 2:
                    nv.write(middle, at, index_step, flat, many)
                else:
                    nv.write(wide, at, index_step, flat, many)


@nb.kernel
def _backward_part(part, parts, dy_address, index_address, dx_address, table, like):
    t = nb.pointer(table, np.int64(0))
    dy, dx = nb.pointer(dy_address, like), nb.pointer(dx_address, like)
    narrow, middle = nb.pointer(index_address, np.uint8(0)), nb.pointer(index_address, np.int32(0))
    wide = nb.pointer(index_address, np.int64(0))
    zero = nv.fill(nb.accumulator(like))
    columns, kind = t[COLUMNS] != 0, t[KIND]
    stride, width, taps = t[STRIDE + 2], t[IN + 2], t[WINDOW + 2]
    # Where each axis keeps, for remainder and window point, the window that is meant relative to place // stride.
    windows_d = TABLES
    windows_h = windows_d + t[STRIDE] * t[WINDOW]
    windows_w = windows_h + t[STRIDE + 1] * t[WINDOW + 1]
    paired = columns and stride == 2 and t[X + 4] == 1
    begin, end_unit = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    n, i1, i2, i3, chunk = _coordinates(begin, t)
    for unit in range(begin, end_unit):
        if unit > begin:
            chunk += 1
            if chunk == t[SIZES + 4]:
                chunk, i3 = 0, i3 + 1
                if i3 == t[SIZES + 3]:
                    i3, i2 = 0, i2 + 1
                    if i2 == t[SIZES + 2]:
                        i2, i1 = 0, i1 + 1
                        if i1 == t[SIZES + 1]:
                            i1, n = 0, n + 1
        if columns:
            z, h, phase, phases = i2, i3, 0, stride
            end = (width + stride - 1) // stride
            step, index_step, dx_step = t[Y + 4], t[INDEX + 4], stride * t[X + 4]
        else:
            z, h, phase, phases = i1, i2, i3 % stride, i3 % stride + 1
            end = t[SIZES]
            step, index_step, dx_step = t[Y + 1], t[INDEX + 1], t[X + 1]
        z_window, z_phase = z // t[STRIDE], z % t[STRIDE]
        h_window, h_phase = h // t[STRIDE + 1], h % t[STRIDE + 1]
        for lane in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, end), nv.LANES):
            c, j = (i1, lane) if columns else (lane, i3 // stride)
            even = zero
            for remainder in range(phase, phases):
                total = zero
                w = j * stride + remainder
                many = min(end - lane, nv.LANES)
                if columns:
                    many = min(many, (width - w + stride - 1) // stride)
                flat = (z * t[IN + 1] + h) * width + w
                flat_step = stride if columns else 0
                wanted = nv.ramp(flat, flat_step)
                wanted_middle = nv.ramp(nb.cast(flat, np.int32(0)), nb.cast(flat_step, np.int32(0)))
                for a in range(t[WINDOW]):
                    o = z_window + t[windows_d + z_phase * t[WINDOW] + a]
                    if o < 0 or o >= t[OUT]:
                        continue
                    for b in range(t[WINDOW + 1]):
                        p = h_window + t[windows_h + h_phase * t[WINDOW + 1] + b]
                        if p < 0 or p >= t[OUT + 1]:
                            continue
                        at = n * t[Y] + c * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3]
                        index_at = n * t[INDEX] + c * t[INDEX + 1] + o * t[INDEX + 2] + p * t[INDEX + 3]
                        number = (a * t[WINDOW + 1] + b) * taps
                        for s in range(taps):
                            q = j + t[windows_w + remainder * taps + s]
                            first, last = 0, many
                            if columns:
                                first, last = max(0, -q), min(many, t[OUT + 2] - q)
                                if first >= last:
                                    continue
                            elif q < 0 or q >= t[OUT + 2]:
                                continue
                            v = nv.read(dy, at + q * t[Y + 4], step, first, last)
                            # A lane that does not exist may hit, and then adds the 0 it holds.
                            here = index_at + q * t[INDEX + 4]
                            if kind == 1:
                                found = nv.read(narrow, here, index_step, first, last)
                                hit = nv.equal(found, nv.fill(nb.cast(number + s, np.int32(0))))
                            elif kind == 2:
                                hit = nv.equal(nv.read(middle, here, index_step, first, last), wanted_middle)
                            else:
                                hit = nv.equal(nv.read(wide, here, index_step, first, last), wanted)
                            total = nv.add(total, nv.select(hit, v, zero))
                at = n * t[X] + c * t[X + 1] + z * t[X + 2] + h * t[X + 3] + w * t[X + 4]
                if not paired:
                    nv.write(dx, at, dx_step, total, max(many, 0))
                elif remainder == 0:
                    even = total
                else:
                    count = width - 2 * j
                    nv.write(dx, at - 1, 1, nv.lower_half(even, total), min(count, nv.LANES))
                    if count > nv.LANES:
                        upper = nv.upper_half(even, total)
                        nv.write(dx, at - 1 + nv.LANES, 1, upper, min(count - nv.LANES, nv.LANES))


@nb.kernel
def _forward(parts, threads, x, y, index, table, like):
    nb.launch(_forward_part, parts, threads, (x, y, index, table, like))


@nb.kernel
def _backward(parts, threads, dy, index, dx, table, like):
    nb.launch(_backward_part, parts, threads, (dy, index, dx, table, like))


def _lanes_are_columns(g: PoolGeometry, forward: bool) -> bool:
    """Columns where a step along W is the shorter one in memory and there are enough of them."""
    width = g.out_size[2] if forward else g.in_size[2]
    if g.C > 1 and g.x_strides[1] <= g.x_strides[4]:
        return False
    return width >= 4 or width >= g.C


def _window_numbers(g: PoolGeometry, kind: int) -> list[int]:
    """What the forward pass keeps of a window point: its number, or how far it is from the first in the plane."""
    points = np.ndindex(*g.window)
    _, h, w = g.in_size
    dt, dr, ds = g.dilation
    if kind == 1:
        return list(range(math.prod(g.window)))
    return [(a * dt * h + b * dr) * w + s * ds for a, b, s in points]


def _window_steps(g: PoolGeometry) -> list[int]:
    """How many elements of x a window point is from the first."""
    steps = [d * s for d, s in zip(g.dilation, g.x_strides[2:], strict=True)]
    return [sum(i * s for i, s in zip(point, steps, strict=True)) for point in np.ndindex(*g.window)]


def _windows(stride: int, window: int, pad: int, dilation: int) -> list[int]:
    """For an element at j * stride + r and window point s: which window, counted from j, has it there."""
    reach = [(r + pad - s * dilation) for r in range(stride) for s in range(window)]
    return [place // stride if place % stride == 0 else NOWHERE for place in reach]


def _table(problem: Problem) -> np.ndarray:
    g = PoolGeometry.of(problem)
    forward = problem.op.name == "max_pool_fwd"
    columns = _lanes_are_columns(g, forward)
    plane = g.out_size if forward else g.in_size
    kind = INDEX_KINDS[problem.op.index_type]  # type: ignore[attr-defined]
    if columns:
        lanes = plane[2] if forward else -(-plane[2] // g.stride[2])
        units = (g.N, g.C, *plane[:2], -(-lanes // CHUNK))
    else:
        units = (g.N, *plane, -(-g.C // CHUNK))
    head = (columns, math.prod(units), kind, g.C, *units[1:])  # the batch's size divides nothing
    strides = (*g.x_strides, *g.y_strides, *g.index_strides)
    axes = (*g.in_size, *g.window, *g.stride, *g.pad, *g.dilation, *g.out_size)
    if forward:
        tables = _window_steps(g) + _window_numbers(g, kind)
    else:
        each = zip(g.stride, g.window, g.pad, g.dilation, strict=True)
        tables = [number for axis in each for number in _windows(*axis)]
    return np.array([*head, *strides, *axes, *tables], dtype=np.int64)


class MaxDirect(Engine):
    name = "pool.max_direct"
    operations = ("max_pool_fwd", "max_pool_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES)
        g = PoolGeometry.of(problem)
        z, h, w = (d * (n - 1) for d, n in zip(g.dilation, g.window, strict=True))
        extent = (z * g.in_size[1] + h) * g.in_size[2] + w
        r.require(extent < 2**31, "a window whose ends lie less than 2^31 places apart in the plane", extent)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        g = PoolGeometry.of(problem)
        forward = problem.op.name == "max_pool_fwd"
        plane, lanes, others = (g.out_size if forward else g.in_size), g.C, g.N
        if _lanes_are_columns(g, forward):
            lanes, others = plane[2], g.N * g.C * plane[0] * plane[1]
        else:
            others *= math.prod(plane)
        step = g.x_strides[4] * g.stride[2] if lanes == plane[2] else g.x_strides[1]
        if forward:
            points = math.prod(g.window)
            vectors = others * -(-lanes // nv.LANES)
        else:  # one vector a phase, and the windows that meet it
            points = math.prod(-(-r // s) for r, s in zip(g.window, g.stride, strict=True))
            phases = g.stride[2] if lanes == plane[2] else 1
            vectors = others * phases * -(-lanes // (nv.LANES * phases))
        # Measured: nanoseconds a vector, and for each point one or two reads or sixteen.
        seconds = vectors * (12e-9 + points * (4e-9 if step <= 2 else 12e-9))
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        table = _table(problem)
        address = table.ctypes.data
        like = nb.token(problem.items[0][1].dtype)
        work = problem.items[0][1].numel + problem.flops
        parts = int(max(1, min(table[UNITS], work // 16384, PARTS)))
        kernel = _forward if problem.op.name == "max_pool_fwd" else _backward
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, 0, address, like)  # compiles, or loads from disk; no part is run
        indexed = len(problem.items) == 3

        def run(tensors, workspace, _keep=table):
            a, b = tensors[0].data_ptr(), tensors[1].data_ptr()
            kernel(parts, threads(), a, b, tensors[2].data_ptr() if indexed else 0, address, like)

        return run
