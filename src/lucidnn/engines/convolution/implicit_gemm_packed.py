"""Convolution forward and data gradient as one gathered matrix product over operands packed for it, in Triton.

A first kernel packs what the product cannot read fast from where it is, then the gathered product of
`lucidnn.engines._triton.conv_gather` runs on the packed operands and writes the result in its own layout.

* On matrix units (16-bit types; float32 under ``math=tf32``): the source is packed channels last, the filter with the
  reduction innermost, both padded to 16 bytes.  Loads are then 16-byte asynchronous copies to shared memory from
  where the matrix units read them; float32 is rounded to TF32 while packing and takes no way through registers.
* On vector units (float32 under ``math=ieee``): only the filter is packed, result channels innermost, so that its
  loads are wide and the inner loop reads shared memory without bank conflicts.

Any strides, padding, dilation and groups, 1 to 3 dimensions.  16-bit sources that are channels last and aligned
gain nothing and are refused; a float32 one is still packed, because it has to be rounded.
Cost: reading and writing the packed operands once, then the operations of the definition plus what partly filled
tiles waste. Workspace: the packed operands.
"""

import math

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from .._triton.conv_gather import ORDER, View, gather
from .._triton.index import INT32
from .._triton.launch import Launch, Slice, TritonEngine
from .._triton.pack import SIZES, Filter, Pixels, is_aligned, pack, padded
from .._triton.tiles import ranked, seconds, shapes, start


class ImplicitGemmPacked(TritonEngine):
    """Forward and data gradient."""

    name = "conv.implicit_gemm_packed"
    operations = ("conv_fprop", "conv_dgrad")
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        role, source = problem.items[0]
        refusals.require(source.dtype in SIZES, f"{role} of type {', '.join(SIZES)}", source.dtype)
        for name, tensor in problem.items:
            refusals.require(tensor.numel > 0, f"elements in {name}", str(tensor))
        if refusals:
            return refusals
        v = View.of(problem)
        g = v.geometry
        # Where some pixels of the result meet no tap, Triton 3.6's assembler was seen to take the products out.
        axes = list(zip(g.filter, g.stride, g.dilation))
        touched = not v.dgrad or all(r >= s and math.gcd(s, d) == 1 for r, s, d in axes)
        refusals.require(touched, "a data gradient whose every pixel meets a tap", f"filter, stride, dilation {axes}")
        if source.dtype != "f32":
            sizes = (v.geometry.N, v.red, *v.src_size)
            ready = is_aligned(v.src_strides, sizes, 1, source.dtype, source.alignment)
            refusals.require(not ready, f"{role} that is not channels last with aligned rows already", str(source))
        elif problem.math == "ieee":
            group, out, *others = v.w_strides
            w = problem["w"]
            ready = is_aligned(
                (out, group, *others), (v.out, v.geometry.G, v.red, *v.geometry.filter), 0, "f32", w.alignment
            )
            refusals.require(not ready, "w whose result channels are not innermost and aligned already", str(w))
            refusals.require(v.out >= 16, "at least 16 result channels a group in float32 arithmetic", v.out)
        blocks = max(map(v.blocks, self.configs(problem)))
        refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def _parts(self, problem: Problem, config: Config) -> tuple[View, Filter, Pixels | None]:
        """The problem, and how filter and source are packed."""
        v = View.of(problem)
        group, out, red, *taps = v.w_strides
        g, dtype = v.geometry, v.dtype
        if dtype == "f32" and problem.math == "ieee":
            width = -(-v.out // config["BLOCK_N"]) * config["BLOCK_N"]
            return v, Filter(g.G, v.red, v.out, width, g.filter, (group, red, out, *taps), taps_first=True), None
        width = padded(v.red, dtype)
        filters = Filter(g.G, v.out, v.red, width, g.filter, (group, out, red, *taps))
        return v, filters, Pixels(g.G, (g.N, v.red, *v.src_size), v.src_strides, width)

    def _packed(self, problem: Problem, config: Config) -> tuple[View, list[Launch], int]:
        """The product's view of the packed operands, the launch that packs them, and the workspace's size."""
        v, filters, pixels = self._parts(problem, config)
        item, source = SIZES[v.dtype], v.source
        w_at = -(-pixels.elements * item // 16) * 16 if pixels else 0
        to, w_to = Slice(0, v.dtype), Slice(w_at, v.dtype)
        span = v.span
        group, outer, inner, *taps = filters.packed_strides
        if pixels:
            v = v.over(
                max(pixels.elements, filters.elements), source=to, src_strides=pixels.packed_strides,
                red=pixels.channels_padded, filters=w_to, w_strides=(group, outer, inner, *taps),
            )  # fmt: skip
        else:
            v = v.over(filters.elements, filters=w_to, w_strides=(group, inner, outer, *taps))
        rounding = v.dtype == "f32" and problem.math == "tf32"
        launch = pack(filters, "w", w_to, pixels, source, to, span, rounding)
        return v, [launch], w_at + filters.elements * item

    def _view(self, problem: Problem) -> View:
        """The product's sizes, which need no config."""
        v = View.of(problem)
        return v if v.dtype == "f32" and problem.math == "ieee" else v.over(0, red=padded(v.red, v.dtype))

    def configs(self, problem: Problem) -> list[Config]:
        gemm, target = self._view(problem).gemm(problem.math), problem.target
        return [{**config, **ORDER} for config in ranked(gemm, shapes(gemm, target), target)]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self._packed(problem, config)[2]

    def cost(self, problem: Problem, config: Config) -> float:
        target, gemm = problem.target, self._view(problem).gemm(problem.math)
        space = self.workspace_size(problem, config)
        role, source = problem.items[0]
        matrix = gemm.on_matrix_units
        packing = (problem["w"].nbytes + (source.nbytes if matrix else 0) + space) / (0.7 * target.bandwidth)
        traffic = (problem.bytes + (space - source.nbytes if matrix else 0)) / (0.8 * target.bandwidth)
        loading = self._packed(problem, config)[0].loading("packed", config, target)
        return packing + max(seconds(gemm, config, target, loading), traffic) + start(target, 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v, found, _ = self._packed(problem, config)
        full = v.source == problem.items[0][0]
        return [*found, gather(problem, v, config, precision=problem.math, rounding=False, full=full)]
