"""``resample.separable``: resampling on a CPU, every mode, stride and type, both directions, in Numba.

Method: a row of the output is made in two steps. First the rows of the input that it is part of are added up, weighted
along D and H, into a buffer that stays in the first- or second-level cache; then the buffer is weighted along W. So a
bilinear point costs two products along H, which its neighbours share, and two along W. The weights come from
tables made once (`lucidnn.ops._axis_map`); the gradient is the same with the transposed tables: a gather, in one
order. Where W is innermost in memory the vectors run along W, where channels are, along channels. A row with the
same weights as the one before (enlarging by ``nearest``) is copied. Sums are in float32 (float64 for float64).

Rows that are enlarged to exactly twice their length, and the gradient of that, need no gathers along W: see `_doubled`
and `_halved`. Cost: the traffic, and the taps along D and H times W, then along W.
"""

import numpy as np
from numba.extending import intrinsic, register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops._axis_map import AxisMap
from ...ops.resampling import Resampling
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.memory import size_of

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
BUFFER = 32768  # most elements of a row in the buffer, if channels are its lanes

# What the table of 64-bit integers holds, and where. A unit is one row of the output: (n, c or chunk, o, p).
COLUMNS, UNITS, GROUPS, CHUNK, C = 0, 1, 2, 3, 4
RUNS, RUN, RUN_STEP, STEP = 5, 6, 7, 8  # how a row of the input lies in memory
PICK, DIRECT, PERIOD, FROM, TO = 9, 10, 11, 12, 13
X, Y, IN, OUT, TAPS, TABLES = 14, 19, 24, 27, 30, 33


@intrinsic
def _times(typingctx, v, factor):
    """A vector times one number."""

    def codegen(context, builder, signature, values):
        return builder.fmul(values[0], nv._splat(builder, values[1]), flags=("contract",))

    return v(v, factor), codegen


@register_jitable
def _gather(x, starts, factors, found, shift, step, count, buffer, start, zero):
    """Rows of the input, `found` of them, weighted and added up in the buffer: two at a time."""
    whole = count // nv.LANES * nv.LANES if step == 1 else 0
    for k in range(0, found, 2):
        a, b = starts[k] + shift, starts[min(k + 1, found - 1)] + shift
        wa, wb = factors[k], factors[k + 1]  # behind the last factor is a 0
        if k + 1 < found:
            for i in range(0, whole, nv.LANES):
                v = nv.add(_times(nv.read_all(x, a + i), wa), _times(nv.read_all(x, b + i), wb))
                if k > 0:
                    v = nv.add(v, nv.read_all(buffer, start + i))
                nv._write_all(buffer, start + i, v)
            for i in range(whole, count):
                v = wa * nb.load(x, a + i * step) + wb * nb.load(x, b + i * step)
                buffer[start + i] = v + (buffer[start + i] if k > 0 else zero)
        else:
            for i in range(0, whole, nv.LANES):
                v = _times(nv.read_all(x, a + i), wa)
                if k > 0:
                    v = nv.add(v, nv.read_all(buffer, start + i))
                nv._write_all(buffer, start + i, v)
            for i in range(whole, count):
                buffer[start + i] = wa * nb.load(x, a + i * step) + (buffer[start + i] if k > 0 else zero)


@register_jitable
def _copy(y, to, at, step, count):
    """A run of the output again."""
    whole = count // nv.LANES * nv.LANES if step == 1 else 0
    for i in range(0, whole, nv.LANES):
        nv._write_all(y, to + i, nv.read_all(y, at + i))
    for i in range(whole, count):
        y[to + i * step] = y[at + i * step]


@register_jitable
def _doubled(row, y, at, t, ww, places):
    """The middle of a row of twice the length: even and odd places each have weights of their own, and no others."""
    q, taps, length = t[FROM], t[TAPS + 2], t[OUT + 2]
    while q + 2 * nv.LANES <= t[TO]:
        even = _times(nv.read_all(row, places[q]), ww[q])
        odd = _times(nv.read_all(row, places[q + 1]), ww[q + 1])
        for k in range(1, taps):
            tap = k * length + q
            even = nv.add(even, _times(nv.read_all(row, places[tap]), ww[tap]))
            odd = nv.add(odd, _times(nv.read_all(row, places[tap + 1]), ww[tap + 1]))
        nv.write(y, at + q, 1, nv.lower_half(even, odd), nv.LANES)
        nv.write(y, at + q + nv.LANES, 1, nv.upper_half(even, odd), nv.LANES)
        q += 2 * nv.LANES
    return q


@register_jitable
def _halved(row, y, at, t, ww, places):
    """The middle of a row of half the length: all places have the same weights, two places apart."""
    q, taps, length = t[FROM], t[TAPS + 2], t[OUT + 2]
    while q + nv.LANES <= t[TO]:
        v = _times(nv.read_pairs(row, places[q]), ww[q])
        for k in range(1, taps):
            tap = k * length + q
            v = nv.add(v, _times(nv.read_pairs(row, places[tap]), ww[tap]))
        nv.write(y, at + q, 1, v, nv.LANES)
        q += nv.LANES
    return q


@register_jitable
def _some(row, y, at, step, t, ww, places, first, last, out, zero):
    """Places `first` to `last` of a row, whatever their weights."""
    taps, length = t[TAPS + 2], t[OUT + 2]
    if t[PICK]:
        for q in range(first, last):
            nb.store(y, at + q * step, nb.load(row, places[q]))
    elif taps == 2:
        for q in range(first, last):
            w = ww[length + q]
            v = w * nb.load(row, places[length + q])
            v = v if w != zero else zero
            nb.store(y, at + q * step, ww[q] * nb.load(row, places[q]) + v)
    else:
        for q in range(first, last):
            out[q] = ww[q] * nb.load(row, places[q])
        for k in range(1, taps):
            tap = k * length
            for q in range(first, last):
                w = ww[tap + q]
                v = w * nb.load(row, places[tap + q])
                out[q] += v if w != zero else zero
        for q in range(first, last):
            nb.store(y, at + q * step, out[q])


@register_jitable
def _columns(row, y, at, t, ww, places, out, zero):
    """A row of the output, its lanes columns."""
    first, done, step = t[FROM], t[FROM], t[Y + 4]
    if step == 1 and t[PERIOD] == 2:
        done = _doubled(row, y, at, t, ww, places)
    elif step == 1 and t[PERIOD] == 1:
        done = _halved(row, y, at, t, ww, places)
    for piece in range(2):  # before and after; written so that the code is there once
        begin, end = (0, first) if piece == 0 else (done, t[OUT + 2])
        _some(row, y, at, step, t, ww, places, begin, end, out, zero)


@register_jitable
def _channels(row, y, at, t, ww, places, many, zero):
    """A row of the output, its lanes channels."""
    taps, length, step = t[TAPS + 2], t[OUT + 2], t[Y + 1]
    whole = many // nv.LANES * nv.LANES if step == 1 else 0  # channels in full vectors, with a store each
    for q in range(length):
        to, a, wa = at + q * t[Y + 4], places[q] * many, ww[q]
        done = 0
        if taps == 1:
            for c in range(0, whole, nv.LANES):
                nv._write_all(y, to + c, _times(nv.read_all(row, a + c), wa))
            done = whole
        elif taps == 2 and ww[length + q] != zero:
            b, wb = places[length + q] * many, ww[length + q]
            for c in range(0, whole, nv.LANES):
                v = nv.add(_times(nv.read_all(row, a + c), wa), _times(nv.read_all(row, b + c), wb))
                nv._write_all(y, to + c, v)
            done = whole
        elif taps == 4 and ww[3 * length + q] != zero:
            b, wb = places[length + q] * many, ww[length + q]
            d, wd = places[2 * length + q] * many, ww[2 * length + q]
            e, we = places[3 * length + q] * many, ww[3 * length + q]
            for c in range(0, whole, nv.LANES):
                v = nv.add(_times(nv.read_all(row, a + c), wa), _times(nv.read_all(row, b + c), wb))
                w = nv.add(_times(nv.read_all(row, d + c), wd), _times(nv.read_all(row, e + c), we))
                nv._write_all(y, to + c, nv.add(v, w))
            done = whole
        for c in range(done, many, nv.LANES):
            count = min(many - c, nv.LANES)
            v = _times(nv.read_some(row, a + c, 0, count), wa)
            for k in range(1, taps):
                w = ww[k * length + q]
                if w != zero:
                    v = nv.add(v, _times(nv.read_some(row, places[k * length + q] * many + c, 0, count), w))
            nv.write(y, to + c * step, step, v, count)


@nb.kernel
def _resample_part(part, parts, x_address, y_address, table, weights, like):
    t, zero = nb.pointer(table, np.int64(0)), nb.accumulator(like)
    x, y, wd = nb.pointer(x_address, like), nb.pointer(y_address, like), nb.pointer(weights, zero)
    size = size_of(zero)
    o_size, p_size, q_size = t[OUT], t[OUT + 1], t[OUT + 2]
    wh = nb.pointer(weights + size * o_size * t[TAPS], zero)
    ww = nb.pointer(weights + size * (o_size * t[TAPS] + p_size * t[TAPS + 1]), zero)
    first_d, first_h, same = TABLES, TABLES + o_size, TABLES + o_size + p_size
    places = nb.pointer(table + 8 * (TABLES + o_size + 2 * p_size), np.int64(0))
    columns = t[COLUMNS] != 0
    kept = np.full(t[IN + 2] * (1 if columns else t[CHUNK]), zero)
    buffer = nb.pointer(np.int64(kept.ctypes.data), zero)
    out = np.full(q_size, zero)
    starts, factors = np.full(t[TAPS] * t[TAPS + 1], np.int64(0)), np.full(t[TAPS] * t[TAPS + 1] + 1, zero)
    begin, end = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    for unit in range(begin, end):
        p, rest = unit % p_size, unit // p_size
        o, rest = rest % o_size, rest // o_size
        c, n = rest % t[GROUPS] * t[CHUNK], rest // t[GROUPS]
        many = min(t[CHUNK], t[C] - c)
        at = n * t[Y] + c * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3]
        if t[same + p] and unit > begin:
            if columns or t[Y + 1] == 1 and t[Y + 4] == many:  # one run of memory, or one element a column
                _copy(y, at, at - t[Y + 3], t[Y + 4] if columns else 1, q_size * many)
            else:
                for q in range(q_size):
                    to = at + q * t[Y + 4]
                    _copy(y, to, to - t[Y + 3], t[Y + 1], many)
            continue
        # The rows of the input that take part.
        found = 0
        base = n * t[X] + c * t[X + 1]
        factors[:] = zero
        for i in range(t[TAPS]):
            for j in range(t[TAPS + 1]):
                w = wd[o * t[TAPS] + i] * wh[p * t[TAPS + 1] + j]
                if w != zero:
                    factors[found] = w
                    starts[found] = base + (t[first_d + o] + i) * t[X + 2] + (t[first_h + p] + j) * t[X + 3]
                    found += 1
        direct = found == 1 and factors[0] == nb.cast(1, zero) and t[DIRECT] != 0
        if not direct:
            count = t[RUN] if columns or t[RUNS] == 1 else many
            for run in range(t[RUNS]):
                shift, start = run * t[RUN_STEP], run * many
                if found == 0:
                    for i in range(count):
                        buffer[start + i] = zero
                _gather(x, starts, factors, found, shift, t[STEP], count, buffer, start, zero)
        # A single row that is as it should be needs no buffer; it is of the buffer's type then.
        address = x_address + starts[0] * size if direct else np.int64(kept.ctypes.data)
        row = nb.pointer(address, zero)
        if columns:
            _columns(row, y, at, t, ww, places, out, zero)
        else:
            _channels(row, y, at, t, ww, places, many, zero)


@nb.kernel
def _resample(parts, threads, x, y, table, weights, like):
    nb.launch(_resample_part, parts, threads, (x, y, table, weights, like))


def _even(m: AxisMap) -> tuple[int, int, int]:
    """After how many places the weights repeat while the input goes on by one (2) or two (1), and from where to where.

    Examples
    --------
    >>> _even(AxisMap.of(40, 80, "linear")), _even(AxisMap.of(40, 80, "linear").transposed())
    ((2, 1, 79), (1, 1, 39))
    >>> _even(AxisMap.of(40, 60, "linear"))
    (0, 0, 0)
    """
    full = (m.weights != 0).all(1)
    whole = np.flatnonzero(full)
    for period, step in ((2, 1), (1, 2)):
        if len(whole) <= 2 * nv.LANES:
            continue
        first, last = int(whole[0]), int(whole[-1]) + 1
        at, w = m.first[first:last], m.weights[first:last]
        steady = (at[period:] - at[:-period] == step).all() and (w[period:] == w[:-period]).all()
        if steady and full[first:last].all():
            return period, first, last - (last - first) % period
    return 0, 0, 0


def _tables(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The table of integers, and the weights of D, H (places by taps) and W (taps by places)."""
    r = Resampling.of(problem)
    d, h, w = r.maps
    columns = r.lanes_are_columns
    chunk = 1 if columns else max(1, min(r.C, BUFFER // r.in_size[2]))
    groups = -(-r.C // chunk)
    merged = not columns and groups == 1 and r.in_strides[1] == 1 and r.in_strides[4] == r.C
    if columns:
        runs = (1, r.in_size[2], 0, r.in_strides[4])
    elif merged:
        runs = (1, r.in_size[2] * r.C, 0, 1)
    else:
        runs = (r.in_size[2], chunk, r.in_strides[4], r.in_strides[1])
    direct = problem.items[0][1].dtype in ("f32", "f64") and runs[0] == 1 and runs[3] == 1
    same = np.zeros(len(h.first), dtype=bool)
    same[1:] = (h.first[1:] == h.first[:-1]) & (h.weights[1:] == h.weights[:-1]).all(1)
    # A weight of 0 reads the place of the first one, which is there.
    places = np.where(w.weights != 0, w.first[:, None] + np.arange(w.taps), w.first[:, None]).T
    units = r.N * groups * r.out_size[0] * r.out_size[1]
    head = (columns, units, groups, chunk, r.C, *runs, w.is_pick, direct, *_even(w))
    axes = (*r.in_strides, *r.out_strides, *r.in_size, *r.out_size, d.taps, h.taps, w.taps)
    tables = (d.first, h.first, same, places.ravel())
    table = np.concatenate([np.array([*head, *axes], dtype=np.int64), *(a.astype(np.int64) for a in tables)])
    real = np.float64 if problem.items[0][1].dtype == "f64" else np.float32
    weights = np.concatenate([d.weights.ravel(), h.weights.ravel(), w.weights.T.ravel()]).astype(real)
    return table, weights


class Separable(Engine):
    name = "resample.separable"
    operations = ("resample_fwd", "resample_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        r = Resampling.of(problem)
        d, h, w = (m.taps for m in r.maps)
        rows = r.N * r.C * r.out_size[0] * r.out_size[1]
        seconds = rows * (r.in_size[2] * d * h * 0.15e-9 + r.out_size[2] * w * 0.4e-9)
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        table, weights = _tables(problem)
        addresses = table.ctypes.data, weights.ctypes.data
        like = nb.token(problem.items[0][1].dtype)
        work = sum(t.numel for _, t in problem.items) + problem.flops
        parts = int(max(1, min(table[UNITS], work // 32768, PARTS)))
        threads = nb.threads if parts > 1 else lambda: 1
        _resample(0, 1, 0, 0, *addresses, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=(table, weights)):
            _resample(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), *addresses, like)

        return run
