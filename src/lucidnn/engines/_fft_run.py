"""Runs a scheme of `lucidnn.engines._fft`: pads, transforms, multiplies, transforms back and finishes.

Moving data is left to tensor copies, which convert, conjugate and rearrange in one pass; the epilogue, where it is more
than storing, is this library's own kernel for the device (`lucidnn.engines._numba.finish` or
`lucidnn.engines._triton.finish`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.descriptor import DTYPES
from ..ops.convolution import five_strides, three
from ._fft import Scheme

Parts = dict[str, torch.Tensor]
Finish = Callable[[tuple[Any, ...], Any, torch.Tensor], None]


class _Operand:
    """One of the two inputs: how it is laid out, in the workspace's part `name`, to be cut into windows."""

    def __init__(self, name: str, shape: Sequence[int], places, tiles: list[int], steps: list[int], width: list[int]):
        """`places` has (begins, step, extent) by axis: point i goes to ``i * step - begins``. None leaves it alone."""
        self.name, self.channels, self.tiles = name, shape[1], tiles
        self.taken = None
        if places is None:
            return
        self.taken, self.put = [...], [...]
        for size, (begins, step, extent) in zip(shape[2:], places, strict=True):
            first = max(0, -(-begins // step))
            last = max(min(size, (extent - 1 + begins) // step + 1), first)
            self.taken.append(slice(first, last))
            at = first * step - begins
            self.put.append(slice(at, at + max((last - first - 1) * step + 1, 0), step))
        self.sizes = [extent for *_, extent in places]
        lines = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        self.view = (*tiles, *width), (*(s * line for s, line in zip(steps, lines, strict=True)), *lines)

    def __call__(self, tensor: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Windows of some rows: (rows, channels, windows, points)."""
        if self.taken is None:
            return tensor[(slice(None), slice(None), *(None for _ in self.tiles))]
        rows, plane = tensor.shape[0], math.prod(self.sizes)
        part = parts[self.name][: rows * self.channels * plane]
        padded = part.view(rows, self.channels, *self.sizes).zero_()
        padded[tuple(self.put)].copy_(tensor[tuple(self.taken)])
        sizes, strides = self.view
        return part.as_strided((rows, self.channels, *sizes), (self.channels * plane, plane, *strides))


class Transformed:
    """A scheme, ready to be called with tensors and a workspace."""

    def __init__(self, scheme: Scheme):
        problem, axes = scheme.problem, scheme.axes
        self.scheme, self.g = scheme, scheme.geometry
        self.rank = len(axes)
        self.dims = tuple(range(-self.rank, 0))
        self.lengths, self.half = scheme.lengths, scheme.half
        self.tiles, steps = [a.tiles for a in axes], [a.step for a in axes]
        self.forward, self.filters = scheme.direction == "conv_fprop", scheme.direction == "conv_wgrad"
        first, second = problem.inputs[:2]
        places = None if scheme.stands(first) else [(a.start, a.spread, a.extent) for a in axes]
        self.first = _Operand("padded", problem[first].shape, places, self.tiles, steps, self.lengths)
        extents = scheme.second_extents
        places = None
        if not scheme.stands(second):
            places = [(0, gap, extent) for gap, extent in zip(scheme.gaps, extents, strict=True)]
        one = [1] * self.rank
        cut = (self.tiles, steps, steps) if self.filters else (one, one, extents)
        self.second = _Operand("spread", problem[second].shape, places, *cut)
        jumps = one if scheme.joins else [a.jump for a in axes]
        counts = steps if scheme.joins else [(a.count - 1) * a.jump + 1 for a in axes]
        self.kept = [slice(a.skip, a.skip + n, jump) for a, n, jump in zip(axes, counts, jumps, strict=True)]
        self.joined = [slice(a.count) for a in axes]
        self.finish = None if scheme.bare else _finisher(scheme)
        if problem.target.is_gpu and torch.cuda.is_available():
            self._prepare()

    def _prepare(self) -> None:
        """One call on any data, so that the first real one finds the transforms' plans and may be under capture."""
        made = {}
        for role, t in self.scheme.problem.items:
            kind = getattr(torch, DTYPES[t.dtype][0])
            made[role] = torch.empty(t.span, dtype=kind, device="cuda").as_strided(t.shape, t.strides)
        space = torch.empty(self.scheme.workspace, dtype=torch.uint8, device="cuda")
        self(tuple(made.values()), space)

    def __call__(self, tensors: tuple[Any, ...], workspace: Any) -> None:
        with torch.no_grad():
            parts = self.scheme.carve(workspace) if workspace is not None else {}
            out = tensors[-1]
            target = parts["result"].view(*out.shape[:2], *self.scheme.joined) if self.scheme.gathered else out
            if self.filters:
                self._filter_gradient(tensors[0], tensors[1], target, parts)
            else:
                self._product(tensors[0], tensors[1], target, parts)
            if self.finish is not None:
                self.finish(tensors, workspace, target)
            elif self.scheme.gathered:
                out.copy_(target[(..., *self.joined)])

    def _product(self, source: torch.Tensor, w: torch.Tensor, target: torch.Tensor, parts: Parts) -> None:
        """Forward, or the data gradient."""
        g, per_c, per_k = self.g, self.g.C // self.g.G, self.g.K // self.g.G
        filters = self._transformed(self.second, w, parts)
        if self.scheme.elementwise:
            filters = filters.transpose(0, 1)  # (1, channels, windows, frequencies)
            filters = torch.conj_physical(filters) if self.forward else filters
        else:
            filters = filters.view(g.G, per_k, per_c, *self.half)
            order = (*range(3, 3 + self.rank), 0, *((2, 1) if self.forward else (1, 2)))
            filters = _stored(filters.permute(order), parts["w"], self.forward).flatten(0, self.rank)
        into, out_of = ("x", "y") if self.forward else ("y", "x")
        for n0 in range(0, g.N, self.scheme.images):
            n1 = min(n0 + self.scheme.images, g.N)
            spectrum = self._transformed(self.first, source[n0:n1], parts)
            if self.scheme.elementwise:
                spectrum = spectrum.mul_(filters)
            else:
                matrices = self._arranged(spectrum, parts[into], False)
                product = _complex(parts[out_of], (*matrices.shape[:2], filters.shape[2]))
                torch.bmm(matrices, filters, out=product)
                product = product.view(*self.half, g.G, n1 - n0, *self.tiles, -1)
                r = self.rank  # back to (images, groups, channels, windows, frequencies)
                spectrum = product.permute(r + 1, r, -1, *range(r + 2, 2 * r + 2), *range(r)).flatten(1, 2)
            self._keep(self._back(spectrum), target[n0:n1])

    def _filter_gradient(self, x: torch.Tensor, dy: torch.Tensor, target: torch.Tensor, parts: Parts) -> None:
        g, r, alone = self.g, self.rank, self.scheme.elementwise
        shape = (g.C, 1, *self.half) if alone else (math.prod(self.half) * g.G, g.K // g.G, g.C // g.G)
        total = _complex(parts["w"], shape)
        for n0 in range(0, g.N, self.scheme.images):
            some = slice(n0, min(n0 + self.scheme.images, g.N))
            left = self._transformed(self.second, dy[some], parts)
            if alone:
                right = self._transformed(self.first, x[some], parts)
                share = right.mul_(left.conj_physical_()).sum((0, *range(2, 2 + r)))[:, None]
                total.add_(share) if n0 else total.copy_(share)
                continue
            left = self._arranged(left, parts["y"], True).transpose(1, 2)
            right = self._arranged(self._transformed(self.first, x[some], parts), parts["x"], False)
            if n0:
                torch.baddbmm(total, left, right, out=total)
            else:
                torch.bmm(left, right, out=total)
        if not alone:
            total = total.view(*self.half, g.G, g.K // g.G, g.C // g.G)
            total = total.permute(r, r + 1, r + 2, *range(r)).flatten(0, 1)
        target.copy_(self._back(total)[(..., *self.kept)])

    def _transformed(self, operand: _Operand, tensor: torch.Tensor, parts: Parts) -> torch.Tensor:
        return torch.fft.rfftn(operand(tensor, parts), s=self.lengths, dim=self.dims)

    def _back(self, spectrum: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfftn(spectrum, s=self.lengths, dim=self.dims)

    def _arranged(self, spectrum: torch.Tensor, part: torch.Tensor, conjugate: bool) -> torch.Tensor:
        """A spectrum (images, channels, windows, frequencies) as matrices (frequency and group, row, channel)."""
        r = self.rank
        split = spectrum.unflatten(1, (self.g.G, -1))
        order = (*range(3 + r, 3 + 2 * r), 1, 0, *range(3, 3 + r), 2)
        stored = _stored(split.permute(order), part, conjugate)
        return stored.view(math.prod(self.half) * self.g.G, -1, stored.shape[-1])

    def _keep(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """The results of some images' windows (images, channels, windows, points) to where they are gathered."""
        if self.scheme.joins:
            for i, a in enumerate(self.scheme.axes):  # (images, channels, windows and points axis by axis)
                target = target.unflatten(2 + 2 * i, (a.tiles, a.step))
            r = range(2, 2 + 2 * self.rank)
            target = target.permute(0, 1, *r[::2], *r[1::2])
        else:
            values = values.flatten(1, 1 + self.rank)
        target.copy_(values[(..., *self.kept)])


def _complex(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The beginning of a part of the workspace as dense complex numbers."""
    return torch.view_as_complex(part[: 2 * math.prod(shape)].view(-1, 2)).view(shape)


def _stored(view: torch.Tensor, part: torch.Tensor, conjugate: bool) -> torch.Tensor:
    """A copy, dense in the order of the view's axes."""
    return _complex(part, view.shape).copy_(view.conj() if conjugate else view)


def _finisher(scheme: Scheme) -> Finish:
    """Writes the gathered results, finished, to the output."""
    problem = scheme.problem
    out = problem[problem.outputs[0]]
    joined = three(scheme.joined, 1)
    lines = [math.prod(joined[i:]) for i in range(4)]
    source = (out.shape[1] * lines[0], *lines)
    shape = (*out.shape[:2], *three(out.shape[2:], 1))
    order = problem.inputs
    bias_at, z_at = (order.index(role) if role in order else None for role in ("bias", "z"))
    if not problem.target.is_gpu:
        from ._numba.finish import Finisher
        from ._numba.pool import worthwhile

        limit = worthwhile(20 * out.numel, problem.target.processors)
        finisher = Finisher(problem, scheme.dtype, limit, shape, source, five_strides(out), 4)

        def finish(tensors, workspace, results):
            bias, z = (None if at is None else tensors[at] for at in (bias_at, z_at))
            finisher(results, bias, z, tensors[-1], 0, shape[0])

        return finish
    from ._triton.finish import finishing
    from ._triton.launch import Program, Slice

    program = Program(problem, [finishing(problem, Slice(scheme.offsets["result"], scheme.dtype), source)])
    return lambda tensors, workspace, results: program(tensors, workspace)
