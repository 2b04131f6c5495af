"""``batch_norm.blocked``: normalization on a CPU in any layout, by the batch's or by given statistics, in Numba.

Method: where values of a channel lie side by side, all of one channel are taken at a time: a sum, from the first value
as a shift, and then the squares of differences from the finished mean, both in groups of values that stay in the second
level cache; groups are combined by Chan's formula, in float64. Where one thread has all of a channel, it normalises it
at once, while it is in the cache. Where channels lie side by side, a group is some pixels, whose sums for some hundred
channels stay in the first-level cache.

Without statistics to find, planes of channels are taken in the order of the memory.

Channels and values are dealt out to the threads in fixed parts, whose statistics are combined in order: the same bits
in every run. Cost: x read twice, once where channels fit the cache, and y written. Source of the combination: Chan,
Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.batch_normalization import TYPES, statistics_type
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.channels import (
    BLOCK,
    BLOCKS,
    C_PARTS,
    CHANNELS,
    CODE,
    INNER,
    LANES,
    LAST,
    MEANS,
    NATIVE,
    R_PARTS,
    REPEAT,
    ROWS,
    SLOT,
    SQUARES,
    activate,
    along,
    block_of,
    channel,
    get,
    opened,
    prepared,
    put,
    read,
    target,
    write,
)
from .._numba.stack import stack
from . import _lanes as vectors
from ._loops import Loops

GROUP = 16384  # values whose sums are finished before they are looked at again
PIXELS = 32  # the same where channels lie innermost
X, Z, Y, SCALE, SHIFTED, MEAN, INVERSE, VARIANCE, OLD_MEAN, OLD_VARIANCE, NEW_MEAN, NEW_VARIANCE, M2, WEIGHT = range(14)
ROLES = (
    "x", "z", "y", "scale", "bias", "mean", "inv_variance", "variance", "running_mean", "running_variance",
    "next_mean", "next_variance", "m2", "factor",
)  # fmt: skip
TRAIN, INFER, STATS = 0, 1, 2
MODES = {"batch_norm_train_fwd": TRAIN, "batch_norm_infer_fwd": INFER, "batch_norm_stats": STATS}


@nb.jitable
def _chan(n, mean, m2, more, other, other_m2):
    """Two sets of values as one: their number, mean and squares."""
    total = n + more
    if total > 0:
        d = other - mean
        mean += d * (more / total)
        m2 += other_m2 + d * d * (n * (more / total))
    return total, mean, m2


@nb.jitable
def _one_channel(t, a, c, first, last, buffer, like):
    """The number, mean and squares of a channel's values in some rows; float64."""
    co, ci = c // t[INNER], c % t[INNER]
    kind, step, base = t[SLOT + 3 * X], t[SLOT + 3 * X + 1], channel(t, X, co, ci)
    lanes = t[LANES]
    rows = max(GROUP // lanes, 1)
    n, mean, m2 = 0.0, 0.0, 0.0
    for r0 in range(first, last, rows):
        r1 = min(r0 + rows, last)
        for l0 in range(0, lanes, GROUP):
            l1 = min(l0 + GROUP, lanes)
            shift = nb.cast(get(kind, a[X], base + along(t, X, r0, l0)), like)
            total = 0.0
            for r in range(r0, r1):
                for b in range(l0, l1, BLOCK):
                    count = min(l1 - b, BLOCK)
                    v = opened(kind, t[NATIVE], a[X], base + along(t, X, r, b), step, count, buffer, like)
                    s = nb.accumulator(like)
                    for i in range(count):
                        s += v[i] - shift
                    total += s
            size = float((r1 - r0) * (l1 - l0))
            middle = shift + total / size
            m, squares = nb.cast(middle, like), 0.0
            for r in range(r0, r1):
                for b in range(l0, l1, BLOCK):
                    count = min(l1 - b, BLOCK)
                    v = opened(kind, t[NATIVE], a[X], base + along(t, X, r, b), step, count, buffer, like)
                    s = nb.accumulator(like)
                    for i in range(count):
                        s += (v[i] - m) * (v[i] - m)
                    squares += s
            squares -= size * (middle - m) * (middle - m)  # m was rounded
            n, mean, m2 = _chan(n, mean, m2, size, middle, squares)
    return n, mean, m2


@nb.jitable
def _some_channels(t, a, block, first, last, means, squares, buffer, like):
    """Means and squares of a block of channels over some pixels, by number: ``means[channel]``."""
    sums, shift, middle = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, 0.0)
    offsets = stack(PIXELS, np.int64(0))
    co, ci, count = block_of(t, block)
    kind, step, base = t[SLOT + 3 * X], t[SLOT + 3 * X + 2], channel(t, X, co, ci)
    row, lane = first // t[LANES], first % t[LANES]
    done = 0.0
    for i in range(count):
        means[i], squares[i] = 0.0, 0.0
    for start in range(first, last, PIXELS):
        pixels = min(last - start, PIXELS)
        for i in range(count):
            sums[i] = nb.accumulator(like)
        for p in range(pixels):
            offsets[p] = base + along(t, X, row, lane)
            lane += 1
            if lane == t[LANES]:
                lane, row = 0, row + 1
            v = opened(kind, t[NATIVE], a[X], offsets[p], step, count, buffer, like)
            if p == 0:
                for i in range(count):
                    shift[i] = v[i]
            else:
                for i in range(count):
                    sums[i] += v[i] - shift[i]
        for i in range(count):
            middle[i] = shift[i] + sums[i] / float(pixels)
            shift[i] = nb.cast(middle[i], like)  # the mean now, rounded
            sums[i] = nb.accumulator(like)
        for p in range(pixels):
            v = opened(kind, t[NATIVE], a[X], offsets[p], step, count, buffer, like)
            for i in range(count):
                sums[i] += (v[i] - shift[i]) * (v[i] - shift[i])
        share = pixels / (done + pixels)
        for i in range(count):
            d, off = middle[i] - means[i], middle[i] - shift[i]
            means[i] += d * share
            squares[i] += sums[i] - pixels * off * off + d * d * (done * share)
        done += pixels


@nb.jitable
def _finish(t, a, mode, numbers, c, n, mean, m2):
    """All that is written once a channel; gives the mean, the factor and the term of its values."""
    co, ci = c // t[INNER], c % t[INNER]
    if mode == INFER:
        mean = get(t[SLOT + 3 * MEAN], a[MEAN], channel(t, MEAN, co, ci))
        if t[SLOT + 3 * INVERSE] >= 0:
            inverse = get(t[SLOT + 3 * INVERSE], a[INVERSE], channel(t, INVERSE, co, ci))
        else:
            variance = get(t[SLOT + 3 * VARIANCE], a[VARIANCE], channel(t, VARIANCE, co, ci))
            inverse = 1.0 / math.sqrt(variance + numbers[0])
    else:
        if m2 != m2:
            mean = m2
        inverse = 1.0 / math.sqrt(m2 / max(n, 1.0) + numbers[0])
        put(t[SLOT + 3 * MEAN], a[MEAN], channel(t, MEAN, co, ci), mean)
        if mode == STATS:
            put(t[SLOT + 3 * M2], a[M2], channel(t, M2, co, ci), m2)
        else:
            put(t[SLOT + 3 * INVERSE], a[INVERSE], channel(t, INVERSE, co, ci), inverse)
            if t[SLOT + 3 * OLD_MEAN] >= 0:
                f = get(t[SLOT + 3 * WEIGHT], a[WEIGHT], 0) if t[SLOT + 3 * WEIGHT] >= 0 else numbers[1]
                if n == 0:
                    f = 0.0
                old = get(t[SLOT + 3 * OLD_MEAN], a[OLD_MEAN], channel(t, OLD_MEAN, co, ci))
                put(t[SLOT + 3 * NEW_MEAN], a[NEW_MEAN], channel(t, NEW_MEAN, co, ci), old + f * (mean - old))
                old = get(t[SLOT + 3 * OLD_VARIANCE], a[OLD_VARIANCE], channel(t, OLD_VARIANCE, co, ci))
                new = old + f * (m2 / max(n - 1.0, 1.0) - old)
                put(t[SLOT + 3 * NEW_VARIANCE], a[NEW_VARIANCE], channel(t, NEW_VARIANCE, co, ci), new)
    factor, term = inverse, 0.0
    if t[SLOT + 3 * SCALE] >= 0:
        factor *= get(t[SLOT + 3 * SCALE], a[SCALE], channel(t, SCALE, co, ci))
    if t[SLOT + 3 * SHIFTED] >= 0:
        term = get(t[SLOT + 3 * SHIFTED], a[SHIFTED], channel(t, SHIFTED, co, ci))
    return mean, factor, term


@nb.jitable
def _straight(t, step):
    """Whether x, y and z are used where they are, and at most a ReLU comes last; `step`: 1 along values, 2 channels."""
    native = t[NATIVE]
    x = t[SLOT + 3 * X] == native and t[SLOT + 3 * X + step] == 1
    y = t[SLOT + 3 * Y] == native and t[SLOT + 3 * Y + step] == 1
    z = t[SLOT + 3 * Z] < 0 or (t[SLOT + 3 * Z] == native and t[SLOT + 3 * Z + step] == 1)
    return x and y and z and t[CODE] <= 1


@nb.jitable
def _normalize_channel(t, a, parameter, c, first, last, mean, factor, term, buffer, result, like):
    """Some rows of one channel."""
    co, ci = c // t[INNER], c % t[INNER]
    m, f, b = nb.cast(mean, like), nb.cast(factor, like), nb.cast(term, like)
    x_at, y_at, z_at = channel(t, X, co, ci), channel(t, Y, co, ci), channel(t, Z, co, ci)
    x_step, y_step, z_step = t[SLOT + 3 * X + 1], t[SLOT + 3 * Y + 1], t[SLOT + 3 * Z + 1]
    kind, y_kind, z_kind, native, code = t[SLOT + 3 * X], t[SLOT + 3 * Y], t[SLOT + 3 * Z], t[NATIVE], t[CODE]
    if _straight(t, 1):
        x, z, y = nb.pointer(a[X], like), nb.pointer(a[Z], like), nb.pointer(a[Y], like)
        ms, fs, bs = nv.fill(m), nv.fill(f), nv.fill(b)
        for r in range(first, last):
            x_row, z_row, y_row = x_at + along(t, X, r, 0), z_at + along(t, Z, r, 0), y_at + along(t, Y, r, 0)
            vectors.normalize_run(x, z, y, x_row, z_row, y_row, t[LANES], ms, fs, bs, z_kind >= 0, code == 1)
        return
    for r in range(first, last):
        for lane in range(0, t[LANES], BLOCK):
            count = min(t[LANES] - lane, BLOCK)
            v = opened(kind, native, a[X], x_at + along(t, X, r, lane), x_step, count, buffer, like)
            at = y_at + along(t, Y, r, lane)
            w = target(y_kind, native, a[Y], at, y_step, result, like)
            if z_kind >= 0:  # read before y is written: they may be one tensor
                read(z_kind, a[Z], z_at + along(t, Z, r, lane), z_step, count, w)
                for i in range(count):
                    w[i] += (v[i] - m) * f + b
                activate(code, parameter, count, w)
            else:
                for i in range(count):
                    w[i] = (v[i] - m) * f + b
                activate(code, parameter, count, w)
            if y_kind != native or y_step != 1:
                write(y_kind, a[Y], at, y_step, count, w)


@nb.jitable
def _normalize_block(t, a, ws, parameter, block, first, last, buffer, result, like):
    """Some pixels of a block of channels."""
    m, f, b = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    co, ci, count = block_of(t, block)
    means, factors, terms = prepared(t, ws)
    for i in range(count):
        c = co * t[INNER] + (ci + i) % t[INNER]
        m[i], f[i], b[i] = nb.cast(means[c], like), nb.cast(factors[c], like), nb.cast(terms[c], like)
    x_at, y_at, z_at = channel(t, X, co, ci), channel(t, Y, co, ci), channel(t, Z, co, ci)
    x_step, y_step, z_step = t[SLOT + 3 * X + 2], t[SLOT + 3 * Y + 2], t[SLOT + 3 * Z + 2]
    kind, y_kind, z_kind, native, code = t[SLOT + 3 * X], t[SLOT + 3 * Y], t[SLOT + 3 * Z], t[NATIVE], t[CODE]
    row, lane = first // t[LANES], first % t[LANES]
    if _straight(t, 2):
        x, z, y = nb.pointer(a[X], like), nb.pointer(a[Z], like), nb.pointer(a[Y], like)
        for _ in range(first, last):
            x_row, z_row = x_at + along(t, X, row, lane), z_at + along(t, Z, row, lane)
            y_row = y_at + along(t, Y, row, lane)
            vectors.normalize_pixel(x, z, y, x_row, z_row, y_row, count, m, f, b, z_kind >= 0, code == 1)
            lane += 1
            if lane == t[LANES]:
                lane, row = 0, row + 1
        return
    for _ in range(first, last):
        v = opened(kind, native, a[X], x_at + along(t, X, row, lane), x_step, count, buffer, like)
        at = y_at + along(t, Y, row, lane)
        w = target(y_kind, native, a[Y], at, y_step, result, like)
        if z_kind >= 0:
            read(z_kind, a[Z], z_at + along(t, Z, row, lane), z_step, count, w)
            for i in range(count):
                w[i] += (v[i] - m[i]) * f[i] + b[i]
            activate(code, parameter, count, w)
        else:
            for i in range(count):
                w[i] = (v[i] - m[i]) * f[i] + b[i]
            activate(code, parameter, count, w)
        if y_kind != native or y_step != 1:
            write(y_kind, a[Y], at, y_step, count, w)
        lane += 1
        if lane == t[LANES]:
            lane, row = 0, row + 1


@nb.kernel
def _whole_part(part, parts, ws, table, numbers, mode, like):
    """Channels whose values all belong to this part: statistics, and at once what they are for."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    buffer, result = stack(BLOCK, like), stack(BLOCK, like)
    parameter = nb.cast(numbers[2], like)
    n, mean, m2 = 0.0, 0.0, 0.0
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        if mode != INFER:
            n, mean, m2 = _one_channel(t, a, c, 0, t[ROWS], buffer, like)
        mean, factor, term = _finish(t, a, mode, numbers, c, n, mean, m2)
        if mode != STATS:
            _normalize_channel(t, a, parameter, c, 0, t[ROWS], mean, factor, term, buffer, result, like)


@nb.kernel
def _statistics_part(part, parts, ws, table, like):
    """Statistics of a share of the channels over a share of the values."""
    t, a = nb.pointer(table, 0), nb.pointer(ws, 0)
    means, squares = nb.pointer(ws + t[MEANS], 0.0), nb.pointer(ws + t[SQUARES], 0.0)
    buffer = stack(BLOCK, like)
    own_means, own_squares = stack(BLOCK, 0.0), stack(BLOCK, 0.0)
    c_part, r_part = part // t[R_PARTS], part % t[R_PARTS]
    at = r_part * t[REPEAT] * t[CHANNELS]
    if t[LAST]:
        pixels = t[ROWS] * t[LANES]
        first, last = pixels * r_part // t[R_PARTS], pixels * (r_part + 1) // t[R_PARTS]
        for block in range(t[BLOCKS] * c_part // t[C_PARTS], t[BLOCKS] * (c_part + 1) // t[C_PARTS]):
            co, ci, count = block_of(t, block)
            _some_channels(t, a, block, first, last, own_means, own_squares, buffer, like)
            for i in range(count):
                means[at + co * t[INNER] + ci + i] = own_means[i]
                squares[at + co * t[INNER] + ci + i] = own_squares[i]
    else:
        first, last = t[ROWS] * r_part // t[R_PARTS], t[ROWS] * (r_part + 1) // t[R_PARTS]
        for c in range(t[CHANNELS] * c_part // t[C_PARTS], t[CHANNELS] * (c_part + 1) // t[C_PARTS]):
            _, means[at + c], squares[at + c] = _one_channel(t, a, c, first, last, buffer, like)


@nb.kernel
def _finish_part(part, parts, ws, table, numbers, counts, pieces, mode):
    """Combine the statistics of all parts for a share of the channels, in order."""
    t, a, numbers, counts = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0), nb.pointer(counts, 0.0)
    means, squares = nb.pointer(ws + t[MEANS], 0.0), nb.pointer(ws + t[SQUARES], 0.0)
    shift, factors, terms = prepared(t, ws)
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        n, mean, m2 = 0.0, 0.0, 0.0
        if mode != INFER:
            for p in range(pieces):
                n, mean, m2 = _chan(n, mean, m2, counts[p], means[p * t[CHANNELS] + c], squares[p * t[CHANNELS] + c])
        shift[c], factors[c], terms[c] = _finish(t, a, mode, numbers, c, n, mean, m2)


@nb.kernel
def _normalize_part(part, parts, ws, table, numbers, like):
    """A share of the channels over a share of the values; last read, first taken: that is still in the cache."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    part = t[R_PARTS] * t[C_PARTS] - 1 - part
    means, factors, terms = prepared(t, ws)
    buffer, result = stack(BLOCK, like), stack(BLOCK, like)
    parameter = nb.cast(numbers[2], like)
    c_part, r_part = part // t[R_PARTS], part % t[R_PARTS]
    if t[LAST]:
        pixels = t[ROWS] * t[LANES]
        first, last = pixels * r_part // t[R_PARTS], pixels * (r_part + 1) // t[R_PARTS]
        for block in range(t[BLOCKS] * c_part // t[C_PARTS], t[BLOCKS] * (c_part + 1) // t[C_PARTS]):
            _normalize_block(t, a, ws, parameter, block, first, last, buffer, result, like)
    else:
        first, last = t[ROWS] * r_part // t[R_PARTS], t[ROWS] * (r_part + 1) // t[R_PARTS]
        for c in range(t[CHANNELS] * c_part // t[C_PARTS], t[CHANNELS] * (c_part + 1) // t[C_PARTS]):
            m, f, b = means[c], factors[c], terms[c]
            _normalize_channel(t, a, parameter, c, first, last, m, f, b, buffer, result, like)


@nb.kernel
def _planes_part(part, parts, ws, table, numbers, like):
    """A share of the rows of all channels in the order that they lie in where images are outermost."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    means, factors, terms = prepared(t, ws)
    buffer, result = stack(BLOCK, like), stack(BLOCK, like)
    parameter = nb.cast(numbers[2], like)
    planes = t[ROWS] * t[CHANNELS]
    begin, end = planes * part // parts, planes * (part + 1) // parts
    row, c = begin // t[CHANNELS], begin % t[CHANNELS]
    co, ci = c // t[INNER], c % t[INNER]
    straight, added, relu, values, inner = _straight(t, 1), t[SLOT + 3 * Z] >= 0, t[CODE] == 1, t[LANES], t[INNER]
    x, z, y = nb.pointer(a[X], like), nb.pointer(a[Z], like), nb.pointer(a[Y], like)
    for _ in range(begin, end):
        c = co * inner + ci
        if straight:
            x_at = channel(t, X, co, ci) + along(t, X, row, 0)
            y_at = channel(t, Y, co, ci) + along(t, Y, row, 0)
            z_at = channel(t, Z, co, ci) + along(t, Z, row, 0) if added else x_at
            m, f, b = (
                nv.fill(nb.cast(means[c], like)),
                nv.fill(nb.cast(factors[c], like)),
                nv.fill(nb.cast(terms[c], like)),
            )
            vectors.normalize_run(x, z, y, x_at, z_at, y_at, values, m, f, b, added, relu)
        else:
            mean, factor, term = means[c], factors[c], terms[c]
            _normalize_channel(t, a, parameter, c, row, row + 1, mean, factor, term, buffer, result, like)
        ci += 1
        if ci == inner:
            ci, co = 0, co + 1
            if c == t[CHANNELS] - 1:
                co, row = 0, row + 1


@nb.kernel
def _run(
    parts, threads, channel_parts, pieces, whole, planes, mode, ws, table, numbers, counts,
    x, z, y, scale, bias, mean, inverse, variance, old_mean, old_variance, new_mean, new_variance, m2, weight, like,
):  # fmt: skip
    a = nb.pointer(ws, 0)
    a[X], a[Z], a[Y], a[SCALE], a[SHIFTED], a[MEAN], a[INVERSE], a[VARIANCE] = (
        x,
        z,
        y,
        scale,
        bias,
        mean,
        inverse,
        variance,
    )
    a[OLD_MEAN], a[OLD_VARIANCE], a[NEW_MEAN], a[NEW_VARIANCE] = old_mean, old_variance, new_mean, new_variance
    a[M2], a[WEIGHT] = m2, weight
    if whole:
        nb.launch(_whole_part, parts, threads, (ws, table, numbers, mode, like))
    else:
        if mode != INFER:
            nb.launch(_statistics_part, parts, threads, (ws, table, like))
        nb.launch(_finish_part, channel_parts, threads, (ws, table, numbers, counts, pieces, mode))
        if planes:
            nb.launch(_planes_part, planes, threads, (ws, table, numbers, like))
        elif mode != STATS:
            nb.launch(_normalize_part, parts, threads, (ws, table, numbers, like))


class Blocked(Engine):
    name = "batch_norm.blocked"
    operations = tuple(MODES)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return Loops(problem, ROLES).workspace

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, launches=2)

    def build(self, problem: Problem, config: Config) -> Run:
        loops = Loops(problem, ROLES)
        op, e = problem.op, problem.epilogue
        like = nb.token(statistics_type(problem["x"].dtype))
        constants = (getattr(op, "epsilon", 1.0), getattr(op, "momentum", 0.0), e.parameter)
        numbers = np.array(constants, dtype=np.float64)
        table, constants_at, counts = loops.table.ctypes.data, numbers.ctypes.data, loops.counts.ctypes.data
        mode, pieces, parts, channel_parts = MODES[op.name], len(loops.counts), loops.parts, loops.channel_parts
        whole = not loops.last and not loops.split and mode != INFER
        # Nothing to find first: every value is looked at once, best in the order of the memory.
        planes = loops.planes if mode == INFER and not loops.last else 0
        threads = nb.threads if max(parts, planes) > 1 else lambda: 1
        names = tuple(problem.tensors)
        order = [names.index(role) if role in names else -1 for role in ROLES]
        scratch = np.zeros(256, dtype=np.uint8)  # compiles, or loads from disk; no part is run
        _run(0, 1, 0, 0, True, 0, mode, scratch.ctypes.data, table, constants_at, counts, *[0] * len(ROLES), like)

        def run(tensors, workspace, _keep=(loops.table, loops.counts, numbers)):
            space = (workspace.data_ptr() + 63) & -64
            addresses = [tensors[i].data_ptr() if i >= 0 else 0 for i in order]
            _run(
                parts, threads(), channel_parts, pieces, whole, planes, mode, space, table, constants_at, counts,
                *addresses, like,
            )  # fmt: skip

        return run
