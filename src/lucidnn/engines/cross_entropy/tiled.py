"""``cross_entropy.tiled``: cross-entropy on a GPU for every layout, both directions, in Triton.

Method: tiles of rows by classes (``_triton/row_tiles.py``), lanes along whichever lie side by side in memory. Forward
reads the logits once: every lane keeps its largest value and the sum of exponentials relative to it, which are merged
at the row's end; the target's own logit is picked from memory. What the rows of a program add up to goes to the
workspace and a second kernel (a third where there are very many) adds these in one order: two runs agree to the bit.
Backward needs no reduction: each tile of classes is a program of its own, which makes the probabilities anew from the
logits and the row's log-sum-exp; only where the targets' sum is not known beforehand (probabilities, or smoothing with
weights) does a program take whole rows and read the targets twice.

Cost: the logits once forward, once read and once written backward. A class that does not exist gives NaN.
"""

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.cross_entropy import by_class
from .._row_loops import RowLoops, row_loops
from .._triton.epilogue import convert
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.row_tiles import alignment, arguments, blocks, constants, fits, place_outer, tile_configs, visit, waste

TYPES = ("f64", "f32", "f16", "bf16")
PARTIALS = 8192  # of so many or fewer one program makes the sum
FOLDED = 256  # sums that very many are brought down to first


@triton.jit
def _logits(x, at, ok, FULL: tl.constexpr, FLOAT: tl.constexpr):
    if FULL:
        v = convert(tl.load(x + at), FLOAT)
    else:
        v = convert(tl.load(x + at, mask=ok, other=float("-inf")), FLOAT)
    return v


@triton.jit
def _coefficients(
    target, weight, at_t, j, w_k0_stride, ok_k, ok, rest, share, PROBABILITIES: tl.constexpr, FLOAT: tl.constexpr
):
    """The target of every class, smoothed and weighted; without the part of the row's own class where that is known."""
    if PROBABILITIES:
        q = convert(tl.load(target + at_t, mask=ok, other=0.0), FLOAT) * rest + share
    else:
        q = tl.zeros(ok.shape, FLOAT) + share
    if weight is not None:
        q = q * convert(tl.load(weight + j * w_k0_stride, mask=ok_k, other=0.0), FLOAT)[None, :]
    return tl.where(ok, q, 0.0)


@triton.jit
def cross_entropy_fwd(
    x, target, weight, y, stats, partial, partial_weight, rest, share, IGNORE, M, K, O0, O1, K0, K1, K2,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    t_m_stride, t_o0_stride, t_o1_stride, t_o2_stride, t_k0_stride, t_k1_stride, t_k2_stride, t_k3_stride,
    s_m_stride, s_o0_stride, s_o1_stride, s_o2_stride, s_k0_stride, s_k1_stride, s_k2_stride, s_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    w_m_stride, w_o0_stride, w_o1_stride, w_o2_stride, w_k0_stride, w_k1_stride, w_k2_stride, w_k3_stride,
    PROBABILITIES: tl.constexpr, SMOOTH: tl.constexpr, FROM_LOG: tl.constexpr, FLOAT64: tl.constexpr,
    ALIGN: tl.constexpr, OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if FLOAT64 else -3.4028234663852886e38
    blocks_m = tl.cdiv(M, BLOCK_M)
    o = tl.program_id(0) // blocks_m
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    ok_m = m < M
    x_at = place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    t_at = place_outer(o, O0, O1, t_o0_stride, t_o1_stride, t_o2_stride, OUTERS)
    x_row = x + x_at + m * x_m_stride
    t_row = m * t_m_stride + t_at
    loss = tl.zeros((BLOCK_M,), FLOAT)
    if not FROM_LOG:
        # ---- the log of the sum of exponentials, and the sums over smoothed or probable targets
        at_row = (m * x_m_stride)[:, None]
        shift = 0
        if ALIGN > 1:  # one row: begin at an aligned place, `shift` elements early
            start = x_at + tl.program_id(0) % blocks_m * x_m_stride
            shift = (start % ALIGN).to(tl.int32)
            x_at = tl.multiple_of(start - shift, ALIGN)
            at_row = at_row * 0
        steps = tl.cdiv(K + shift, BLOCK_K)
        most = tl.full((BLOCK_M, BLOCK_K), LOWEST, FLOAT)
        total = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        known = tl.zeros((BLOCK_M,), FLOAT)
        if PROBABILITIES or SMOOTH:
            # Sums of targets times logits are taken relative to a logit of the row: large means must not cancel.
            known = convert(tl.load(x_row, mask=ok_m, other=0.0), FLOAT)
            known = tl.where(tl.abs(known) < float("inf"), known, 0.0)
            lin = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
            sums = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            e = step * BLOCK_K + k
            j = e - shift
            ok_k = (j >= 0) & (j < K)
            ok = ok_m[:, None] & ok_k[None, :]
            if ALIGN > 1:
                if (step > 0) & (step + 1 < steps):
                    v = _logits(x + x_at, at_row + (e * x_k0_stride)[None, :], ok, True, FLOAT)
                else:
                    v = _logits(x + x_at, at_row + (e * x_k0_stride)[None, :], ok, False, FLOAT)
            else:
                v = _logits(x + x_at, at_row + (e * x_k0_stride)[None, :], ok, False, FLOAT)
            most, total = visit(most, total, v)
            if PROBABILITIES or SMOOTH:
                at_t = t_row[:, None]
                if PROBABILITIES:
                    at_t = at_t + (j * t_k0_stride)[None, :]
                q = _coefficients(target, weight, at_t, j, w_k0_stride, ok_k, ok, rest, share, PROBABILITIES, FLOAT)
                lin += tl.where(ok, q * (v - known[:, None]), 0.0)
                sums += q
        largest = tl.max(most, 1)
        log_total = tl.log(tl.sum(total * tl.exp(most - largest[:, None]), 1))
        s_row = stats + place_outer(o, O0, O1, s_o0_stride, s_o1_stride, s_o2_stride, OUTERS) + m * s_m_stride
        tl.store(s_row, largest + log_total, mask=ok_m)
        if PROBABILITIES or SMOOTH:
            loss = tl.sum(sums, 1) * ((largest - known) + log_total) - tl.sum(lin, 1)
    # ---- the row's own class
    counts = tl.zeros((BLOCK_M,), FLOAT) + 1.0
    if not PROBABILITIES:
        t = tl.load(target + t_row, mask=ok_m, other=0)
        counted = t != IGNORE
        exists = (t >= 0) & (t < K)
        picked = convert(tl.load(x_row + t * x_k0_stride, mask=ok_m & exists & counted, other=0.0), FLOAT)
        if weight is not None:
            counts = convert(tl.load(weight + t * w_k0_stride, mask=ok_m & exists & counted, other=0.0), FLOAT)
        if FROM_LOG:
            loss = -counts * picked
        else:
            loss += rest * counts * ((largest - picked) + log_total)
        loss = tl.where(counted, tl.where(exists, loss, float("nan")), 0.0)
        counts = tl.where(counted, tl.where(exists, counts, float("nan")), 0.0)
    if y is not None:
        y_row = y + place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS) + m * y_m_stride
        tl.store(y_row, convert(loss, y.dtype.element_ty), mask=ok_m)
    if partial is not None:
        tl.store(partial + tl.program_id(0), tl.sum(tl.where(ok_m, loss, 0.0), 0))
    if partial_weight is not None:
        tl.store(partial_weight + tl.program_id(0), tl.sum(tl.where(ok_m, counts, 0.0), 0))


@triton.jit
def cross_entropy_sum(partial, partial_weight, y, total, N, EACH, rows, BLOCK: tl.constexpr):
    """Add up `EACH` of N partial sums a program; the mean's divisor is the sum of the weights, or `rows`."""
    first = tl.program_id(0) * EACH
    i = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), partial.dtype.element_ty)
    weights = tl.zeros((BLOCK,), partial.dtype.element_ty)
    for step in range(tl.cdiv(EACH, BLOCK)):
        at = step * BLOCK + i
        ok = (at < EACH) & (first + at < N)
        sums += tl.load(partial + first + at, mask=ok, other=0.0)
        if partial_weight is not None:
            weights += tl.load(partial_weight + first + at, mask=ok, other=0.0)
    result = tl.sum(sums, 0)
    if total is not None:
        weight = tl.sum(weights, 0)
        tl.store(total + tl.program_id(0), weight)
        if rows is not None:  # the last one
            result = result / weight
    elif rows is not None:
        result = result / rows
    tl.store(y + tl.program_id(0), convert(result, y.dtype.element_ty))


@triton.jit
def cross_entropy_bwd(
    dy, x, target, stats, weight, total, dx, rest, share, rows, IGNORE, M, K, O0, O1, K0, K1, K2,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    t_m_stride, t_o0_stride, t_o1_stride, t_o2_stride, t_k0_stride, t_k1_stride, t_k2_stride, t_k3_stride,
    s_m_stride, s_o0_stride, s_o1_stride, s_o2_stride, s_k0_stride, s_k1_stride, s_k2_stride, s_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    w_m_stride, w_o0_stride, w_o1_stride, w_o2_stride, w_k0_stride, w_k1_stride, w_k2_stride, w_k3_stride,
    d_m_stride, d_o0_stride, d_o1_stride, d_o2_stride, d_k0_stride, d_k1_stride, d_k2_stride, d_k3_stride,
    PROBABILITIES: tl.constexpr, SMOOTH: tl.constexpr, FROM_LOG: tl.constexpr, FLOAT64: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    blocks_m = tl.cdiv(M, BLOCK_M)
    steps = tl.cdiv(K + (ALIGN - 1), BLOCK_K)
    tile = tl.program_id(0)
    first = 0
    if not WHOLE:
        first = tile % steps
        tile = tile // steps
        steps = 1
    o = tile // blocks_m
    m = tile % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    ok_m = m < M
    x_at = place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    d_at = place_outer(o, O0, O1, d_o0_stride, d_o1_stride, d_o2_stride, OUTERS)
    x_row = (m * x_m_stride)[:, None]
    d_row = (m * d_m_stride)[:, None]
    t_row = m * t_m_stride + place_outer(o, O0, O1, t_o0_stride, t_o1_stride, t_o2_stride, OUTERS)
    shift = 0
    if ALIGN > 1:  # one row: begin at an aligned place, `shift` elements early
        start = x_at + tile % blocks_m * x_m_stride
        shift = (start % ALIGN).to(tl.int32)
        x_at = tl.multiple_of(start - shift, ALIGN)
        d_at = x_at
        x_row = x_row * 0
        d_row = d_row * 0
    # ---- what a row has: its gradient, log-sum-exp, class
    y_row = place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS) + m * y_m_stride
    g = convert(tl.load(dy + y_row, mask=ok_m, other=0.0), FLOAT)
    if total is not None:
        g = g / tl.load(total)
    elif rows is not None:
        g = g / rows
    log_sum = tl.zeros((BLOCK_M,), FLOAT)
    if not FROM_LOG:
        s_row = place_outer(o, O0, O1, s_o0_stride, s_o1_stride, s_o2_stride, OUTERS) + m * s_m_stride
        log_sum = tl.load(stats + s_row, mask=ok_m, other=0.0)
    t = tl.zeros((BLOCK_M,), tl.int64) - 1
    own = tl.zeros((BLOCK_M,), FLOAT)
    if not PROBABILITIES:
        t = tl.load(target + t_row, mask=ok_m, other=0)
        counted = t != IGNORE
        exists = (t >= 0) & (t < K)
        own += 1.0
        if weight is not None:
            own = convert(tl.load(weight + t * w_k0_stride, mask=ok_m & exists & counted, other=0.0), FLOAT)
        own = own * rest
        g = tl.where(counted, tl.where(exists, g, float("nan")), 0.0)
    sums = own
    if WHOLE:
        more = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            j = step * BLOCK_K + k
            ok_k = j < K
            ok = ok_m[:, None] & ok_k[None, :]
            at_t = t_row[:, None]
            if PROBABILITIES:
                at_t = at_t + (j * t_k0_stride)[None, :]
            more += _coefficients(target, weight, at_t, j, w_k0_stride, ok_k, ok, rest, share, PROBABILITIES, FLOAT)
        sums = own + tl.sum(more, 1)
    elif SMOOTH:
        sums = own + share * K
    for turn in range(steps):
        e = (first + turn) * BLOCK_K + k
        j = e - shift
        ok_k = (j >= 0) & (j < K)
        ok = ok_m[:, None] & ok_k[None, :]
        at = x_row + (e * x_k0_stride)[None, :]
        to = d_row + (e * d_k0_stride)[None, :]
        r = tl.where(t[:, None] == j[None, :], -own[:, None], 0.0)
        whole = False
        if ALIGN > 1:
            whole = (first > 0) & ((first + 1) * BLOCK_K - shift <= K)
        if not FROM_LOG:
            if ALIGN > 1:
                if whole:
                    v = _logits(x + x_at, at, ok, True, FLOAT)
                else:
                    v = _logits(x + x_at, at, ok, False, FLOAT)
            else:
                v = _logits(x + x_at, at, ok, False, FLOAT)
            r += tl.exp(v - log_sum[:, None]) * sums[:, None]
            if PROBABILITIES or SMOOTH:
                at_t = t_row[:, None]
                if PROBABILITIES:
                    at_t = at_t + (j * t_k0_stride)[None, :]
                r -= _coefficients(target, weight, at_t, j, w_k0_stride, ok_k, ok, rest, share, PROBABILITIES, FLOAT)
        r = r * g[:, None]
        if not PROBABILITIES:  # a row that does not count has no gradient, whatever its logits hold
            r = tl.where(counted[:, None], r, 0.0)
        r = convert(r, dx.dtype.element_ty)
        if ALIGN > 1:
            if whole:
                tl.store(dx + d_at + to, r)
            else:
                tl.store(dx + d_at + to, r, mask=ok)
        else:
            tl.store(dx + d_at + to, r, mask=ok)


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


def _takes_whole_rows(problem: Problem) -> bool:
    """Whether backward has to know a sum over the row's targets."""
    smooth = problem.op.smoothing and "weight" in problem.tensors  # type: ignore[attr-defined]
    return bool(smooth) or not by_class(problem["target"])


class Tiled(TritonEngine):
    name = "cross_entropy.tiled"
    operations = ("cross_entropy_fwd", "cross_entropy_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "target" or not by_class(t):
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            for fulfilled, requirement, found in fits(_loops(problem)):
                r.require(fulfilled, requirement, found)
            tiles = min(self._grid(problem, config) for config in self.configs(problem)) if not r else 0
            r.require(tiles < 2**31, "fewer than 2^31 tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return tile_configs(_loops(problem), (4096, 2048, 8192), 4096)

    def _align(self, problem: Problem, config: Config) -> int:
        x, out = problem["x"], problem.tensors.get("dx", problem["x"])
        loops, aligned = _loops(problem), x.alignment == out.alignment == 16 and x.itemsize == out.itemsize
        if problem.op.name == "cross_entropy_fwd":
            return alignment(loops, config, x.itemsize, ["x"], aligned)
        return alignment(loops, config, x.itemsize, ["x", "dx"], aligned and not _takes_whole_rows(problem))

    def _grid(self, problem: Problem, config: Config) -> int:
        loops = _loops(problem)
        tiles = blocks(loops, config)
        if problem.op.name == "cross_entropy_fwd" or _takes_whole_rows(problem):
            return tiles
        return tiles * -(-(loops.length + self._align(problem, config) - 1) // config["BLOCK_K"])

    def _sums(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        """Partial sums, those of them that each program of a second kernel adds, and how many come of that."""
        partials = blocks(_loops(problem), config)
        each = -(-partials // FOLDED) if partials > PARTIALS else 0
        return partials, each, -(-partials // each) if each else 0

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.op.name == "cross_entropy_bwd" or problem.op.reduction == "none":  # type: ignore[attr-defined]
            return 0
        partials, _, folded = self._sums(problem, config)
        return 2 * (_padded(partials) + _padded(folded)) * 8

    def cost(self, problem: Problem, config: Config) -> float:
        loops = _loops(problem)
        efficiency = 0.85 * min(1.0, self._grid(problem, config) / problem.target.processors)
        launches = 1 + (self.workspace_size(problem, config) > 0)
        efficiency /= waste(loops, config) ** 0.5
        return roofline(problem, flops=0.0, memory_efficiency=efficiency, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        loops, op = _loops(problem), problem.op
        forward = op.name == "cross_entropy_fwd"
        real = "f64" if any(t.dtype == "f64" for _, t in problem.items) else "f32"
        reduction, smoothing = op.reduction, op.smoothing  # type: ignore[attr-defined]
        roles = {"x": "x", "t": "target", "s": "stats", "y": "y" if forward else "dy", "w": "weight"}
        args = arguments(loops, roles if forward else roles | {"d": "dx"})
        args |= {role: role for role in ("x", "target", "weight", "stats")}
        args |= {"rest": Real(1.0 - smoothing, real), "share": Real(smoothing / loops.length, real)}
        args["IGNORE"] = op.ignore_index  # type: ignore[attr-defined]
        constexprs = constants(loops, config, [t.span for _, t in problem.items]) | {
            "PROBABILITIES": not by_class(problem["target"]), "SMOOTH": smoothing > 0.0,
            "FROM_LOG": op.from_log, "FLOAT64": real == "f64",  # type: ignore[attr-defined]
            "ALIGN": self._align(problem, config),
        }  # fmt: skip
        grid, warps, stages = (self._grid(problem, config),), config["num_warps"], config["num_stages"]
        mean = Real(float(loops.rows), real) if reduction == "mean" else None
        if not forward:
            args |= {"dy": "dy", "total": "total", "dx": "dx", "rows": mean}
            constexprs["WHOLE"] = _takes_whole_rows(problem)
            return [Launch(cross_entropy_bwd, grid, args, constexprs, warps, stages)]
        partials, each, folded = self._sums(problem, config)
        weigh, single = "total" in problem.tensors, reduction == "none"
        first, second = Slice(0, real), Slice(_padded(partials) * 8, real)
        args |= {
            "y": "y" if single else None,
            "partial": None if single else first, "partial_weight": second if weigh else None,
        }  # fmt: skip
        found = [Launch(cross_entropy_fwd, grid, args, constexprs, warps, stages)]
        if single:
            return found
        if each:
            at = 2 * _padded(partials) * 8
            to, weight_to = Slice(at, real), Slice(at + _padded(folded) * 8, real)
            found.append(_addition(first, second if weigh else None, to, weight_to, partials, each, None))
            first, second, partials = to, weight_to, folded
        weights = second if weigh else None
        found.append(_addition(first, weights, "y", "total", partials, partials, mean))
        return found


def _padded(count: int) -> int:
    """So that what follows begins on 16 bytes."""
    return -(-count // 2) * 2


def _addition(
    partial: Slice, weights: Slice | None, y: Argument, total: Argument, count: int, each: int, rows: Real | None
) -> Launch:
    args: dict[str, Argument] = {
        "partial": partial, "partial_weight": weights, "y": y, "total": total if weights else None,
        "N": count, "EACH": each, "rows": rows,
    }  # fmt: skip
    block = min(1024, triton.next_power_of_2(each))
    return Launch(cross_entropy_sum, (-(-count // each),), args, {"BLOCK": block}, 4 if block > 128 else 1, 1)
