"""Kernels of ``norm.split_triton``: normalization in passes over **columns** and **steps**.

A column is a channel (groups: `EACH` columns a set) or a set of its own (layer and RMS normalization); its elements are
the steps. Tiles are columns by steps, whichever of them lies along memory innermost. Partial results of a column have
the place ``(outer * CHUNKS + chunk) * COLUMNS + column``; a chunk is `PER` steps. Scales and biases go along the
columns (`BY_STEP` false) or along the steps.
"""

import triton
import triton.language as tl

from .epilogue import activate, activate_grad, convert
from .index import columns as along
from .index import rows as across
from .normalization import inner_places, outer_places, shift_of, steps


@triton.jit
def _start(
    COLUMNS, O0, O1, OUTER: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS,
    BACKWARDS: tl.constexpr = False,
):  # fmt: skip
    """Which columns, which chunk, and the indices of the outer loops.

    `BACKWARDS` from the end: what the pass before read last may still be in the second-level cache.
    """
    blocks = tl.cdiv(COLUMNS, BLOCK_C)
    pid = tl.program_id(0)
    if BACKWARDS:
        pid = tl.num_programs(0) - 1 - pid
    block = pid % blocks
    rest = pid // blocks
    chunk = rest % CHUNKS
    outer = rest // CHUNKS
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDE:
        c = c.to(tl.int64)
        outer = outer.to(tl.int64)
    i0, i1, i2 = outer_places(outer, O0, O1, OUTER)
    return c, chunk, outer, i0, i1, i2


@triton.jit
def norm_split_statistics(
    x, means, squares, COLUMNS, STEPS, CHUNKS, TRIPS, EACH, O0, O1, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    OUTER: tl.constexpr, INNER: tl.constexpr, CENTERED: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared distances of a chunk of each column, by Welford's update in every element of the tile.

    Means are without the `shift_of` the column's set.
    """
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if TURNED else 1  # of the steps
    c, chunk, outer, i0, i1, i2 = _start(COLUMNS, O0, O1, OUTER, WIDE, BLOCK_C, CHUNKS)
    lane = tl.arange(0, BLOCK_S)
    first = chunk * TRIPS * BLOCK_S
    trips = tl.minimum(TRIPS, tl.cdiv(STEPS - first, BLOCK_S))
    in_c = across(c < COLUMNS, TURNED)
    xs = x + steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + across(c * x_c_stride, TURNED)
    m = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    q = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    one = tl.full((), 1.0, dtype=FLOAT)
    if CENTERED:
        first_x = steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + c // EACH * EACH * x_c_stride
        shift = across(shift_of(convert(tl.load(x + first_x, mask=c < COLUMNS, other=0.0), FLOAT)), TURNED)
    for trip in tl.range(0, trips, num_stages=STAGES):
        s = first + trip * BLOCK_S + lane
        k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
        at = steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER)
        ok = in_c & along(s < STEPS, TURNED)
        v = convert(tl.load(xs + along(at, TURNED), mask=ok, other=0.0), FLOAT)
        if CENTERED:
            v = v - shift
            d = tl.where(ok, v - m, 0.0)
            m += d * (one / (trip + 1))
            q += d * (v - m)
        else:
            q += v * v
    place = (outer.to(tl.int64) * CHUNKS + chunk) * COLUMNS + c
    if CENTERED:
        last = tl.minimum(STEPS, first + trips * BLOCK_S)
        seen = along(tl.cdiv(tl.maximum(last - first - lane, 0), BLOCK_S).to(FLOAT), TURNED)
        center = tl.sum(m * seen, axis=AXIS) / (last - first).to(FLOAT)
        d = m - across(center, TURNED)
        q += seen * d * d
        tl.store(means + place, center, mask=c < COLUMNS)
    tl.store(squares + place, tl.sum(q, axis=AXIS), mask=c < COLUMNS)


@triton.jit
def norm_split_finish(
    x, means, squares, mean, inverse, epsilon, COLUMNS, STEPS, CHUNKS, PER, SETS, EACH, O0, O1,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride,
    m_0_stride, m_1_stride, m_2_stride, m_c_stride, v_0_stride, v_1_stride, v_2_stride, v_c_stride,
    OUTER: tl.constexpr, CENTERED: tl.constexpr, WIDE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of some sets from those of their columns' chunks (Chan, Golub, LeVeque)."""
    FLOAT: tl.constexpr = squares.dtype.element_ty
    g, _, outer, i0, i1, i2 = _start(SETS, O0, O1, OUTER, WIDE, BLOCK_G, 1)
    base = outer.to(tl.int64) * CHUNKS * COLUMNS
    in_g = (g < SETS)[:, None]
    center = tl.zeros((BLOCK_G,), dtype=FLOAT)
    if CENTERED:
        acc = tl.zeros((BLOCK_G, BLOCK), dtype=FLOAT)
        for first in range(0, CHUNKS * EACH, BLOCK):
            e = first + tl.arange(0, BLOCK)
            j = e // EACH
            ok = in_g & (e < CHUNKS * EACH)[None, :]
            n = tl.minimum(PER, STEPS - j * PER).to(FLOAT)
            place = base + (j * COLUMNS + (e - j * EACH))[None, :] + (g * EACH)[:, None]
            acc += n[None, :] * tl.load(means + place, mask=ok, other=0.0)
        center = tl.sum(acc, axis=1) / EACH / STEPS
        at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER) + g * m_c_stride
        first_x = steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + g * EACH * x_c_stride
        shift = shift_of(convert(tl.load(x + first_x, mask=g < SETS, other=0.0), FLOAT))
        tl.store(mean + at, center + shift, mask=g < SETS)
    total = tl.zeros((BLOCK_G, BLOCK), dtype=FLOAT)
    for first in range(0, CHUNKS * EACH, BLOCK):
        e = first + tl.arange(0, BLOCK)
        j = e // EACH
        ok = in_g & (e < CHUNKS * EACH)[None, :]
        place = base + (j * COLUMNS + (e - j * EACH))[None, :] + (g * EACH)[:, None]
        total += tl.load(squares + place, mask=ok, other=0.0)
        if CENTERED:
            n = tl.minimum(PER, STEPS - j * PER).to(FLOAT)
            d = tl.where(ok, tl.load(means + place, mask=ok, other=0.0) - center[:, None], 0.0)
            total += n[None, :] * d * d
    factor = 1.0 / tl.sqrt(tl.sum(total, axis=1) / EACH / STEPS + epsilon)
    at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER) + g * v_c_stride
    tl.store(inverse + at, factor, mask=g < SETS)


@triton.jit
def norm_split_fwd(
    x, y, scale, bias, mean, inverse, parameter, COLUMNS, STEPS, CHUNKS, EACH, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    y_0_stride, y_1_stride, y_2_stride, y_c_stride, y_k0_stride, y_k1_stride, y_k2_stride,
    m_0_stride, m_1_stride, m_2_stride, m_c_stride, v_0_stride, v_1_stride, v_2_stride, v_c_stride, p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, BY_STEP: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Scale, shift and activation, a tile a block."""
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c, chunk, outer, i0, i1, i2 = _start(COLUMNS, O0, O1, OUTER, WIDE, BLOCK_C, CHUNKS, True)
    s = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    in_c = c < COLUMNS
    k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    ok = across(in_c, TURNED) & along(s < STEPS, TURNED)
    at = across(steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + c * x_c_stride, TURNED)
    at += along(steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER), TURNED)
    v = convert(tl.load(x + at, mask=ok, other=0.0), FLOAT)
    at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER) + c // EACH * v_c_stride
    factor = tl.load(inverse + at, mask=in_c, other=0.0)
    if mean is not None:
        at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER) + c // EACH * m_c_stride
        v = v - across(tl.load(mean + at, mask=in_c, other=0.0), TURNED)
    q = steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
    if scale is not None:
        if BY_STEP:
            v = v * along(convert(tl.load(scale + q, mask=s < STEPS, other=0.0), FLOAT), TURNED)
        else:
            factor = factor * convert(tl.load(scale + c, mask=in_c, other=0.0), FLOAT)
    v = v * across(factor, TURNED)
    if bias is not None:
        if BY_STEP:
            v = v + along(convert(tl.load(bias + q, mask=s < STEPS, other=0.0), FLOAT), TURNED)
        else:
            v = v + across(convert(tl.load(bias + c, mask=in_c, other=0.0), FLOAT), TURNED)
    v = convert(activate(v, ACT, parameter), y.dtype.element_ty)
    at = across(steps(i0, i1, i2, y_0_stride, y_1_stride, y_2_stride, OUTER) + c * y_c_stride, TURNED)
    at += along(steps(k0, k1, k2, y_k0_stride, y_k1_stride, y_k2_stride, INNER), TURNED)
    tl.store(y + at, v, mask=ok)


@triton.jit
def _pair(xs, dys, x_at, dy_at, ok, center, factor, a, b, parameter, ACT: tl.constexpr, FLOAT: tl.constexpr):
    """The normalized x and the gradient of what the activation was given; both 0 outside."""
    v = convert(tl.load(xs + x_at, mask=ok, other=0.0), FLOAT)
    g = convert(tl.load(dys + dy_at, mask=ok, other=0.0), FLOAT)
    if center is not None:
        v = v - center
    v = tl.where(ok, v * factor, 0.0)
    if ACT != 0:
        u = v
        if a is not None:
            u = u * a
        if b is not None:
            u = u + b
        g = tl.where(ok, activate_grad(u, g, ACT, parameter), 0.0)
    return v, g


@triton.jit
def norm_split_sums(
    x, dy, scale, bias, mean, inverse, plain, against, parameter, COLUMNS, STEPS, CHUNKS, TRIPS, EACH, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    dy_0_stride, dy_1_stride, dy_2_stride, dy_c_stride, dy_k0_stride, dy_k1_stride, dy_k2_stride,
    m_0_stride, m_1_stride, m_2_stride, m_c_stride, v_0_stride, v_1_stride, v_2_stride, v_c_stride, p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, BY_STEP: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of g and g times the normalized x over a chunk of each column; times scale where that goes by step."""
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if TURNED else 1
    c, chunk, outer, i0, i1, i2 = _start(COLUMNS, O0, O1, OUTER, WIDE, BLOCK_C, CHUNKS)
    lane = tl.arange(0, BLOCK_S)
    first = chunk * TRIPS * BLOCK_S
    trips = tl.minimum(TRIPS, tl.cdiv(STEPS - first, BLOCK_S))
    in_c = c < COLUMNS
    xs = across(steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + c * x_c_stride, TURNED)
    dys = across(steps(i0, i1, i2, dy_0_stride, dy_1_stride, dy_2_stride, OUTER) + c * dy_c_stride, TURNED)
    at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER) + c // EACH * v_c_stride
    factor = across(tl.load(inverse + at, mask=in_c, other=0.0), TURNED)
    center = None
    if mean is not None:
        at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER) + c // EACH * m_c_stride
        center = across(tl.load(mean + at, mask=in_c, other=0.0), TURNED)
    a = None
    b = None
    if ACT != 0:  # groups only: parameters go along the columns
        if scale is not None:
            a = across(convert(tl.load(scale + c, mask=in_c, other=0.0), FLOAT), TURNED)
        if bias is not None:
            b = across(convert(tl.load(bias + c, mask=in_c, other=0.0), FLOAT), TURNED)
    s1 = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    s2 = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    for trip in tl.range(0, trips, num_stages=STAGES):
        s = first + trip * BLOCK_S + lane
        k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
        x_at = xs + along(steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER), TURNED)
        dy_at = dys + along(steps(k0, k1, k2, dy_k0_stride, dy_k1_stride, dy_k2_stride, INNER), TURNED)
        ok = across(in_c, TURNED) & along(s < STEPS, TURNED)
        v, g = _pair(x, dy, x_at, dy_at, ok, center, factor, a, b, parameter, ACT, FLOAT)
        if BY_STEP:
            if scale is not None:
                q = steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
                g = g * along(convert(tl.load(scale + q, mask=s < STEPS, other=0.0), FLOAT), TURNED)
        s1 += g
        s2 += g * v
    place = (outer.to(tl.int64) * CHUNKS + chunk) * COLUMNS + c
    tl.store(plain + place, tl.sum(s1, axis=AXIS), mask=in_c)
    tl.store(against + place, tl.sum(s2, axis=AXIS), mask=in_c)


@triton.jit
def norm_split_totals(
    plain, against, scale, c1, c2, COLUMNS, STEPS, CHUNKS, SETS, EACH,
    BY_STEP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Means over each set of s g and of s g times the normalized x."""
    FLOAT: tl.constexpr = plain.dtype.element_ty
    g, _, outer, _, _, _ = _start(SETS, 1, 1, 1, False, BLOCK_G, 1)
    base = outer.to(tl.int64) * CHUNKS * COLUMNS
    s1 = tl.zeros((BLOCK_G, BLOCK), dtype=FLOAT)
    s2 = tl.zeros((BLOCK_G, BLOCK), dtype=FLOAT)
    for first in range(0, CHUNKS * EACH, BLOCK):
        e = first + tl.arange(0, BLOCK)
        j = e // EACH
        ok = (g < SETS)[:, None] & (e < CHUNKS * EACH)[None, :]
        column = (e - j * EACH)[None, :] + (g * EACH)[:, None]
        at = base + (j * COLUMNS)[None, :] + column
        u = tl.load(plain + at, mask=ok, other=0.0)
        w = tl.load(against + at, mask=ok, other=0.0)
        if not BY_STEP:
            if scale is not None:
                a = convert(tl.load(scale + column, mask=ok, other=0.0), FLOAT)
                u = u * a
                w = w * a
        s1 += u
        s2 += w
    at = outer.to(tl.int64) * SETS + g
    tl.store(c1 + at, tl.sum(s1, axis=1) / EACH / STEPS, mask=g < SETS)
    tl.store(c2 + at, tl.sum(s2, axis=1) / EACH / STEPS, mask=g < SETS)


@triton.jit
def norm_split_bwd(
    x, dy, dx, scale, bias, mean, inverse, c1, c2, parameter, COLUMNS, STEPS, CHUNKS, SETS, EACH, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    dy_0_stride, dy_1_stride, dy_2_stride, dy_c_stride, dy_k0_stride, dy_k1_stride, dy_k2_stride,
    y_0_stride, y_1_stride, y_2_stride, y_c_stride, y_k0_stride, y_k1_stride, y_k2_stride,
    m_0_stride, m_1_stride, m_2_stride, m_c_stride, v_0_stride, v_1_stride, v_2_stride, v_c_stride, p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, BY_STEP: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradient of x, a tile a block."""
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    c, chunk, outer, i0, i1, i2 = _start(COLUMNS, O0, O1, OUTER, WIDE, BLOCK_C, CHUNKS, True)
    s = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    in_c = c < COLUMNS
    k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    ok = across(in_c, TURNED) & along(s < STEPS, TURNED)
    at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER) + c // EACH * v_c_stride
    factor = across(tl.load(inverse + at, mask=in_c, other=0.0), TURNED)
    center = None
    if mean is not None:
        at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER) + c // EACH * m_c_stride
        center = across(tl.load(mean + at, mask=in_c, other=0.0), TURNED)
    a = None
    b = None
    if scale is not None:
        if BY_STEP:
            q = steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
            a = along(convert(tl.load(scale + q, mask=s < STEPS, other=0.0), FLOAT), TURNED)
        else:
            a = across(convert(tl.load(scale + c, mask=in_c, other=0.0), FLOAT), TURNED)
    if bias is not None:
        b = across(convert(tl.load(bias + c, mask=in_c, other=0.0), FLOAT), TURNED)
    x_at = across(steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + c * x_c_stride, TURNED)
    x_at += along(steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER), TURNED)
    dy_at = across(steps(i0, i1, i2, dy_0_stride, dy_1_stride, dy_2_stride, OUTER) + c * dy_c_stride, TURNED)
    dy_at += along(steps(k0, k1, k2, dy_k0_stride, dy_k1_stride, dy_k2_stride, INNER), TURNED)
    v, g = _pair(x, dy, x_at, dy_at, ok, center, factor, a, b, parameter, ACT, FLOAT)
    if scale is not None:
        g = g * a
    place = outer.to(tl.int64) * SETS + c // EACH
    r = g - v * across(tl.load(c2 + place, mask=in_c, other=0.0), TURNED)
    if mean is not None:
        r = r - across(tl.load(c1 + place, mask=in_c, other=0.0), TURNED)
    r = convert(r * factor, dx.dtype.element_ty)
    at = across(steps(i0, i1, i2, y_0_stride, y_1_stride, y_2_stride, OUTER) + c * y_c_stride, TURNED)
    at += along(steps(k0, k1, k2, y_k0_stride, y_k1_stride, y_k2_stride, INNER), TURNED)
    tl.store(dx + at, r, mask=ok)


@triton.jit
def norm_split_along(
    x, dy, mean, inverse, sums, COLUMNS, STEPS, UNITS, TRIPS, PARTS, COUNT, O0, O1,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, x_c_stride, x_k0_stride, x_k1_stride, x_k2_stride,
    dy_0_stride, dy_1_stride, dy_2_stride, dy_c_stride, dy_k0_stride, dy_k1_stride, dy_k2_stride,
    m_0_stride, m_1_stride, m_2_stride, m_c_stride, v_0_stride, v_1_stride, v_2_stride, v_c_stride, p_k0, p_k1, p_k2,
    OUTER: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Partial dscale and dbias where parameters go along the steps: some steps of some blocks of sets."""
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(STEPS, BLOCK_S)
    s = (tl.program_id(0) % blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    part = tl.program_id(0) // blocks
    in_s = s < STEPS
    k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    x_in = along(steps(k0, k1, k2, x_k0_stride, x_k1_stride, x_k2_stride, INNER), TURNED)
    dy_in = along(steps(k0, k1, k2, dy_k0_stride, dy_k1_stride, dy_k2_stride, INNER), TURNED)
    dscale = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    dbias = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
    blocks_c = tl.cdiv(COLUMNS, BLOCK_C)
    for trip in range(tl.minimum(TRIPS, UNITS - part * TRIPS)):
        unit = part * TRIPS + trip
        outer = unit // blocks_c
        c = (unit % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
        if WIDE:
            outer = outer.to(tl.int64)
            c = c.to(tl.int64)
        i0, i1, i2 = outer_places(outer, O0, O1, OUTER)
        in_c = c < COLUMNS
        ok = across(in_c, TURNED) & along(in_s, TURNED)
        at = steps(i0, i1, i2, v_0_stride, v_1_stride, v_2_stride, OUTER) + c * v_c_stride
        factor = across(tl.load(inverse + at, mask=in_c, other=0.0), TURNED)
        center = None
        if mean is not None:
            at = steps(i0, i1, i2, m_0_stride, m_1_stride, m_2_stride, OUTER) + c * m_c_stride
            center = across(tl.load(mean + at, mask=in_c, other=0.0), TURNED)
        x_at = across(steps(i0, i1, i2, x_0_stride, x_1_stride, x_2_stride, OUTER) + c * x_c_stride, TURNED) + x_in
        dy_at = across(steps(i0, i1, i2, dy_0_stride, dy_1_stride, dy_2_stride, OUTER) + c * dy_c_stride, TURNED)
        v, g = _pair(x, dy, x_at, dy_at + dy_in, ok, center, factor, None, None, None, 0, FLOAT)
        dscale += g * v
        dbias += g
    AXIS: tl.constexpr = 1 if TURNED else 0  # of the columns
    at = part.to(tl.int64) * COUNT + steps(k0, k1, k2, p_k0, p_k1, p_k2, INNER)
    tl.store(sums + at, tl.sum(dscale, axis=AXIS), mask=in_s)
    tl.store(sums + (at + PARTS * COUNT), tl.sum(dbias, axis=AXIS), mask=in_s)
