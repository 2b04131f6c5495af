"""Convolution as a product of spectra: what ``conv.fft`` and ``conv.fft_tiled`` share, on any device.

Method. Along an axis let R' = dilation (R - 1) + 1 be the reach of the filter. The source (x; dy in the data gradient,
spread out by the stride) is cut into windows of `length` points that start `step` apart; filter and windows are
transformed (``torch.fft.rfftn``), for every frequency channels are multiplied as (windows, channels) x (channels,
results) matrices (``torch.bmm`` on complex numbers; element by element where every channel is a group), and what comes
back holds the results that no wrap-around has reached::

    forward           Y = X conj(W)     results are at lags 0, 1, ..
    data gradient     X = Y W           results start after `skip` points
    filter gradient   W = conj(Y) X     summed over images and windows; results are the lags of the taps

With one window a cyclic transform needs no more points than the image and the padding on one side, because both sides
of it may share the same zeros. With several (overlap-save) every window gives length - R' + 1 results.

The padded copy, the arranged spectra and the results lie in the workspace. ``torch.fft`` takes memory of its own in
addition, up to twice the spectra of one round of images, and gives it back after each transform. On a GPU it also
makes plans for each size at the first call, which is therefore made when the engine's plan is built.

Errors. Each transform errs by some roundoffs times the root of the logarithm of its length, relative to the *largest*
numbers of the image, not to the single result: `terms_needed` says how long a sum must be to hide that. An infinity or
NaN in an image reaches all results of its window.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ..core.engine import Config, Engine, Refusals, Run
from ..core.heuristics import LAUNCH
from ..core.problem import Problem
from ..ops.convolution import Geometry

TYPES = ("f64", "f32", "f16", "bf16")
ALIGN = 64
MOST_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30, "hip": 1 << 30}  # spectra of one round of images


@functools.cache
def fast_size(least: int) -> int:
    """Smallest length, at least this, with no prime factor above 7: what transforms are fast for.

    Examples
    --------
    >>> fast_size(61), fast_size(64), fast_size(121)
    (63, 64, 125)
    """
    n, rest = least, 0
    while rest != 1:
        rest = n
        for factor in (2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        n += rest != 1
    return n


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial axis: how the source is cut, and where the results are."""

    length: int  # points of a transform
    tiles: int  # windows
    step: int  # from one window to the next
    start: int  # where the first window begins in the source; below 0 in the padding
    skip: int  # points of a transformed-back window before the first result
    jump: int  # from one result to the next
    count: int  # results
    spread: int  # from one point of the source to the next: the stride, in the data gradient

    @property
    def extent(self) -> int:
        """Points of the padded source."""
        return (self.tiles - 1) * self.step + self.length


def axis(problem: Problem, number: int, length: int = 0) -> Axis:
    """A spatial axis as one window or, with a `length` (above the filter's reach), as windows of that many points."""
    op, at = problem.op, number + 2
    size, taps, out = (problem[role].shape[at] for role in (op.x_role, op.w_role, op.y_role))
    stride, dilation, before = op.stride[number], op.dilation[number], op.padding[number][0]
    reach, span = dilation * (taps - 1) + 1, (out - 1) * stride + 1
    gradient, filters = op.name == "conv_dgrad", op.name == "conv_wgrad"
    if length:
        kept = length - reach + 1
        tiles = -(-(size if gradient else span) // kept)
        start, skip = (before - (reach - 1), reach - 1) if gradient else (-before, 0)
    else:
        after = span + reach - 1 - before - size  # of the padding, what is read
        length = fast_size(max(size + max(before, after, 0), reach, span))
        tiles, kept = 1, size if gradient else span
        start, skip = (0, before) if gradient else (-before, 0)
    jump, count = (dilation, taps) if filters else (1, size) if gradient else (stride, out)
    return Axis(length, tiles, kept, start, skip, jump, count, stride if gradient else 1)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A problem, the windows along its axes, and how many images are transformed in one round."""

    problem: Problem
    axes: tuple[Axis, ...]
    images: int

    @classmethod
    def of(cls, problem: Problem, axes: Sequence[Axis], images: int = 0) -> Scheme:
        """With as many images a round as fit into `MOST_BYTES`, or as given."""
        one = cls(problem, tuple(axes), 1)
        if not images:
            bytes_ = one.item * 2 * one.frequencies * one.tiles * (one.geometry.C + one.geometry.K)
            images = max(1, min(one.geometry.N, MOST_BYTES[problem.target.kind] // bytes_))
        return dataclasses.replace(one, images=images)

    @functools.cached_property
    def geometry(self) -> Geometry:
        return Geometry.of(self.problem)

    @property
    def direction(self) -> str:
        return self.problem.op.name

    @property
    def dtype(self) -> str:
        """Of the arithmetic."""
        return "f64" if self.problem.items[0][1].dtype == "f64" else "f32"

    @property
    def item(self) -> int:
        return 8 if self.dtype == "f64" else 4

    @property
    def tiles(self) -> int:
        return math.prod(a.tiles for a in self.axes)

    @property
    def lengths(self) -> list[int]:
        return [a.length for a in self.axes]

    @property
    def half(self) -> list[int]:
        """Sizes of the spectrum of real numbers: half of the last axis says all."""
        return [*self.lengths[:-1], self.lengths[-1] // 2 + 1]

    @property
    def frequencies(self) -> int:
        return math.prod(self.half)

    @property
    def elementwise(self) -> bool:
        """Every channel is a group of its own: no matrices."""
        g = self.geometry
        return g.G == g.C == g.K

    @property
    def bare(self) -> bool:
        """Whether the results only have to be stored, at most in another type."""
        p = self.problem
        return p.epilogue.alpha == 1.0 and p.epilogue.activation == "identity" and not {"bias", "z"} & set(p.inputs)

    @property
    def gathered(self) -> bool:
        """Whether results go to the workspace first: there is more to do with them, or windows have to be joined."""
        return not self.bare or self.joins

    @property
    def joins(self) -> bool:
        return self.tiles > 1 and self.direction != "conv_wgrad"

    def stands(self, role: str) -> bool:
        """Whether the operand can be transformed from where it is: no padding in front, no gaps, no other type."""
        plain = all(a.tiles == 1 for a in self.axes) and self.problem[role].dtype == self.dtype
        if role == self.problem.inputs[0]:
            return plain and all((a.start, a.spread) == (0, 1) for a in self.axes)
        return plain and all(gap == 1 for gap in self.gaps)

    @property
    def gaps(self) -> tuple[int, ...]:
        """Steps between neighbours of the second operand once it is spread out: filters, or dy by the stride."""
        op = self.problem.op
        return op.stride if self.direction == "conv_wgrad" else op.dilation

    @property
    def second_extents(self) -> list[int]:
        if self.direction == "conv_wgrad":
            return [a.tiles * a.step for a in self.axes]
        return [d * (r - 1) + 1 for d, r in zip(self.gaps, self.problem["w"].shape[2:], strict=True)]

    @property
    def joined(self) -> list[int]:
        """Spatial sizes of the gathered results: whole windows of them."""
        if not self.joins:
            return [a.count for a in self.axes]
        return [a.tiles * a.step for a in self.axes]

    @functools.cached_property
    def parts(self) -> dict[str, int]:
        """The workspace: real numbers in each part of it."""
        g, rows, found = self.geometry, self.images * self.tiles, {}
        first, second = self.problem.inputs[:2]
        if not self.stands(first):
            channels = self.problem[first].shape[1]
            found["padded"] = self.images * channels * math.prod(a.extent for a in self.axes)
        if not self.stands(second):
            rows_second = self.images if self.direction == "conv_wgrad" else g.K
            found["spread"] = rows_second * self.problem[second].shape[1] * math.prod(self.second_extents)
        weights = g.K * (g.C // g.G)
        spectra = {"x": g.C * rows, "y": g.K * rows, "w": weights}
        if self.elementwise:
            spectra = {"w": weights} if self.direction == "conv_wgrad" else {}
        found |= {name: 2 * self.frequencies * count for name, count in spectra.items()}
        if self.gathered:
            out = self.problem[self.problem.outputs[0]]
            found["result"] = math.prod(out.shape[:2]) * math.prod(self.joined)
        return found

    @property
    def offsets(self) -> dict[str, int]:
        """Byte at which each part begins, from the first aligned one of the workspace on."""
        sizes = [-(-n * self.item // ALIGN) * ALIGN for n in self.parts.values()]
        return dict(zip(self.parts, itertools.accumulate([0, *sizes]), strict=False))

    @property
    def workspace(self) -> int:
        """Bytes; a CPU's workspace may begin off a line."""
        return sum(-(-n * self.item // ALIGN) * ALIGN for n in self.parts.values()) + self._slack

    @property
    def _slack(self) -> int:
        return 0 if self.problem.target.is_gpu else ALIGN

    def carve(self, workspace: torch.Tensor) -> dict[str, torch.Tensor]:
        """The workspace's parts, flat."""
        base = -workspace.data_ptr() % ALIGN if self._slack else 0
        kind = torch.float64 if self.dtype == "f64" else torch.float32
        return {
            name: workspace[base + at : base + at + self.parts[name] * self.item].view(kind)
            for name, at in self.offsets.items()
        }


@functools.lru_cache(maxsize=256)
def whole(problem: Problem) -> Scheme:
    """One window an axis."""
    return Scheme.of(problem, [axis(problem, i) for i in range(len(problem.op.stride))])


def tiled(problem: Problem, lengths: Sequence[int]) -> Scheme:
    """Windows of these lengths; one window where an axis has no more."""
    return _tiled(problem, tuple(lengths))


@functools.lru_cache(maxsize=1024)
def _tiled(problem: Problem, lengths: tuple[int, ...]) -> Scheme:
    whole_axes = whole(problem).axes
    cut = (axis(problem, i, n) if n < w.length else w for i, (n, w) in enumerate(zip(lengths, whole_axes, strict=True)))
    return Scheme.of(problem, tuple(cut))


@functools.lru_cache(maxsize=256)
def tilings(problem: Problem, most: int = 3) -> tuple[Scheme, ...]:
    """The schemes of several windows with the shortest estimates, best first."""
    op, choices = problem.op, []
    for taps, dilation, one in zip(problem[op.w_role].shape[2:], op.dilation, whole(problem).axes, strict=True):
        reach = dilation * (taps - 1) + 1
        lengths = {fast_size(max(reach + 1, int(reach * times))) for times in (1.5, 2, 3, 4, 6, 8, 16, 32)}
        choices.append(sorted(n for n in lengths | {16, 32, 64} if reach < n < one.length) + [one.length])
    found = [tiled(problem, lengths) for lengths in itertools.product(*choices)]
    return tuple(sorted((s for s in found if s.tiles > 1), key=seconds)[:most])


class SpectralEngine(Engine):
    """What both engines have in common: they differ in the windows."""

    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"fft", "runtime_compilation", "spreads"})

    @abc.abstractmethod
    def scheme(self, problem: Problem, config: Config) -> Scheme:
        """The windows that a configuration means."""

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self.scheme(problem, config).workspace

    def cost(self, problem: Problem, config: Config) -> float:
        return seconds(self.scheme(problem, config))

    def build(self, problem: Problem, config: Config) -> Run:
        from ._fft_run import Transformed

        return Transformed(self.scheme(problem, config))

    def source(self) -> bytes:
        """The engine's file and what it shares."""
        shared = sorted(Path(__file__).parent.glob("_fft*.py"))
        return b"".join([super().source(), *(path.read_bytes() for path in shared)])


def require(problem: Problem) -> Refusals:
    """What both engines ask of a problem."""
    r = Refusals()
    r.require_tensors(problem.items, TYPES, elements=True)
    if problem.target.is_gpu and problem.items[0][1].dtype == "f32":
        # Products of complex matrices follow the same flag as real ones.
        flag = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        r.require(flag == "ieee" or problem.math == "tf32", "the framework's matrix products in ieee arithmetic", flag)
    return r


def require_long_sums(r: Refusals, scheme: Scheme) -> None:
    """Sums must be long enough to hide what the transforms err."""
    out = scheme.problem[scheme.problem.outputs[0]]
    terms, least = scheme.problem.flops / (2 * out.numel), terms_needed(math.prod(scheme.lengths))
    r.require(terms >= least, f"sums of at least {least:.1f} terms beside transforms of {scheme.lengths}", f"{terms:g}")


def terms_needed(points: int) -> float:
    """Terms of a sum whose own expected error, four roundoffs for each root of a term, covers that of the transforms.

    Three transforms of random data and the product between them were seen to err by 0.4 roundoffs for each root of the
    logarithm of the points, on the scale of the results; counted here is four times that, and half the bound is theirs.

    Examples
    --------
    >>> round(terms_needed(64), 2), round(terms_needed(2**20), 2)
    (3.84, 12.8)
    """
    return (1.6 / 2.0) ** 2 * math.log2(max(points, 2))


def seconds(scheme: Scheme) -> float:
    """Estimated time: transforms, passes over the spectra and products follow one another."""
    problem, g = scheme.problem, scheme.geometry
    target = problem.target
    rounds, points = -(-g.N // scheme.images), math.prod(scheme.lengths)
    windows = g.N * scheme.tiles
    lines = (g.C + g.K) * windows + g.K * (g.C // g.G)
    rate, bandwidth = target.flops(scheme.dtype), target.bandwidth
    transforms = lines * 2.5 * points * math.log2(max(points, 2))
    products = 8.0 * scheme.frequencies * windows * g.K * (g.C // g.G)
    weights, held = g.K * (g.C // g.G), scheme.images * scheme.tiles
    pieces = ((g.C * windows, g.C * held), (g.K * windows, g.K * held), (weights, weights))  # in all, and at once
    passes = 0.0
    for count, at_once in pieces:
        fresh = not target.is_gpu and at_once * points * scheme.item > FRESH
        passes += count * points * scheme.item * (2.5 if fresh else 1.0)
    kind = "gpu" if target.is_gpu else "cpu"
    transforming, multiplying, moved, calls = _RATES[kind]
    if scheme.elementwise:
        multiplying /= 8
    thin = min(1.0, windows / 8) * min(1.0, g.C / g.G / 8) * min(1.0, g.K / g.G / 8) if not scheme.elementwise else 1.0
    busy = transforms / (transforming * rate) + products / (multiplying * max(thin, 1 / 64) * rate)
    time = busy + (moved * passes + problem.bytes) / bandwidth
    if target.is_gpu:  # kernels follow one another: half the time of one that is launched alone
        return time + 0.5 * calls * (rounds + 1) * LAUNCH[target.kind]
    time += calls * (rounds + 1) * LAUNCH[target.kind]
    return time * (1.4 if len(scheme.axes) == 3 else 1.0)  # transforms along three axes walk through memory


FRESH = 32 << 20  # bytes; memory for more comes anew from the system each time, page by page
# part of the vector rate in transforms and in products, passes over the spectra, launches a round
_RATES = {"cpu": (0.2, 0.5, 8.0, 4), "gpu": (0.15, 0.35, 14.0, 12)}
