"""The reduction of a convolution with few channels, cut into runs: inputs one step apart that a pixel needs together.

A run is what one row of the filter reads. In channels-last images without dilation its columns and channels lie
together, S * C elements in a row; otherwise each channel has a run of its own, S elements, a column apart. A run is
padded to a power of two, and the reduction is (line, place in the run): where an element lies is then the sum of a
number that depends on its line and one that depends on its place, known by shifts, and whether it lies inside the
image is one comparison of each. Lines are (T, R), or (C, T, R) where each channel has its own.
"""

from __future__ import annotations

import dataclasses
import math

import triton
import triton.language as tl

from ...ops.convolution import Geometry
from .launch import Argument, Launch, Slice
from .tf32 import rounded


@triton.jit
def where_in_runs(
    index, x_c_stride, x_d_stride, x_h_stride, x_run_stride,
    T: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, RUN_STEP: tl.constexpr, PAD: tl.constexpr,
    LINES: tl.constexpr, DILATION_D: tl.constexpr, DILATION_H: tl.constexpr,
):  # fmt: skip
    """For places in the padded reduction: offset from a pixel's first input, steps along (D, H, run), whether real."""
    line = index // PAD
    place = index % PAD
    if LINES == R:  # one plane, and no quotient: one added to many offsets was lost by the assembler of CUDA 12.8
        r = line
        t = line * 0
        shift = r * (DILATION_H * x_h_stride) + place * x_run_stride
    else:
        r = line % R
        plane = line // R
        t = plane % T
        c = plane // T
        shift = c * x_c_stride + t * (DILATION_D * x_d_stride) + r * (DILATION_H * x_h_stride) + place * x_run_stride
    return shift, t * DILATION_D, r * DILATION_H, place * RUN_STEP, (place < RUN) & (line < LINES)


@triton.jit
def pack_runs(
    w, out, K, LINES, w_k_stride, w_c_stride, w_t_stride, w_r_stride, w_s_stride, out_k_stride, out_red_stride,
    T: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr, PAD: tl.constexpr,
    DEPTH: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The filter as a matrix (K, padded reduction), zeros in the padding."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = e // DEPTH
    index = e % DEPTH
    line = index // PAD
    place = index % PAD
    r = line % R
    plane = line // R
    t = plane % T
    c = plane // T + place % UNIT  # one of the two is 0
    from_ = k.to(tl.int64) * w_k_stride + c * w_c_stride + t * w_t_stride + r * w_r_stride
    from_ += (place // UNIT) * w_s_stride
    v = tl.load(w + from_, mask=(k < K) & (line < LINES) & (place < RUN), other=0.0)
    if ROUND:
        v = rounded(v)
    tl.store(out + k.to(tl.int64) * out_k_stride + index * out_red_stride, v, mask=k < K)


@dataclasses.dataclass(frozen=True)
class Runs:
    """How a problem's reduction is cut.

    `unit` is 1, or the number of channels where a run holds them all; a run's element i is ``i * step`` columns (times
    `unit`) and ``i * stride`` elements from the first. `block_k` is the reduction of one trip: whole runs.
    """

    lines: int
    run: int
    unit: int
    step: int
    stride: int
    block_k: int

    @classmethod
    def of(cls, g: Geometry, least: int) -> Runs:
        """The cut that wastes least, with trips of at least `least`."""
        c, rows = g.C // g.G, g.filter[0] * g.filter[1]
        plain = (c * rows, g.filter[2], 1, g.dilation[2], g.dilation[2] * g.x_strides[4])
        found = [plain]
        if g.G == 1 and g.dilation[2] == 1 and g.x_strides[1] == 1 and g.x_strides[4] == c > 1:
            found.insert(0, (rows, g.filter[2] * c, c, 1, 1))  # of two equals the one whose reads lie together
        cuts = [cls(*cut, max(least, 1 << (cut[1] - 1).bit_length())) for cut in found]
        return min(cuts, key=lambda cut: cut.depth)

    @property
    def pad(self) -> int:
        return 1 << (self.run - 1).bit_length()

    @property
    def depth(self) -> int:
        """The padded reduction: whole trips."""
        return -(-self.lines * self.pad // self.block_k) * self.block_k

    @property
    def constexprs(self) -> dict[str, int]:
        return {"RUN": self.run, "RUN_STEP": self.step, "PAD": self.pad, "LINES": self.lines}

    def pack(self, g: Geometry, to: Slice, inner_out: bool, rounding: bool) -> Launch:
        """The launch that packs the filter; `inner_out` puts the filters, not the reduction, side by side."""
        k, red = (1, g.K) if inner_out else (self.depth, 1)
        args: dict[str, Argument] = {
            "w": "w", "out": to, "K": g.K, "LINES": self.lines, "out_k_stride": k, "out_red_stride": red,
            **{f"w_{axis}_stride": stride for axis, stride in zip("kctrs", g.w_strides)},
        }  # fmt: skip
        constexprs = {
            "T": g.filter[0], "R": g.filter[1], "RUN": self.run, "UNIT": self.unit, "PAD": self.pad,
            "DEPTH": self.depth, "ROUND": rounding, "BLOCK": 512,
        }  # fmt: skip
        return Launch(pack_runs, (math.ceil(g.K * self.depth / 512),), args, constexprs, 4, 1)
