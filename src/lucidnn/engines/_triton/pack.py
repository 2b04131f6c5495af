"""Convolution operands laid out anew: channels last, reduction innermost, or pixels innermost, in the workspace.

What the matrix units can read decides speed: wgmma takes float32 operands from shared memory only where the
reduction is contiguous, and asynchronous copies need 16 aligned bytes to be cheap.  One pass over an operand
that arranges this costs its traffic once, while the product reads it many times.

* `pack_operands`: the source of a forward or data-gradient convolution as (N, D, H, W, group, channel), and the
  filter as rows along either of its channel axes. Rows are padded with zeros to 16 bytes or more.
* `pack_planes`: the operands of a filter gradient as (shift, channel, N, D, H, W), where W has the length of an
  output line.  Copy number s holds what filter column s meets: pixel ``q * stride - pad + s * dilation``, zeros
  outside. Filter rows and planes become plain offsets then, no copy has an edge, and all are 16-byte aligned.

Both kernels read along the axis that is contiguous in the operand and write along the one that is in the result, a
tile at a time, turned in shared memory by the compiler. Float32 is rounded to TF32 on request, which costs nothing
here. `pack_operands` takes source and filter in one launch: its first blocks the filter, the others the source.
"""

import dataclasses
import math
from collections.abc import Sequence

import triton
import triton.language as tl

from .index import INT32
from .launch import Argument, Launch
from .tf32 import rounded

SIZES = {"f32": 4, "f16": 2, "bf16": 2}


def padded(length: int, dtype: str) -> int:
    """`length` rounded up to whole 16 bytes.

    Examples
    --------
    >>> padded(3, "f32"), padded(3, "bf16"), padded(16, "bf16")
    (4, 8, 16)
    """
    unit = 16 // SIZES[dtype]
    return -(-length // unit) * unit


def is_aligned(strides: Sequence[int], sizes: Sequence[int], innermost: int, dtype: str, alignment: int) -> bool:
    """Whether one axis is contiguous and every 16 bytes along it are aligned, wherever the other indices are."""
    unit = 16 // SIZES[dtype]
    others = all(s % unit == 0 or n == 1 for i, (s, n) in enumerate(zip(strides, sizes)) if i != innermost)
    return strides[innermost] == 1 and sizes[innermost] % unit == 0 and alignment == 16 and others


def merged(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Axes joined with their right neighbour where one step of the left is a whole run of the right, for all
    operands; as many axes as before, those of length one in front. Gives sizes and each operand's strides.

    Examples
    --------
    >>> merged((4, 1, 5, 6), (30, 7, 6, 1)), merged((4, 5, 6), (60, 6, 1))
    (((1, 1, 1, 120), (0, 0, 0, 1)), ((1, 4, 30), (0, 60, 1)))
    >>> merged((4, 5, 6), (30, 6, 1), (60, 6, 1))
    ((1, 4, 30), (0, 30, 1), (0, 60, 1))
    """
    found: list[tuple[int, ...]] = []  # size and strides, from the right
    for size, *steps in zip(reversed(sizes), *map(reversed, strides)):
        if size == 1:
            continue
        if found and all(step == found[-1][0] * inner for step, inner in zip(steps, found[-1][1:])):
            found[-1] = (found[-1][0] * size, *found[-1][1:])
        else:
            found.append((size, *steps))
    found += [(1,) + (0,) * len(strides)] * (len(sizes) - len(found))
    return tuple(zip(*reversed(found)))


@triton.jit
def _pack_filter(
    pid, w, dst, OUTER, INNER, INNER_PADDED, w_group, w_outer, w_inner, w_t, w_r, w_s, dst_group, dst_outer, dst_tap,
    TAPS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAIR_TAPS: tl.constexpr, TURNED: tl.constexpr,
    ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One tile: (inner axis) x (taps, or the outer axis)."""
    blocks_i = tl.cdiv(INNER_PADDED, BLOCK_I)
    inner = (pid % blocks_i) * BLOCK_I + tl.arange(0, BLOCK_I)
    pid = pid // blocks_i
    if PAIR_TAPS:
        BLOCKS: tl.constexpr = (TAPS + BLOCK_P - 1) // BLOCK_P
        tap = (pid % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
        pid = pid // BLOCKS
        outer = pid % OUTER
        group = pid // OUTER
        ok = tap < TAPS
    else:
        blocks = tl.cdiv(OUTER, BLOCK_P)
        outer = (pid % blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
        pid = pid // blocks
        tap = pid % TAPS
        group = pid // TAPS
        ok = outer < OUTER
    if WIDE:
        inner = inner.to(tl.int64)
        outer = outer.to(tl.int64)
        tap = tap.to(tl.int64)
        group = group.to(tl.int64)
    from_pair = group * w_group + outer * w_outer
    if S == TAPS:  # the compiler sees that taps are contiguous where they are
        from_pair += tap * w_s
    else:
        line = tap // S
        from_pair += (line // R) * w_t + (line % R) * w_r + (tap % S) * w_s
    to_pair = group * dst_group + outer * dst_outer + tap * dst_tap
    if TURNED:  # neighbours in memory are neighbours along the pair axis
        places = w + (inner * w_inner)[:, None] + from_pair[None, :]
        v = tl.trans(tl.load(places, mask=(inner < INNER)[:, None] & ok[None, :], other=0.0))
    else:
        places = w + (inner * w_inner)[None, :] + from_pair[:, None]
        v = tl.load(places, mask=(inner < INNER)[None, :] & ok[:, None], other=0.0)
    if ROUND:
        v = rounded(v)
    tl.store(dst + to_pair[:, None] + inner[None, :], v, mask=ok[:, None] & (inner < INNER_PADDED)[None, :])


@triton.jit
def _pack_pixels(
    pid, src, dst, PIXELS, D, H, W, C, C_PADDED, GROUPS, n_stride, c_stride, d_stride, h_stride, w_stride,
    TURNED: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile: pixels x channels of a group."""
    blocks_c = tl.cdiv(C_PADDED, BLOCK_C)
    c = (pid % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    pid = pid // blocks_c
    group = pid % GROUPS
    pid = pid // GROUPS
    if WIDE:
        pid = pid.to(tl.int64)
        group = group.to(tl.int64)
        c = c.to(tl.int64)
    m = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    rest = m // W
    plane = rest // H
    image = plane // D
    pixel = image * n_stride + (plane % D) * d_stride + (rest % H) * h_stride + (m % W) * w_stride
    channel = (group * C + c) * c_stride
    if TURNED:
        places = src + channel[:, None] + pixel[None, :]
        v = tl.trans(tl.load(places, mask=(c < C)[:, None] & (m < PIXELS)[None, :], other=0.0))
    else:
        places = src + channel[None, :] + pixel[:, None]
        v = tl.load(places, mask=(c < C)[None, :] & (m < PIXELS)[:, None], other=0.0)
    if ROUND:
        v = rounded(v)
    places = dst + (m * (GROUPS * C_PADDED))[:, None] + (group * C_PADDED + c)[None, :]
    tl.store(places, v, mask=(m < PIXELS)[:, None] & (c < C_PADDED)[None, :])


@triton.jit
def pack_pixels(
    src, src_dst, PIXELS, D, H, W, C, C_PADDED, GROUPS, n_stride, c_stride, d_stride, h_stride, w_stride,
    SRC_TURNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _pack_pixels(
        tl.program_id(0), src, src_dst, PIXELS, D, H, W, C, C_PADDED, GROUPS,
        n_stride, c_stride, d_stride, h_stride, w_stride, SRC_TURNED, ROUND, WIDE, BLOCK_P, BLOCK_C,
    )  # fmt: skip


@triton.jit
def pack_operands(
    w, w_dst, OUTER, INNER, INNER_PADDED, w_group, w_outer, w_inner, w_t, w_r, w_s, dst_group, dst_outer, dst_tap,
    src, src_dst, PIXELS, D, H, W, C, C_PADDED, GROUPS, n_stride, c_stride, d_stride, h_stride, w_stride,
    FILTER_BLOCKS, TAPS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    PAIR_TAPS: tl.constexpr, FILTER_TURNED: tl.constexpr, FILTER_P: tl.constexpr, FILTER_I: tl.constexpr,
    SRC_TURNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if src is None:  # noqa: SIM114  (a compile-time and a run-time condition)
        _pack_filter(
            pid, w, w_dst, OUTER, INNER, INNER_PADDED, w_group, w_outer, w_inner, w_t, w_r, w_s,
            dst_group, dst_outer, dst_tap, TAPS, R, S, PAIR_TAPS, FILTER_TURNED, ROUND, WIDE, FILTER_P, FILTER_I,
        )  # fmt: skip
    elif pid < FILTER_BLOCKS:
        _pack_filter(
            pid, w, w_dst, OUTER, INNER, INNER_PADDED, w_group, w_outer, w_inner, w_t, w_r, w_s,
            dst_group, dst_outer, dst_tap, TAPS, R, S, PAIR_TAPS, FILTER_TURNED, ROUND, WIDE, FILTER_P, FILTER_I,
        )  # fmt: skip
    else:
        _pack_pixels(
            pid - FILTER_BLOCKS, src, src_dst, PIXELS, D, H, W, C, C_PADDED, GROUPS,
            n_stride, c_stride, d_stride, h_stride, w_stride, SRC_TURNED, ROUND, WIDE, BLOCK_P, BLOCK_C,
        )  # fmt: skip


@triton.jit
def pack_planes(
    src, dst, POINTS, D, H, W, W_USED, d_size, h_size, w_size, pad_d, pad_h, pad_w, CHANNELS, SHIFTS, STEP, SHIFT,
    n_stride, c_stride, d_stride, h_stride, w_stride,
    TURNED: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # copies vary fastest: they read the same lines of the source
    copy = tl.program_id(0) % SHIFTS
    pid = tl.program_id(0) // SHIFTS
    blocks_c = tl.cdiv(CHANNELS, BLOCK_C)
    c = (pid % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    pid = pid // blocks_c
    if WIDE:
        pid = pid.to(tl.int64)
        copy = copy.to(tl.int64)
        c = c.to(tl.int64)
    m = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    rest = m // W
    plane = rest // H
    image = plane // D
    q = m % W
    w = q * STEP + (copy * SHIFT - pad_w)
    h = rest % H - pad_h
    d = plane % D - pad_d
    inside = (w >= 0) & (w < w_size) & (h >= 0) & (h < h_size) & (d >= 0) & (d < d_size)
    inside = inside & (q < W_USED) & (m < POINTS)
    point = image * n_stride + d * d_stride + h * h_stride + w * w_stride
    if TURNED:
        places = src + (c * c_stride)[:, None] + point[None, :]
        v = tl.load(places, mask=(c < CHANNELS)[:, None] & inside[None, :], other=0.0)
    else:
        places = src + (c * c_stride)[None, :] + point[:, None]
        v = tl.trans(tl.load(places, mask=(c < CHANNELS)[None, :] & inside[:, None], other=0.0))
    if ROUND:
        v = rounded(v)
    places = dst + ((copy * CHANNELS + c) * POINTS)[:, None] + m[None, :]
    tl.store(places, v, mask=(c < CHANNELS)[:, None] & (m < POINTS)[None, :])


TILE = 2048  # elements


def _tile(long: int, short: int, most_short: int) -> tuple[int, int]:
    """Sizes of a tile along an axis of (usually) many and one of (usually) few elements: powers of two."""
    b = min(_power_of_two(short), most_short)
    return min(max(_power_of_two(long), 16), TILE // b), b


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Filter:
    """A filter packed into rows along one of its channel axes (`inner`), each tap's row `inner_padded` long.

    Strides of the operand and of the packed copy are (group, outer axis, inner axis, T, R, S); the copy's order is
    either (group, outer, taps, inner) or (group, taps, outer, inner).
    """

    groups: int
    outer: int
    inner: int
    inner_padded: int
    taps: tuple[int, int, int]
    strides: tuple[int, ...]
    taps_first: bool = False

    @property
    def elements(self) -> int:
        return self.groups * self.outer * math.prod(self.taps) * self.inner_padded

    @property
    def packed_strides(self) -> tuple[int, ...]:
        t, r, s = self.taps
        tap = self.inner_padded * (self.outer if self.taps_first else 1)
        outer = self.inner_padded * (1 if self.taps_first else t * r * s)
        return self.elements // self.groups, outer, 1, r * s * tap, s * tap, tap

    def pieces(self, source: Argument, to: Argument) -> tuple[dict[str, Argument], dict, int]:
        """Arguments, constexprs and blocks of `pack_operands`."""
        w_group, w_outer, w_inner, *w_taps = self.strides
        sizes, (w_t, w_r, w_s) = merged(self.taps, w_taps)
        taps = math.prod(sizes)
        pair_taps = taps > 1 and (w_inner == 1 or w_s <= w_outer)
        pair = taps if pair_taps else self.outer
        block_i, block_p = _tile(self.inner_padded, pair, 32)
        block_i = min(block_i, 64)
        group, outer, _, _, _, tap = self.packed_strides
        args: dict[str, Argument] = {
            "w": source, "w_dst": to, "OUTER": self.outer, "INNER": self.inner, "INNER_PADDED": self.inner_padded,
            "w_group": w_group, "w_outer": w_outer, "w_inner": w_inner, "w_t": w_t, "w_r": w_r, "w_s": w_s,
            "dst_group": group, "dst_outer": outer, "dst_tap": tap,
        }  # fmt: skip
        constexprs = {
            "TAPS": taps, "R": sizes[1], "S": sizes[2], "PAIR_TAPS": pair_taps,
            "FILTER_TURNED": (w_s if pair_taps else w_outer) < w_inner, "FILTER_P": block_p, "FILTER_I": block_i,
        }  # fmt: skip
        blocks = -(-self.inner_padded // block_i) * -(-pair // block_p) * self.groups
        return args, constexprs, blocks * (self.outer if pair_taps else taps)


@dataclasses.dataclass(frozen=True)
class Pixels:
    """A source packed channels last, each group's channels padded to `channels_padded`.

    `sizes` and `strides` are (N, channels of a group, D, H, W).
    """

    groups: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    channels_padded: int

    @property
    def elements(self) -> int:
        return self.sizes[0] * math.prod(self.sizes[2:]) * self.groups * self.channels_padded

    @property
    def packed_strides(self) -> tuple[int, ...]:
        _, _, d, h, w = self.sizes
        step = self.groups * self.channels_padded
        return d * h * w * step, 1, h * w * step, w * step, step

    def pieces(self, source: Argument, to: Argument) -> tuple[dict[str, Argument], dict, int]:
        """Arguments, constexprs and blocks of `pack_pixels`."""
        n, c, *space = self.sizes
        (_, d, h, w), strides = merged((n, *space), (self.strides[0], *self.strides[2:]))
        pixels = n * math.prod(space)
        block_p, block_c = _tile(pixels, self.channels_padded, 64)
        args: dict[str, Argument] = dict(
            src=source, src_dst=to, PIXELS=pixels, D=d, H=h, W=w, C=c, C_PADDED=self.channels_padded,
            GROUPS=self.groups, c_stride=self.strides[1],
            **{f"{axis}_stride": stride for axis, stride in zip("ndhw", strides)},
        )  # fmt: skip
        constexprs = {"SRC_TURNED": strides[3] < self.strides[1], "BLOCK_P": block_p, "BLOCK_C": block_c}
        return args, constexprs, -(-pixels // block_p) * -(-self.channels_padded // block_c) * self.groups

    def launch(self, source: Argument, to: Argument, span: int, rounding: bool) -> Launch:
        """The launch that packs it alone; the operand does not reach beyond `span`."""
        args, constexprs, blocks = self.pieces(source, to)
        constexprs |= {"ROUND": rounding, "WIDE": max(span, self.elements + TILE) > INT32}
        return Launch(pack_pixels, (blocks,), args, constexprs, 4, 1)


def pack(
    filters: Filter, w: Argument, w_to: Argument, pixels: Pixels | None, src: Argument, src_to: Argument,
    span: int, rounding: bool,
) -> Launch:  # fmt: skip
    """The launch that packs a filter and, where `pixels` is given, a source; no operand reaches beyond `span`."""
    args, constexprs, filter_blocks = filters.pieces(w, w_to)
    span = max(span, filters.elements)
    blocks = 0
    if pixels:
        more, knobs, blocks = pixels.pieces(src, src_to)
        span = max(span, pixels.elements + TILE)
    else:
        more, knobs = dict.fromkeys(pack_pixels.arg_names[:14]), dict.fromkeys(pack_pixels.arg_names[14:17], 1)
    args |= {**more, "FILTER_BLOCKS": filter_blocks}
    constexprs |= {**knobs, "ROUND": rounding, "WIDE": span > INT32}
    return Launch(pack_operands, (filter_blocks + blocks,), args, constexprs, 4, 1)


@dataclasses.dataclass(frozen=True)
class Planes:
    """A filter gradient's operand packed pixels innermost: one copy a shift, in each one plane a channel.

    `sizes` and `strides` are the operand's (N, channels, D, H, W); a copy's points are (N, *space), with zeros where
    its W passes `used` or a point lies outside. Point (d, h, q) of copy s is (d - pad, h - pad, q * step + s * shift -
    pad) of the operand.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    space: tuple[int, int, int]
    used: int
    pad: tuple[int, int, int] = (0, 0, 0)
    shifts: int = 1
    step: int = 1
    shift: int = 0

    @property
    def points(self) -> int:
        return self.sizes[0] * math.prod(self.space)

    @property
    def elements(self) -> int:
        return self.shifts * self.sizes[1] * self.points

    def launch(self, source: Argument, to: Argument, span: int, rounding: bool) -> Launch:
        block_p, block_c = _tile(self.points, self.sizes[1], 32)
        args: dict[str, Argument] = dict(
            src=source, dst=to, POINTS=self.points, W_USED=self.used, CHANNELS=self.sizes[1],
            SHIFTS=self.shifts, STEP=self.step, SHIFT=self.shift, **dict(zip("DHW", self.space)),
            **{f"{axis}_size": n for axis, n in zip("dhw", self.sizes[2:])},
            **{f"pad_{axis}": n for axis, n in zip("dhw", self.pad)},
            **{f"{axis}_stride": n for axis, n in zip("ncdhw", self.strides)},
        )  # fmt: skip
        constexprs = {
            "TURNED": self.strides[4] < self.strides[1], "ROUND": rounding, "BLOCK_P": block_p, "BLOCK_C": block_c,
            "WIDE": max(span, self.elements + TILE) > INT32,
        }  # fmt: skip
        blocks = -(-self.points // block_p) * -(-self.sizes[1] // block_c) * self.shifts
        return Launch(pack_planes, (blocks,), args, constexprs, 4, 1)
