"""The kernels of ``reduce.blocked``: a block of lanes that reduces, and a block of dx, by way of tables of numbers.

All of them are in one file, because a kernel's compiled code is kept under the hash of the file that it is in. What the
tables hold is named by the constants at the top; ``blocked.py`` fills them.
"""

import math

import numpy as np
from numba.extending import register_jitable

from .. import _numba as nb
from .._numba.memory import address, size_of
from .._numba.stack import stack

TYPES = {"f64": 0, "f32": 1, "f16": 2, "bf16": 3}
BLOCK = 1024

# Forward: what a step does, and what a lane starts from.
CODES = {
    "add": 0, "avg": 0, "norm1": 1, "norm2": 2, "mul": 3, "mul_no_zeros": 4, "min": 5, "max": 6, "amax": 7,
    "equal": 8, "equal_magnitude": 9, "zeros": 10,
}  # fmt: skip
START = (0.0, 0.0, 0.0, 1.0, 1.0, math.inf, -math.inf, -math.inf, 0.0, 0.0, 0.0)
# Backward: how dx comes about.
GRADS = {
    "add": 0, "norm1": 1, "norm2": 2, "equal": 3, "magnitude": 4, "index": 5, "index_sign": 6, "mul": 7,
    "mul_no_zeros": 8,
}  # fmt: skip

# The table of 64-bit integers. Loops follow at `HEAD`, kept before reduced: the size, then a step for every slot.
(CODE, KIND, OUT_KIND, Z_KIND, REF_KIND, INDEX_KIND, UNITS, SPLITS, STEPS, KEPT, REDUCED, LANES, CHUNK, LANE_BLOCKS,
 PERIOD, X_LANE, NUMBER_LANE, OUT_LANE, Z_LANE, INDEX_LANE, REF_LANE, ROOT, RUN, RUN_STEP, RUN_NUMBER,
 PIECES) = range(26)  # fmt: skip
HEAD = 26
SLOTS = 6  # of a loop: x or the place's number, out, z, index, the reference value; one is spare for backward
ROW = SLOTS + 1
(G_CODE, G_UNITS, G_LOOPS, G_LANES, G_CHUNKS, G_APART) = range(6)
G_KINDS, G_LANE, G_HEAD = 6, 12, 19  # kinds of dy x y index aux dx; lane steps and loop steps of those and the number
G_ROW = 8


@register_jitable
def _load(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i), v[0])
    else:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i * step), v[0])


@nb.kernel
def _read(kind, address, at, step, count, v):
    """v[i] = tensor[at + i * step]; the type by number."""
    if kind == 0:
        _load(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _load(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _load(nb.pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _load(nb.pointer(address, np.int16(0)), at, step, count, v)


@nb.kernel
def _write(kind, address, at, step, count, v):
    """tensor[at + i * step] = v[i], rounded."""
    if kind == 0:
        p = nb.pointer(address, np.float64(0))
        for i in range(count):
            nb.store(p, at + i * step, v[i])
    elif kind == 1:
        f = nb.pointer(address, np.float32(0))
        for i in range(count):
            nb.store(f, at + i * step, v[i])
    elif kind == 2:
        h = nb.pointer(address, np.uint16(0))
        for i in range(count):
            nb.store(h, at + i * step, v[i])
    else:
        b = nb.pointer(address, np.int16(0))
        for i in range(count):
            nb.store(b, at + i * step, v[i])


@nb.kernel
def _step(code, count, v, acc, sought):
    """Combine a block of values with what the lanes hold."""
    zero, one = nb.cast(0, acc[0]), nb.cast(1, acc[0])
    if code == 0:
        for i in range(count):
            acc[i] += v[i]
    elif code == 1:
        for i in range(count):
            acc[i] += abs(v[i])
    elif code == 2:
        for i in range(count):
            acc[i] += v[i] * v[i]
    elif code == 3:
        for i in range(count):
            acc[i] *= v[i]
    elif code == 4:
        for i in range(count):
            acc[i] *= one if v[i] == 0 else v[i]
    elif code == 5:
        for i in range(count):
            acc[i] = v[i] if (v[i] < acc[i]) | (v[i] != v[i]) else acc[i]
    elif code == 6:
        for i in range(count):
            acc[i] = v[i] if (v[i] > acc[i]) | (v[i] != v[i]) else acc[i]
    elif code == 7:
        for i in range(count):
            acc[i] = abs(v[i]) if (abs(v[i]) > acc[i]) | (v[i] != v[i]) else acc[i]
    elif code == 8:
        for i in range(count):
            acc[i] += one if v[i] == sought[i] else zero
    elif code == 9:
        for i in range(count):
            acc[i] += one if abs(v[i]) == sought[i] else zero
    else:
        for i in range(count):
            acc[i] += one if v[i] == 0 else zero


@register_jitable
def _takes(sign, v, i, best, k):
    """Whether value v at place i goes before the best at k: further out, the first NaN, or the lower place."""
    further = sign * v > sign * best
    nan, had = v != v, best != best
    same = (v == best) | (nan & had)
    return (further & (not had)) | (nan & (not had)) | (same & (i < k))


@nb.kernel
def _step_place(code, count, v, acc, where, number, lanes):
    sign = nb.cast(-1 if code == 5 else 1, acc[0])
    if code == 7:
        for i in range(count):
            take = _takes(sign, abs(v[i]), number + lanes[i], acc[i], where[i])
            acc[i] = abs(v[i]) if take else acc[i]
            where[i] = number + lanes[i] if take else where[i]
    else:
        for i in range(count):
            take = _takes(sign, v[i], number + lanes[i], acc[i], where[i])
            acc[i] = v[i] if take else acc[i]
            where[i] = number + lanes[i] if take else where[i]


@nb.kernel
def _join_places(code, count, acc, where, above):
    """Combine each lane with the one that is `above` lanes further."""
    sign = nb.cast(-1 if code == 5 else 1, acc[0])
    for i in range(count):
        v, place = acc[above + i], where[above + i]
        take = _takes(sign, v, place, acc[i], where[i])
        acc[i] = v if take else acc[i]
        where[i] = place if take else where[i]


@register_jitable
def _locate(i, t, first, loops, at):
    """Steps of all slots to point i of a nest of loops, added to `at`."""
    for loop in range(loops - 1, -1, -1):
        row = first + loop * ROW
        here = i
        if loop > 0:
            here, i = i % t[row], i // t[row]
        for slot in range(SLOTS):
            at[slot] += here * t[row + 1 + slot]


@nb.kernel
def _finish(unit, acc, where, out, z, index, t, numbers, at, v):
    """Combine reduced lanes, then root, factors and rounding; `at` is where the unit's results are."""
    code, indexed = t[CODE], t[INDEX_KIND] >= 0
    start = (unit % t[LANE_BLOCKS]) * t[CHUNK] if t[PERIOD] == 0 else 0
    count = min(t[CHUNK], t[LANES] - start)
    if t[PERIOD] > 0:
        groups = count // t[PERIOD]
        while groups > 1:  # the upper half onto the lower, so that each is a loop over neighbours
            upper = groups // 2
            groups -= upper
            if indexed:
                _join_places(code, upper * t[PERIOD], acc, where, groups * t[PERIOD])
            else:
                joined = 0 if code > 7 else (0, 0, 0, 3, 3, 5, 6, 6)[code]
                above = nb.pointer(address(acc) + groups * t[PERIOD] * size_of(acc[0]), acc[0])
                _step(joined, upper * t[PERIOD], above, acc, acc)
        count = t[PERIOD]  # also where there was nothing to reduce
    if t[ROOT] != 0:
        for i in range(count):
            acc[i] = math.sqrt(acc[i])
    for i in range(count):
        acc[i] *= numbers[0]
    if z != 0:
        _read(t[Z_KIND], z, at[2] + start * t[Z_LANE], t[Z_LANE], count, v)
        for i in range(count):
            acc[i] += numbers[1] * v[i]
    _write(t[OUT_KIND], out, at[1] + start * t[OUT_LANE], t[OUT_LANE], count, acc)
    if indexed:
        place = at[3] + start * t[INDEX_LANE]
        narrow, wide = nb.pointer(index, np.int32(0)), nb.pointer(index, np.int64(0))
        for i in range(count):
            if t[INDEX_KIND] == 0:
                narrow[place + i * t[INDEX_LANE]] = nb.cast(where[i], np.int32(0))
            else:
                wide[place + i * t[INDEX_LANE]] = where[i]


@nb.kernel
def _part(part, parts, x, ref, z, out, index, space, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    buffer, acc, sought = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    where, lanes, at, to = (
        stack(BLOCK, np.int64(0)),
        stack(BLOCK, np.int64(0)),
        stack(SLOTS, np.int64(0)),
        stack(SLOTS, np.int64(0)),
    )
    code, indexed, period = t[CODE], t[INDEX_KIND] >= 0, t[PERIOD]
    direct = t[X_LANE] == 1 and t[KIND] == (0 if size_of(like) == 8 else 1)
    spare = nb.pointer(space, like)
    places = nb.pointer(space + t[UNITS] * t[SPLITS] * BLOCK * size_of(like), np.int64(0))
    if indexed:
        for i in range(t[CHUNK]):
            lanes[i] = (i // period) * t[NUMBER_LANE] if period > 0 else 0
    items = t[UNITS] * t[SPLITS]
    for item in range(items * part // parts, items * (part + 1) // parts):
        unit, split = item // t[SPLITS], item % t[SPLITS]
        for slot in range(SLOTS):
            at[slot] = 0
        block = 0
        if period == 0:
            block = unit % t[LANE_BLOCKS]
            _locate(unit // t[LANE_BLOCKS], t, HEAD, t[KEPT], at)
        else:
            _locate(unit, t, HEAD, t[KEPT], at)
        for i in range(t[CHUNK]):
            acc[i] = numbers[2]
        if indexed:
            for i in range(t[CHUNK]):
                where[i] = 9223372036854775807
        if ref != 0:
            if period > 0:
                for i in range(t[CHUNK]):
                    _read(t[REF_KIND], ref, at[4] + (i % period) * t[REF_LANE], 1, 1, buffer)
                    sought[i] = buffer[0]
            else:
                start = block * t[CHUNK]
                some = min(t[CHUNK], t[LANES] - start)
                _read(t[REF_KIND], ref, at[4] + start * t[REF_LANE], t[REF_LANE], some, sought)
        for step in range(t[STEPS] * split // t[SPLITS], t[STEPS] * (split + 1) // t[SPLITS]):
            point = step
            if period > 0:
                point, block = step // t[LANE_BLOCKS], step % t[LANE_BLOCKS]
            to[0], to[1] = at[0], 0
            for slot in range(2, SLOTS):
                to[slot] = 0
            _locate(point, t, HEAD + t[KEPT] * ROW, t[REDUCED], to)
            start = block * t[CHUNK]
            count = min(t[CHUNK], t[LANES] - start)
            v = buffer
            if direct:
                v = nb.pointer(x + (to[0] + start) * size_of(like), like)
            else:
                _read(t[KIND], x, to[0] + start * t[X_LANE], t[X_LANE], count, buffer)
            if indexed:
                number = to[1]
                if period > 0:
                    number += start // period * t[NUMBER_LANE]
                _step_place(code, count, v, acc, where, number, lanes)
            else:
                _step(code, count, v, acc, sought)
        if t[SPLITS] == 1:
            _finish(unit, acc, where, out, z, index, t, numbers, at, buffer)
        else:
            for i in range(t[CHUNK]):
                spare[item * BLOCK + i] = acc[i]
            if indexed:
                for i in range(t[CHUNK]):
                    places[item * BLOCK + i] = where[i]


@nb.kernel
def _combine_part(part, parts, z, out, index, space, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    buffer, at = stack(BLOCK, like), stack(SLOTS, np.int64(0))
    indexed = t[INDEX_KIND] >= 0
    places = space + t[UNITS] * t[SPLITS] * BLOCK * size_of(like)
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        acc = nb.pointer(space + unit * t[SPLITS] * BLOCK * size_of(like), like)
        where = nb.pointer(places + unit * t[SPLITS] * BLOCK * 8, np.int64(0))
        for split in range(1, t[SPLITS]):
            if indexed:
                _join_places(t[CODE], t[CHUNK], acc, where, split * BLOCK)
            else:
                joined = 0 if t[CODE] > 7 else (0, 0, 0, 3, 3, 5, 6, 6)[t[CODE]]
                _step(joined, t[CHUNK], nb.pointer(address(acc) + split * BLOCK * size_of(like), like), acc, acc)
        for slot in range(SLOTS):
            at[slot] = 0
        _locate(unit // t[LANE_BLOCKS] if t[PERIOD] == 0 else unit, t, HEAD, t[KEPT], at)
        _finish(unit, acc, where, out, z, index, t, numbers, at, buffer)


@nb.kernel
def reduce_blocks(parts, threads, x, ref, z, out, index, space, table, numbers, like):
    nb.launch(_part, parts, threads, (x, ref, z, out, index, space, table, numbers, like))
    t = nb.pointer(table, np.int64(0))
    if parts > 0 and t[SPLITS] > 1:
        nb.launch(_combine_part, min(parts, t[UNITS]), threads, (z, out, index, space, table, numbers, like))


@nb.kernel
def _spread_block(code, count, g, v, w, share, zero):
    """The gradient of a block: from dy in g, to dx in g."""
    none, one = nb.cast(0, g[0]), nb.cast(1, g[0])
    if code == 1 or code == 6:
        for i in range(count):
            g[i] *= (one if v[i] > 0 else none) - (one if v[i] < 0 else none)
    elif code == 2:
        for i in range(count):
            g[i] = none if w[i] == 0 else g[i] * (v[i] / w[i])
    elif code == 3:
        for i in range(count):
            g[i] = g[i] / share[i] if v[i] == w[i] else none / share[i]
    elif code == 4:
        for i in range(count):
            s = (one if v[i] > 0 else none) - (one if v[i] < 0 else none)
            g[i] = s * (g[i] / share[i] if abs(v[i]) == w[i] else none / share[i])
    elif code == 7:
        for i in range(count):
            if zero[i] == 0:
                g[i] *= share[i] / v[i]
            else:
                g[i] = g[i] * share[i] if (v[i] == 0) & (zero[i] == 1) else none
    elif code == 8:
        for i in range(count):
            g[i] = none if v[i] == 0 else g[i] * (w[i] / v[i])


@nb.kernel
def _spread_part(part, parts, dy, x, y, index, aux, dx, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    g, v, w = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    share, zero, at = stack(BLOCK, like), stack(BLOCK, like), stack(7, np.int64(0))
    narrow, wide = nb.pointer(index, np.int32(0)), nb.pointer(index, np.int64(0))
    step = G_LANE
    for unit in range(t[G_UNITS] * part // parts, t[G_UNITS] * (part + 1) // parts):
        rest, start = unit // t[G_CHUNKS], unit % t[G_CHUNKS] * BLOCK
        count = min(BLOCK, t[G_LANES] - start)
        for slot in range(7):
            at[slot] = start * t[step + slot]
        for loop in range(t[G_LOOPS] - 1, -1, -1):
            row = G_HEAD + loop * G_ROW
            here, rest = rest % t[row], rest // t[row]
            for slot in range(7):
                at[slot] += here * t[row + 1 + slot]
        _read(t[G_KINDS], dy, at[0], t[step], count, g)
        if x != 0:
            _read(t[G_KINDS + 1], x, at[1], t[step + 1], count, v)
        if y != 0:
            _read(t[G_KINDS + 2], y, at[2], t[step + 2], count, w)
        if index != 0:
            for i in range(count):
                place = at[3] + i * t[step + 3]
                found = np.int64(narrow[place]) if t[G_KINDS + 3] == 0 else wide[place]
                g[i] = g[i] if found == at[6] + i * t[step + 6] else nb.cast(0, like)
        if aux != 0:
            _read(t[G_KINDS + 4], aux, at[4], t[step + 4], count, share)
            if t[G_CODE] == 7:
                _read(t[G_KINDS + 4], aux, at[4] + t[G_APART], t[step + 4], count, zero)
        _spread_block(t[G_CODE], count, g, v, w, share, zero)
        for i in range(count):
            g[i] *= numbers[0]
        _write(t[G_KINDS + 5], dx, at[5], t[step + 5], count, g)


@nb.kernel
def spread_blocks(parts, threads, dy, x, y, index, aux, dx, table, numbers, like):
    nb.launch(_spread_part, parts, threads, (dy, x, y, index, aux, dx, table, numbers, like))
