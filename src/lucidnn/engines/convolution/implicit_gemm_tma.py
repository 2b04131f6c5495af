"""``conv.implicit_gemm_tma``: forward and data gradient as one matrix product, operands copied by the bulk copy engine.

Method: implicit GEMM on NVIDIA GPUs of architecture 9.0 and 10.0. A tile is a box of images x rows x columns of result
pixels; for every filter tap the same box, shifted, is copied out of the source by one instruction through a tensor
descriptor, and what lies outside the image arrives as zeros: no index arithmetic, no masks, no address registers. The
filters are a matrix of (result channel, taps x channels), read the same way. Blocks stay and go from tile to tile, so
that each makes its descriptors once. The product is (filters) x (pixels): Triton reads a reshaped right operand from
shared memory, but sends a left one through registers, which is slow and, in Triton 3.6, was seen to go wrong.

16-bit sources that are channels last and aligned are read in place, others are packed so first, as is float32, which
has to be rounded to TF32; filters likewise (also where the channels do not fill whole steps, with zeros). A stride of 2
forward reads a source of even size as (.., H / 2, 2, W / 2, 2 C). A 1x1 filter sees all images as one row of pixels.

Cost: the operations of the definition plus what partly filled boxes waste. Workspace: packed operands, and 256 bytes a
block for descriptors. Limits: one group, up to two spatial axes, no stride in the data gradient.
"""

import dataclasses
import functools
import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import five_strides
from .._triton.conv_gather import View
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from .._triton.pack import SIZES, Filter, Pixels, is_aligned, pack, padded
from .._triton.result import places, store_pixels
from .._triton.tiles import Gemm, seconds, start


@triton.jit
def conv_tma(
    src, w, bias, z, dst, alpha, beta, parameter,
    N, SRC_H, SRC_W, RED, OUT, P, Q, TILES, BLOCKS, origin_h, origin_w, w_columns,
    src_n_stride, src_h_stride, src_w_stride, bias_stride,
    z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    R: tl.constexpr, S: tl.constexpr, JUMP_H: tl.constexpr, JUMP_W: tl.constexpr, HALVED: tl.constexpr,
    HAS_D: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BOX_N: tl.constexpr, BOX_H: tl.constexpr, BOX_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = BOX_N * BOX_H * BOX_W
    if HALVED:  # a stride of 2: neighbours of the same parity lie together
        pixels = tl.make_tensor_descriptor(
            src, [N, SRC_H // 2, 2, SRC_W // 2, 2 * RED],
            [src_n_stride, 2 * src_h_stride, src_h_stride, 2 * src_w_stride, 1], [BOX_N, BOX_H, 1, BOX_W, BLOCK_K],
        )  # fmt: skip
    else:
        pixels = tl.make_tensor_descriptor(
            src, [N, SRC_H, SRC_W, RED], [src_n_stride, src_h_stride, src_w_stride, 1], [BOX_N, BOX_H, BOX_W, BLOCK_K]
        )
    filters = tl.make_tensor_descriptor(w, [OUT, w_columns], [w_columns, 1], [BLOCK_N, BLOCK_K])
    across = tl.cdiv(OUT, BLOCK_N)
    columns = tl.cdiv(Q, BOX_W)
    lines = tl.cdiv(P, BOX_H)
    channels: tl.constexpr = BLOCK_K
    steps = tl.cdiv(RED, channels)
    for tile in tl.range(tl.program_id(0), TILES, BLOCKS, flatten=True):
        k0 = (tile % across) * BLOCK_N
        rest = tile // across
        q0 = (rest % columns) * BOX_W
        rest = rest // columns
        p0 = (rest % lines) * BOX_H
        n0 = (rest // lines) * BOX_N
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        # max(.., 1): a loop that might not run makes Triton 3.6 have every wgmma serialised
        for trip in range(tl.maximum(R * S * steps, 1)):
            tap = trip // steps
            c = (trip - tap * steps) * BLOCK_K
            h = origin_h + (tap // S) * JUMP_H
            v = origin_w + (tap % S) * JUMP_W
            if HALVED:
                a = pixels.load([n0, p0 + (h >> 1), h & 1, q0 + (v >> 1), (v & 1) * RED + c])
            else:
                a = pixels.load([n0, p0 + h, q0 + v, c])
            b = filters.load([k0, tap * (steps * BLOCK_K) + c])
            acc = tl.dot(b, a.reshape(BLOCK_M, BLOCK_K).T, acc, input_precision=PRECISION)
        m = tl.arange(0, BLOCK_M)
        n = n0 + m // (BOX_H * BOX_W)
        p = p0 + m // BOX_W % BOX_H
        q = q0 + m % BOX_W
        ok = (n < N) & (p < P) & (q < Q)
        k = k0 + tl.arange(0, BLOCK_N)
        if WIDE:
            n = n.to(tl.int64)
            p = p.to(tl.int64)
            q = q.to(tl.int64)
            k = k.to(tl.int64)
        store_pixels(
            acc.T, z, bias, dst, alpha, beta, parameter, n, 0, p, q, ok, k, k < OUT, bias_stride,
            z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
            dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
        )  # fmt: skip


# (pixels, filters, warps, stages)
_TILES = ((256, 128, 8, 4), (128, 128, 8, 4), (128, 128, 4, 3), (256, 64, 4, 4), (128, 64, 4, 4), (64, 64, 4, 4))
DESCRIPTORS = 2 * 128  # bytes of each block's two


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A problem as the product sees it: sizes, and operands where they lie after packing."""

    view: View
    images: int
    src_size: tuple[int, int]
    out_size: tuple[int, int]  # of the results
    src_strides: tuple[int, int, int]  # N, H, W
    red: int  # channels of the source, as packed
    pixels: Pixels | None
    filters: Filter | None
    step: int  # channels of a trip

    @classmethod
    def of(cls, problem: Problem) -> "_Shape":
        return _shape(problem)

    @property
    def halved(self) -> bool:
        return self.view.geometry.stride != (1, 1, 1)

    @property
    def rounding(self) -> bool:
        return self.view.dtype == "f32"

    @property
    def filters_at(self) -> int:
        return -(-self.pixels.elements * SIZES[self.view.dtype] // 16) * 16 if self.pixels else 0

    @property
    def descriptors_at(self) -> int:
        size = self.filters.elements * SIZES[self.view.dtype] if self.filters else 0
        return self.filters_at + -(-size // 16) * 16

    def box(self, pixels: int) -> tuple[int, int, int]:
        """Images, rows and columns of a tile of so many pixels: the fewest tiles, then the longest rows."""
        return _box(self.images, *self.out_size, pixels)

    def tiles(self, config: Config) -> int:
        n, h, w = self.box(config["BLOCK_M"])
        boxes = -(-self.images // n) * -(-self.out_size[0] // h) * -(-self.out_size[1] // w)
        return boxes * -(-self.view.out // config["BLOCK_N"])


@functools.lru_cache(maxsize=256)
def _shape(problem: Problem) -> _Shape:
    v = View.of(problem)
    g, source = v.geometry, problem.items[0][1]
    step = 128 // SIZES[v.dtype]
    sizes = (g.N, v.red, *v.src_size)
    rounding, halved = v.dtype == "f32", g.stride != (1, 1, 1)
    ready = is_aligned(v.src_strides, sizes, 1, v.dtype, source.alignment)
    ready = ready and all(s > 0 or n == 1 for s, n in zip(v.src_strides, sizes))
    pixels, strides, red = None, v.src_strides, v.red
    if rounding or not ready:
        red = -(-v.red // step) * step if halved else padded(v.red, v.dtype)
        pixels = Pixels(1, sizes, v.src_strides, red)
        strides = pixels.packed_strides
    _, out, inner, t, r, s = v.w_strides
    columns = v.taps * red
    wanted = ((v.out, out, columns), (g.filter[1], r, g.filter[2] * red), (g.filter[2], s, red))
    dense = inner == 1 and all(size == 1 or have == want for size, have, want in wanted)
    dense = dense and red % step == 0 and red == v.red
    filters = None
    if rounding or not dense or problem["w"].alignment < 16:
        filters = Filter(1, v.out, v.red, -(-v.red // step) * step, g.filter, (0, out, inner, t, r, s))
    # an axis of one point has any stride; a descriptor wants a whole number of 16 bytes
    n_step, h_step, w_step = (
        step if size == 1 else stride for size, stride in zip((g.N, *v.src_size[1:]), (strides[0], *strides[3:]))
    )
    images, src, out_size = g.N, v.src_size[1:], v.dst_size[1:]
    plain = v.taps == 1 and not halved and src == out_size and g.pad == (0, 0, 0)
    results = [five_strides(problem[role]) for role in ("z", *problem.outputs) if role in problem.tensors]
    steps = [(n_step, h_step, w_step), *((t[0], *t[3:]) for t in results)]
    joined = all(_is_row(some, (images, *src)) for some in steps)
    if plain and joined and images * math.prod(src) <= INT32 >> 1:
        src = out_size = (1, images * math.prod(src))
        images = 1
    return _Shape(v, images, src, out_size, (n_step, h_step, w_step), red, pixels, filters, step)


def _is_row(strides: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all points, image by image and line by line, are one row whose step is the last axis'."""
    step, points = strides[2], 1
    for stride, size in zip(reversed(strides), reversed(sizes)):
        if size > 1 and stride != points * step:
            return False
        points *= size
    return True


@functools.lru_cache(maxsize=1024)
def _box(images: int, height: int, width: int, pixels: int) -> tuple[int, int, int]:
    sizes = [1 << i for i in range(9)]
    found = [(pixels // (h * w), h, w) for w in sizes for h in sizes if h * w <= pixels and pixels // (h * w) <= 256]
    return min(found, key=lambda b: (-(-images // b[0]) * -(-height // b[1]) * -(-width // b[2]), -b[2], -b[1]))


def _shared(problem: Problem, pixels: int, filters: int) -> tuple[int, int]:
    """Bytes of shared memory: of a stage of the loop, and of the tile of results on its way to the order of the store.

    The loop runs on into the next tile, so the two lie side by side. Where pixels are neighbours the compiler turns
    the whole tile of 4-byte results at once, half of one of 2 bytes; else a few rows of it.
    """
    out = problem[problem.outputs[0]]
    last = all(problem[role].strides[1] == 1 for role in (*problem.outputs, "z") if role in problem.tensors)
    share = 8 if last else 1 if out.itemsize >= 4 else 2
    return (pixels + filters) * 128, pixels * filters * out.itemsize // share


class ImplicitGemmTma(TritonEngine):
    """Forward and data gradient."""

    name = "conv.implicit_gemm_tma"
    operations = ("conv_fprop", "conv_dgrad")
    targets = ("cuda",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        role, source = problem.items[0]
        r.require(problem.target.capability // 10 in (9, 10), "a GPU of architecture 9 or 10", problem.target.arch)
        r.require(source.dtype in SIZES, f"{role} of type {', '.join(SIZES)}", source.dtype)
        r.require(source.dtype != "f32" or problem.math == "tf32", "TF32 allowed for float32", problem.math)
        r.require(problem.op.groups == 1, "groups = 1", problem.op.groups)
        r.require(len(problem.op.stride) <= 2, "one or two spatial axes", len(problem.op.stride))
        for name, tensor in problem.items:
            r.require(tensor.numel > 0, f"elements in {name}", str(tensor))
        if r:
            return r
        v = View.of(problem)
        halves = not v.dgrad and set(problem.op.stride) == {2} and len(problem.op.stride) == 2
        halves = halves and all(size % 2 == 0 for size in v.src_size[1:])
        halves = halves and (v.red % (128 // SIZES[v.dtype]) == 0 or _shape(problem).pixels is not None)
        found = f"stride {problem.op.stride} on {v.src_size[1:]} points of {v.red} channels"
        r.require(
            set(problem.op.stride) == {1} or halves, "stride 1, or forward 2 on even sizes and whole steps", found
        )
        r.require(max(v.red * v.taps, *v.src_size, v.geometry.N) < 2**24, "sizes under 2^24", str(source))
        return r

    def configs(self, problem: Problem) -> list[Config]:
        shape, found = _shape(problem), []
        trips = -(-shape.red // shape.step) * shape.view.taps
        for pixels, filters, warps, stages in _TILES:
            if (filters > 64 and filters >= 2 * shape.view.out) or (pixels > 64 and pixels >= 2 * shape.view.pixels):
                continue  # half the tile or more would be empty
            stage, staged = _shared(problem, pixels, filters)
            fitting = (problem.target.shared_memory - 2048 - staged) // stage
            stages = min(stages, max(2, trips))
            if fitting >= min(stages, 3):  # with two, the loop of a large tile waits
                stages = min(stages, fitting)
                config = {"BLOCK_M": pixels, "BLOCK_N": filters, "num_warps": warps, "num_stages": stages}
                found.append(config)
        return sorted(found, key=lambda config: self.cost(problem, config))

    def _blocks(self, problem: Problem, config: Config) -> int:
        """Blocks that stay: as many as the processors hold at once."""
        stage, staged = _shared(problem, config["BLOCK_M"], config["BLOCK_N"])
        needed = config["num_stages"] * stage + staged + 2048
        together = min(problem.target.shared_memory // needed, 16 // config["num_warps"])
        return min(_shape(problem).tiles(config), max(together, 1) * problem.target.processors)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return _shape(problem).descriptors_at + DESCRIPTORS * self._blocks(problem, config) + 128

    def cost(self, problem: Problem, config: Config) -> float:
        shape, target = _shape(problem), problem.target
        v, tiles = shape.view, shape.tiles(config)
        across = -(-v.out // config["BLOCK_N"])
        depth = -(-shape.red // shape.step) * shape.step
        gemm = Gemm(tiles // across * config["BLOCK_M"], v.out, depth, v.taps, 1, v.dtype, problem.math)
        known = {"num_warps": 8} if config["BLOCK_M"] == 256 else {}  # a tile whose rate is listed
        time = seconds(gemm, {**config, **known, "BLOCK_K": shape.step}, target)
        packed = shape.descriptors_at
        traffic = (problem.bytes + 2.0 * packed) / (0.8 * target.bandwidth)
        return max(time, traffic) + start(target, 2 if packed else 1)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        shape = _shape(problem)
        v, g = shape.view, shape.view.geometry
        found: list[Launch] = []
        source: Argument = problem.items[0][0]
        w: Argument = "w"
        to, w_to = Slice(0, v.dtype), Slice(shape.filters_at, v.dtype)
        if shape.filters:
            found.append(pack(shape.filters, "w", w_to, shape.pixels, source, to, v.span, shape.rounding))
            w = w_to
        elif shape.pixels:
            found.append(shape.pixels.launch(source, to, v.span, shape.rounding))
        if shape.pixels:
            source = to
        steps = -(-shape.red // shape.step)
        sign = -1 if v.dgrad else 1
        box = dict(zip(("BOX_N", "BOX_H", "BOX_W"), shape.box(config["BLOCK_M"])))
        args, constexprs = places(problem)
        args |= {
            "src": source, "w": w, "N": shape.images, **dict(zip(("SRC_H", "SRC_W"), shape.src_size)),
            "RED": shape.red, "OUT": v.out, **dict(zip("PQ", shape.out_size)), "TILES": shape.tiles(config),
            "BLOCKS": self._blocks(problem, config), "w_columns": v.taps * steps * shape.step,
            **{f"origin_{axis}": -sign * pad for axis, pad in zip("hw", g.pad[1:])},
            **{f"src_{axis}_stride": s for axis, s in zip("nhw", shape.src_strides)},
        }  # fmt: skip
        jumps = {f"JUMP_{axis}": sign * d for axis, d in zip("HW", g.dilation[1:])}
        constexprs |= {
            "R": g.filter[1], "S": g.filter[2], **jumps, "HALVED": shape.halved, **box,
            "WIDE": max(t.span for _, t in problem.items) > INT32, "PRECISION": problem.math,
            "BLOCK_N": config["BLOCK_N"], "BLOCK_K": shape.step,
        }  # fmt: skip
        grid = (self._blocks(problem, config),)
        scratch = Slice(shape.descriptors_at, "u8"), DESCRIPTORS
        warps, stages = config["num_warps"], config["num_stages"]
        return [*found, Launch(conv_tma, grid, args, constexprs, warps, stages, scratch)]
