"""``norm.reference``: layer, RMS and group normalization in float64, on any device, slow on purpose.

Method: x is reshaped so that a set is one axis, and the formulas of `lucidnn.ops.normalization` are applied as they
stand, the variance in two passes. The activations are those of ``engines/_reference.py``. Cost: some twenty float64
passes. A set without elements has the mean NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._reference import activate, activate_grad


class NormReference(Engine):
    """Both directions of all three, straight from the formulas."""

    name = "norm.reference"
    operations = (
        "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd", "group_norm_fwd", "group_norm_bwd",
    )  # fmt: skip
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, bytes=160.0 * problem["x"].numel, dtype="f64", launches=25)

    def build(self, problem: Problem, config: Config) -> Run:
        names, op = tuple(problem.tensors), problem.op
        x = problem["x"]
        group = op.name.startswith("group")
        centered = not op.name.startswith("rms")
        sets, size = op.statistics_shape(x), op.set_size(x)  # type: ignore[attr-defined]
        if group:
            sets = (*sets, 1)
        lead = sets if group else sets[: x.ndim - op.axes] + (1,)  # type: ignore[attr-defined]
        e = problem.epilogue

        def flat(t: Any) -> Any:
            return t.detach().double().reshape(*lead[:-1], size)

        def parameter(pack: Any, role: str, default: float) -> Any:
            """A scale or bias that broadcasts against the flat x."""
            if role not in pack:
                return default
            t = pack[role].detach().double()
            if group:
                t = t.reshape(1, -1, *[1] * (x.ndim - 2)).expand(x.shape)
            return flat(t) if group else t.reshape(size)

        def summed(t: Any) -> Any:
            """Over all elements that a scale belongs to, in the parameters' shape."""
            t = t.reshape(x.shape)
            axes = [a for a in range(x.ndim) if a != 1] if group else [*range(x.ndim - op.axes)]  # type: ignore
            return t.sum(axes) if axes else t

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            v = flat(pack["x"])
            if centered:
                mean = v.mean(-1, keepdim=True)
                v = v - mean
                pack["mean"].copy_(mean.reshape(pack["mean"].shape))
            inverse = (v.square().mean(-1, keepdim=True) + op.epsilon) ** -0.5  # type: ignore[attr-defined]
            pack["inv_variance"].copy_(inverse.reshape(pack["inv_variance"].shape))
            v = v * inverse * parameter(pack, "scale", 1.0) + parameter(pack, "bias", 0.0)
            pack["y"].copy_(activate(e.activation, e.parameter, v).reshape(x.shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            v, dy = flat(pack["x"]), flat(pack["dy"])
            if centered:
                v = v - pack["mean"].detach().double().reshape(lead)
            inverse = pack["inv_variance"].detach().double().reshape(lead)
            v = v * inverse
            scale = parameter(pack, "scale", 1.0)
            g = activate_grad(e.activation, e.parameter, v * scale + parameter(pack, "bias", 0.0), dy)
            if "dscale" in pack:
                pack["dscale"].copy_(summed(g * v))
            if "dbias" in pack:
                pack["dbias"].copy_(summed(g))
            if "dx" in pack:
                g = g * scale
                dx = g - v * (g * v).mean(-1, keepdim=True)
                if centered:
                    dx = dx - g.mean(-1, keepdim=True)
                pack["dx"].copy_((dx * inverse).reshape(x.shape))

        return forward if op.name.endswith("fwd") else backward
