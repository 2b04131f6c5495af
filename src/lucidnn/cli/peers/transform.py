"""The framework's copies into a layout or type, its padding and its shuffles, where one call is the whole problem."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.descriptor import DTYPES
from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Peer


def _transform(problem: Problem) -> Peer:
    op: Any = problem.op
    x, y = problem["x"], problem["y"]
    plain = problem.epilogue.alpha == 1.0 and "z" not in problem.tensors
    square = op.fold and len(set(op.fold)) == 1 and len(op.fold) == 2
    if (
        not plain
        or (op.fold and (op.padding or not square or x.dtype != y.dtype))
        or (op.padding and x.dtype != y.dtype)
    ):
        raise NotSupported("the framework has no one call for this transformation")
    if op.fold:
        function = F.pixel_shuffle if op.unfold else F.pixel_unshuffle
        return Peer(f"F.{function.__name__}", ("y",), lambda t: lambda: function(t["x"], op.fold[0]))
    if op.padding:
        pads = [n for pair in reversed(op.padding) for n in pair]
        return Peer("F.pad", ("y",), lambda t: lambda: F.pad(t["x"], pads, value=op.value))
    if x.dtype == y.dtype:
        return Peer("torch.empty_strided, copy_", ("y",), lambda t: lambda: _copied(t["x"], y))
    to = getattr(torch, DTYPES[y.dtype][0])
    if (y.shape, y.strides) == (x.shape, x.strides):
        return Peer("torch.Tensor.to", ("y",), lambda t: lambda: t["x"].to(to))
    return Peer("torch.empty_strided, copy_", ("y",), lambda t: lambda: _copied(t["x"], y))


def _copied(x: torch.Tensor, y: Any) -> torch.Tensor:
    to = getattr(torch, DTYPES[y.dtype][0])
    return torch.empty_strided(y.shape, y.strides, dtype=to, device=x.device).copy_(x)


PEERS = {"transform_tensor": _transform}
