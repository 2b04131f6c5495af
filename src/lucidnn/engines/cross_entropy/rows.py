"""``cross_entropy.rows``: cross-entropy on a CPU for every layout, both directions, in Numba.

Method: sixteen elements are the lanes of a vector (see ``_numba/vector.py``): classes of one row where these are dense,
neighbouring rows where another axis is (nchw images). Forward reads a row for its largest logit and again, from the
cache, for the sum of exponentials; the target's logit is picked. Where targets are probabilities or smoothed, a third
reading sums targets times log-probabilities; without weights a smoothed class needs only the distances to the largest
logit. Every part of the work adds up its own rows in float64, and the parts are added in their order: neither depends
on the number of threads. Backward makes the probabilities anew from the logits and the row's log-sum-exp. A class that
does not exist is an error, raised once all rows are done.

Cost: the memory traffic and an exponential an element. Limit: five kept axes after merging, which is all that tensors
of up to six axes can have.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.errors import InvalidArgument
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.cross_entropy import by_class
from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv
from .._numba.memory import prefetch, same_type
from .._row_loops import RowLoops, row_loops

TYPES = ("f64", "f32", "f16", "bf16")
GRAIN = 4096  # elements that are worth a thread
AHEAD = 32  # rows by which lines are called for: each class is a stream, too many for a processor to follow
KEPT = 5
LOWEST, LOWEST_64 = -3.4028234663852886e38, -1.7976931348623157e308
FINE = -(1 << 62)  # no class number: every class exists

# Table: counts and flags; steps along the classes; then for lanes and outer loops a size and the steps of
# logits, target, stats, loss (or its gradient) and dx.
UNITS, CHUNKS, CLASSES, IGNORE, PROBABLE, SMOOTH, FROM_LOG, HAS_WEIGHT, SINGLE, MEAN = range(10)
X_CLASS, T_CLASS, W_CLASS, D_CLASS = range(10, 14)
SIZE, X, T, S, Y, D = range(6)
LANE, OUTER = 14, 20


@nb.jitable
def _start(unit, t, at):
    for tensor in range(X, D + 1):
        at[tensor] = 0
    for loop in range(KEPT):
        base = OUTER + 6 * loop
        if t[base + SIZE] > 1:
            i = unit % t[base + SIZE]
            unit //= t[base + SIZE]
            for tensor in range(X, D + 1):
                at[tensor] += i * t[base + tensor]


@nb.jitable
def _get(p, at, step, many, absent):
    """Sixteen elements; `absent` in the lanes from `many` on."""
    if many == nv.LANES:
        if step == 1:
            return nv.read_all(p, at)
        return nv.read(p, at, step, 0, nv.LANES)
    return nv.select(nv.between(0, many), nv.read(p, at, step, 0, many), absent)


@nb.jitable
def _gaps(x, at, count, most, zero):
    """The sum of `most` less each of `count` neighbours, lane by lane."""
    a, b = zero, zero
    whole, w = count // (2 * nv.LANES) * (2 * nv.LANES), nv.LANES
    for k in range(0, whole, 2 * w):
        a = nv.add(a, ne.subtract(most, nv.read_all(x, at + k)))
        b = nv.add(b, ne.subtract(most, nv.read_all(x, at + k + w)))
    for k in range(whole, count, w):
        a = nv.add(a, ne.subtract(most, ne.row_end(x, at + k, count - k, most)))
    return nv.add(a, b)


@nb.jitable
def _targets(target, at, step, many, weight, w_at, w_step, t, rest, share, zero):
    """Sixteen classes' smoothed and weighted targets of one row, without the part of the row's own class."""
    q = share
    if t[PROBABLE] != 0:
        q = nv.add(ne.multiply(_get(target, at, step, many, zero), rest), share)
    if t[HAS_WEIGHT] != 0:
        q = ne.multiply(q, _get(weight, w_at, w_step, many, zero))
    return q


@nb.jitable
def _target_of_class(target, at, step, many, w, t, rest, share, zero):
    """One class's targets of sixteen rows, without the part of the rows' own classes; w is its weight."""
    q = share
    if t[PROBABLE] != 0:
        q = nv.add(ne.multiply(_get(target, at, step, many, zero), rest), share)
    return ne.multiply(q, w)


@nb.exact_kernel
def _forward_part(
    part, parts, x_address, target_address, weight_address, stats_address, y_address, sums_address, table, rest, share,
    x_like, t_like, w_like, y_like, like,
):  # fmt: skip
    x, stats, y = nb.pointer(x_address, x_like), nb.pointer(stats_address, like), nb.pointer(y_address, y_like)
    chosen, target = nb.pointer(target_address, np.int64(0)), nb.pointer(target_address, t_like)
    weight, t = nb.pointer(weight_address, w_like), nb.pointer(table, np.int64(0))
    sums, bad = nb.pointer(sums_address, np.float64(0)), nb.pointer(sums_address, np.int64(0))
    nothing, zero = nv.fill(nb.cast(-np.inf, like)), nv.fill(nb.cast(0, like))
    finite = nv.fill(nb.cast(LOWEST_64 if same_type(like, np.float64(0)) else LOWEST, like))
    rests, shares = nv.fill(rest), nv.fill(share)
    classes, x_step, t_step, w_step = t[CLASSES], t[X_CLASS], t[T_CLASS], t[W_CLASS]
    probable, smooth, from_log = t[PROBABLE] != 0, t[SMOOTH] != 0, t[FROM_LOG] != 0
    along = t[LANE + SIZE] == 0
    at = np.empty(6, np.int64)
    scratch = np.empty(3 * nv.LANES, np.float64)  # for every lane: the log of the sum, the loss, the largest logit
    log_sums, losses = nb.pointer(scratch.ctypes.data, like), nb.pointer(scratch.ctypes.data + 8 * nv.LANES, like)
    largest = nb.pointer(scratch.ctypes.data + 16 * nv.LANES, like)
    total, weights, strange = 0.0, 0.0, FINE
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        _start(unit // t[CHUNKS], t, at)
        lane = unit % t[CHUNKS] * nv.LANES
        lanes = 1 if along else min(nv.LANES, t[LANE + SIZE] - lane)
        x_at, t_at = at[X] + lane * t[LANE + X], at[T] + lane * t[LANE + T]
        most, logs, loss = zero, zero, zero
        if from_log:
            pass
        elif along:
            most_of = finite
            if x_step == 1:
                most_of = ne.row_largest(x, x_at, classes, finite, nothing)
                most = nv.fill(ne.largest(most_of))
                summed = ne.row_exponentials(x, x_at, classes, most, zero, nothing)
            else:
                for c in range(0, classes, nv.LANES):
                    v = _get(x, x_at + c * x_step, x_step, min(nv.LANES, classes - c), nothing)
                    most_of = ne.larger(v, most_of)
                most = nv.fill(ne.largest(most_of))
                summed = zero
                for c in range(0, classes, nv.LANES):
                    v = _get(x, x_at + c * x_step, x_step, min(nv.LANES, classes - c), nothing)
                    summed = nv.add(summed, ne.exp(ne.subtract(v, most)))
            log_sum = nb.cast(math.log(ne.total(summed)), like)
            logs = nv.fill(log_sum)
            if smooth and not probable and t[HAS_WEIGHT] == 0 and x_step == 1:  # the same target everywhere
                gaps = ne.total(_gaps(x, x_at, classes, most, zero))
                loss = ne.multiply(shares, nv.fill(gaps + nb.cast(classes, like) * log_sum))
            elif probable or smooth:
                gathered = zero
                for c in range(0, classes, nv.LANES):
                    many = min(nv.LANES, classes - c)
                    v = _get(x, x_at + c * x_step, x_step, many, most)
                    q = _targets(
                        target, t_at + c * t_step, t_step, many, weight, c * w_step, w_step, t, rests, shares, zero
                    )
                    term = ne.multiply(q, ne.subtract(ne.subtract(most, v), ne.subtract(zero, logs)))
                    gathered = nv.add(gathered, nv.select(nv.between(0, many), term, zero))
                loss = nv.fill(ne.total(gathered))
        else:
            step = t[LANE + X]
            most, summed = finite, zero
            for c in range(classes):
                prefetch(x, x_at + c * x_step + AHEAD * step)
                most = ne.larger(_get(x, x_at + c * x_step, step, lanes, nothing), most)
            for c in range(classes):
                v = _get(x, x_at + c * x_step, step, lanes, nothing)
                summed = nv.add(summed, ne.exp(ne.subtract(v, most)))
            logs = ne.log(summed)
            if probable or smooth:
                for c in range(classes):
                    v = _get(x, x_at + c * x_step, step, lanes, most)
                    w = nb.cast(nb.load(weight, c * w_step), like) if t[HAS_WEIGHT] != 0 else nb.cast(1, like)
                    q = _target_of_class(
                        target, t_at + c * t_step, t[LANE + T], lanes, nv.fill(w), t, rests, shares, zero
                    )
                    loss = nv.add(loss, ne.multiply(q, nv.add(ne.subtract(most, v), logs)))
        nv.write(largest, 0, 1, most, nv.LANES)
        nv.write(log_sums, 0, 1, logs, nv.LANES)
        nv.write(losses, 0, 1, loss, nv.LANES)
        for i in range(lanes):
            loss_i, weight_i = float(losses[i]), 1.0
            if not probable:
                c = chosen[t_at + i * t[LANE + T]]
                if c == t[IGNORE]:
                    loss_i = weight_i = 0.0
                elif c < 0 or c >= classes:
                    strange = c
                else:
                    if t[HAS_WEIGHT] != 0:
                        weight_i = float(nb.load(weight, c * w_step))
                    picked = float(nb.load(x, x_at + c * x_step + i * t[LANE + X]))
                    if from_log:
                        loss_i = -weight_i * picked
                    else:
                        loss_i += float(rest) * weight_i * ((float(largest[i]) - picked) + float(log_sums[i]))
            total += loss_i
            weights += weight_i
            if not from_log:
                stats[at[S] + (lane + i) * t[LANE + S]] = largest[i] + log_sums[i]
            if t[SINGLE] != 0:
                nb.store(y, at[Y] + (lane + i) * t[LANE + Y], nb.cast(loss_i, like))
        sums[3 * part] = total
        sums[3 * part + 1] = weights
        bad[3 * part + 2] = strange
    scratch[0] = 0.0  # it lives until here


@nb.exact_kernel
def _backward_part(
    part, parts, dy_address, x_address, target_address, weight_address, stats_address, total_address, dx_address,
    sums_address, table, rest, share, rows, x_like, t_like, w_like, y_like, like,
):  # fmt: skip
    x, dx, dy = nb.pointer(x_address, x_like), nb.pointer(dx_address, x_like), nb.pointer(dy_address, y_like)
    chosen, target = nb.pointer(target_address, np.int64(0)), nb.pointer(target_address, t_like)
    weight, t, stats = (
        nb.pointer(weight_address, w_like),
        nb.pointer(table, np.int64(0)),
        nb.pointer(stats_address, like),
    )
    whole, bad = nb.pointer(total_address, like), nb.pointer(sums_address, np.int64(0))
    zero = nv.fill(nb.cast(0, like))
    rests, shares = nv.fill(rest), nv.fill(share)
    classes, x_step, t_step, w_step, d_step = t[CLASSES], t[X_CLASS], t[T_CLASS], t[W_CLASS], t[D_CLASS]
    probable, from_log, plain = t[PROBABLE] != 0, t[FROM_LOG] != 0, t[PROBABLE] == 0 and t[SMOOTH] == 0
    along = t[LANE + SIZE] == 0
    at = np.empty(6, np.int64)
    scratch = np.empty(4 * nv.LANES, np.float64)
    slopes, log_sums = nb.pointer(scratch.ctypes.data, like), nb.pointer(scratch.ctypes.data + 8 * nv.LANES, like)
    owns = nb.pointer(scratch.ctypes.data + 16 * nv.LANES, like)
    classes_of = nb.pointer(scratch.ctypes.data + 24 * nv.LANES, np.int64(0))
    strange = FINE
    for i in range(nv.LANES):
        slopes[i], log_sums[i], owns[i], classes_of[i] = nb.cast(0, like), nb.cast(0, like), nb.cast(0, like), -1
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        _start(unit // t[CHUNKS], t, at)
        lane = unit % t[CHUNKS] * nv.LANES
        lanes = 1 if along else min(nv.LANES, t[LANE + SIZE] - lane)
        x_at, t_at, d_at = at[X] + lane * t[LANE + X], at[T] + lane * t[LANE + T], at[D] + lane * t[LANE + D]
        # ---- what every row has: its gradient, log-sum-exp, class and that class's target
        for i in range(lanes):
            g = nb.cast(nb.load(dy, at[Y] + (lane + i) * t[LANE + Y]), like)
            if t[MEAN] != 0:
                g = g / (rows if probable else whole[0])
            if not from_log:
                log_sums[i] = stats[at[S] + (lane + i) * t[LANE + S]]
            c, own = -1, nb.cast(0, like)
            if not probable:
                c = chosen[t_at + i * t[LANE + T]]
                if c == t[IGNORE]:
                    g, c = nb.cast(0, like), -1
                elif c < 0 or c >= classes:
                    strange, c = c, -1
                else:
                    own = rest
                    if t[HAS_WEIGHT] != 0:
                        own = rest * nb.cast(nb.load(weight, c * w_step), like)
            slopes[i], owns[i], classes_of[i] = g, own, c
        if along:
            g, own, c_own = slopes[0], owns[0], classes_of[0]
            level = nv.fill(log_sums[0])
            summed = zero
            if not plain:
                for c in range(0, classes, nv.LANES):
                    many = min(nv.LANES, classes - c)
                    q = _targets(
                        target, t_at + c * t_step, t_step, many, weight, c * w_step, w_step, t, rests, shares, zero
                    )
                    summed = nv.add(summed, nv.select(nv.between(0, many), q, zero))
            factor = g * (own + ne.total(summed))
            factors, gs = nv.fill(factor), nv.fill(g)
            counted = c_own >= 0 or probable
            done = 0
            if plain and not from_log and counted and x_step == 1 and d_step == 1:
                done = classes // nv.LANES * nv.LANES
                for c in range(0, done, nv.LANES):
                    e = ne.exp(ne.subtract(nv.read_all(x, x_at + c), level))
                    nv.write(dx, d_at + c, 1, ne.multiply(e, factors), nv.LANES)
            for c in range(done, classes, nv.LANES):
                many = min(nv.LANES, classes - c)
                r = zero
                if not from_log and counted:
                    v = _get(x, x_at + c * x_step, x_step, many, level)
                    r = ne.multiply(ne.exp(ne.subtract(v, level)), factors)
                    if not plain:
                        q = _targets(
                            target, t_at + c * t_step, t_step, many, weight, c * w_step, w_step, t, rests, shares, zero
                        )
                        r = ne.subtract(r, ne.multiply(q, gs))
                nv.write(dx, d_at + c * d_step, d_step, r, many)
            if c_own >= 0:
                value = -g * own
                if not from_log:
                    p = nb.cast(math.exp(nb.load(x, x_at + c_own * x_step) - log_sums[0]), like)
                    value += factor * p
                    if not plain:
                        w = nb.cast(nb.load(weight, c_own * w_step), like) if t[HAS_WEIGHT] != 0 else nb.cast(1, like)
                        value -= g * share * w
                nb.store(dx, d_at + c_own * d_step, value)
            bad[part] = strange
            continue
        bad[part] = strange
        gs, own, level, numbers = (
            nv.read_all(slopes, 0),
            nv.read_all(owns, 0),
            nv.read_all(log_sums, 0),
            nv.read_all(classes_of, 0),
        )
        summed = own
        if not plain:
            for c in range(classes):
                w = nb.cast(nb.load(weight, c * w_step), like) if t[HAS_WEIGHT] != 0 else nb.cast(1, like)
                q = _target_of_class(target, t_at + c * t_step, t[LANE + T], lanes, nv.fill(w), t, rests, shares, zero)
                summed = nv.add(summed, q)
        ignored = ne.is_value(gs, zero)
        for c in range(classes):
            r = nv.select(nv.equal(numbers, nv.fill(np.int64(c))), ne.subtract(zero, own), zero)
            if not from_log:
                prefetch(x, x_at + c * x_step + AHEAD * t[LANE + X])
                prefetch(dx, d_at + c * d_step + AHEAD * t[LANE + D])
                v = _get(x, x_at + c * x_step, t[LANE + X], lanes, level)
                r = nv.add(r, ne.multiply(ne.exp(ne.subtract(v, level)), summed))
                if not plain:
                    w = nb.cast(nb.load(weight, c * w_step), like) if t[HAS_WEIGHT] != 0 else nb.cast(1, like)
                    r = ne.subtract(
                        r,
                        _target_of_class(
                            target, t_at + c * t_step, t[LANE + T], lanes, nv.fill(w), t, rests, shares, zero
                        ),
                    )
            r = ne.multiply(r, gs)
            if not probable:  # a row that does not count has no gradient, whatever its logits hold
                r = nv.select(ignored, zero, r)
            nv.write(dx, d_at + c * d_step, t[LANE + D], r, lanes)
    scratch[0] = 0.0  # it lives until here


@nb.kernel
def _forward(
    parts, threads, x, target, weight, stats, y, total, sums_address, table, rest, share, rows, x_like, t_like, w_like,
    y_like, like,
):  # fmt: skip
    args = (x, target, weight, stats, y, sums_address, table, rest, share, x_like, t_like, w_like, y_like, like)
    nb.launch(_forward_part, parts, threads, args)
    sums, bad = nb.pointer(sums_address, np.float64(0)), nb.pointer(sums_address, np.int64(0))
    t, result, kept = nb.pointer(table, np.int64(0)), nb.pointer(y, y_like), nb.pointer(total, like)
    loss, weights, strange = 0.0, 0.0, FINE
    for part in range(parts):
        loss += sums[3 * part]
        weights += sums[3 * part + 1]
        if bad[3 * part + 2] != FINE:
            strange = bad[3 * part + 2]
        if part + 1 == parts:
            if total != 0:
                kept[0] = nb.cast(weights, like)
            if t[SINGLE] == 0:
                divisor = 1.0
                if t[MEAN] != 0:
                    divisor = weights if t[PROBABLE] == 0 else float(rows)
                nb.store(result, 0, nb.cast(loss / divisor, like))
    return strange


@nb.kernel
def _backward(
    parts, threads, dy, x, target, weight, stats, total, dx, sums_address, table, rest, share, rows, x_like, t_like,
    w_like, y_like, like,
):  # fmt: skip
    args = (
        dy, x, target, weight, stats, total, dx, sums_address, table, rest, share, rows, x_like, t_like, w_like,
        y_like, like,
    )  # fmt: skip
    nb.launch(_backward_part, parts, threads, args)
    bad, strange = nb.pointer(sums_address, np.int64(0)), FINE
    for part in range(parts):
        if bad[part] != FINE:
            strange = bad[part]
    return strange


def _loops(problem: Problem) -> RowLoops:
    """The loops, by the memory of the logits first; what has no class axis repeats along it, a number everywhere."""
    x = problem["x"]
    strides = {}
    for role in ("x", "dx", "target", "stats", "y", "dy", "weight"):
        t = problem.tensors.get(role)
        if t is None:
            continue
        if t.ndim == x.ndim:
            strides[role] = t.strides
        elif role == "weight":
            strides[role] = (0, t.strides[0], *(0,) * (x.ndim - 2))
        elif t.ndim == 0:
            strides[role] = (0,) * x.ndim
        else:
            strides[role] = (t.strides[0], 0, *t.strides[1:])
    return row_loops(x.shape, strides, (1,))


class Rows(Engine):
    name = "cross_entropy.rows"
    operations = ("cross_entropy_fwd", "cross_entropy_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "target" or not by_class(t):
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if "dx" in problem.tensors:
            r.require(problem["dx"].dtype == problem["x"].dtype, "dx of the type of x", problem["dx"].dtype)
        if not r:
            kept = len(_loops(problem).kept)
            r.require(kept <= KEPT, f"at most {KEPT} kept axes after merging", kept)
        return r

    def _units(self, loops: RowLoops) -> tuple[int, int]:
        """Units of work, and how many of them the loop of lanes is cut into."""
        if loops.lanes_reduced:
            return loops.rows, 1
        chunks = -(-loops.kept[-1] // nv.LANES)
        return loops.rows // loops.kept[-1] * chunks, chunks

    def _parts(self, problem: Problem) -> int:
        elements = problem["x"].numel if not problem.op.from_log else 64 * _loops(problem).rows  # type: ignore
        return max(1, min(self._units(_loops(problem))[0], elements // GRAIN, 64))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return 24 * self._parts(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=20.0 * problem["x"].numel, memory_efficiency=0.7)

    def build(self, problem: Problem, config: Config) -> Run:
        loops, op = _loops(problem), problem.op
        forward = op.name == "cross_entropy_fwd"
        roles = ("x", "target", "stats", "y" if forward else "dy", "dx")
        along = loops.lanes_reduced
        units, chunks = self._units(loops)
        reduction, smoothing = op.reduction, op.smoothing  # type: ignore[attr-defined]
        numbers = [
            units, chunks, loops.length, op.ignore_index, not by_class(problem["target"]),  # type: ignore
            smoothing > 0.0, op.from_log, "weight" in problem.tensors, reduction == "none",  # type: ignore
            reduction == "mean",
        ]  # fmt: skip
        steps = loops.reduced_strides
        numbers += [steps[role][0] if role in steps else 0 for role in ("x", "target", "weight", "dx")]

        def loop(i: int) -> list[int]:
            return [loops.kept[i], *(loops.kept_strides[role][i] if role in steps else 0 for role in roles)]

        kept = [*range(len(loops.kept))]
        numbers += [0] * 6 if along else loop(kept.pop())
        for i in [*reversed(kept), *[-1] * KEPT][:KEPT]:
            numbers += [1, 0, 0, 0, 0, 0] if i < 0 else loop(i)
        table = np.array(numbers, np.int64)
        address = table.ctypes.data
        x, target, weight = problem["x"], problem["target"], problem.tensors.get("weight", problem["x"])
        loss = problem["y" if forward else "dy"]
        real = "f64" if any(t.dtype == "f64" for _, t in problem.items) else "f32"
        likes = tuple(
            nb.token(kind)
            for kind in (x.dtype, x.dtype if by_class(target) else target.dtype, weight.dtype, loss.dtype, real)
        )
        scalar = np.float64 if real == "f64" else np.float32
        rest, share, rows = scalar(1.0 - smoothing), scalar(smoothing / loops.length), scalar(loops.rows)
        parts = self._parts(problem)
        threads = nb.threads if parts > 1 else lambda: 1
        place = {role: i for i, (role, _) in enumerate(problem.items)}
        order = ("x", "target", "weight", "stats", "y", "total") if forward else (
            "dy", "x", "target", "weight", "stats", "total", "dx",
        )  # fmt: skip
        places = [place.get(role, -1) for role in order]
        kernel = _forward if forward else _backward
        # Compiles, or loads from disk; no part is run.
        kernel(0, 1, *[0] * len(places), 0, address, rest, share, rows, *likes)

        def call(tensors, workspace, table=table):
            given = [tensors[i].data_ptr() if i >= 0 else 0 for i in places]
            strange = kernel(parts, threads(), *given, workspace.data_ptr(), address, rest, share, rows, *likes)
            if strange != FINE:
                accepted = f"class numbers from 0 to {loops.length - 1}, or ignore_index"
                raise InvalidArgument("target", strange, accepted)

        return call
