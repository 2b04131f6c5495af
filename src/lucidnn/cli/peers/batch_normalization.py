"""The framework's own batch normalization: its forward and backward operators, and those of its synchronised form.

The residual and the activation are calls of their own, in place; so is the activation's gradient. The framework has no
statistics per activation but by a view of the tensors as (N, C H W), which is made before the clock runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import _ACTIVATIONS, _FROM_OUTPUT, _GRADIENTS, Call, Peer, Tensors

aten = torch.ops.aten


def _views(problem: Problem, t: Tensors) -> dict[str, torch.Tensor]:
    """The tensors in the form in which the framework's operators take them."""
    if getattr(problem.op, "mode", "spatial") == "spatial":
        return dict(t)
    shape = problem["x"].shape

    def view(role: str, v: torch.Tensor) -> torch.Tensor:
        if role in ("factor", "count"):
            return v
        return v.reshape(shape[0], -1) if v.ndim == len(shape) else v.flatten()

    return {role: view(role, v) for role, v in t.items()}


def _after(problem: Problem) -> tuple[str, Any]:
    e, with_z = problem.epilogue, "z" in problem.inputs
    name, activate = _ACTIVATIONS[e.activation] if e.activation != "identity" else ("", None)
    names = " + add_(z)" * with_z + (f" + {name}" if name else "")

    def finish(y: torch.Tensor, t: Tensors) -> torch.Tensor:
        if with_z:
            y = y.add_(t["z"])
        return activate(y, e.parameter) if activate else y

    return names, finish


def _train(problem: Problem) -> Peer:
    op: Any = problem.op
    names, finish = _after(problem)
    running = "running_mean" in problem.inputs

    def prepare(t: Tensors) -> Call:
        v = _views(problem, t)
        momentum = float(v["factor"]) if "factor" in v else op.momentum
        old_mean, old_variance = (v[r].clone() if running else None for r in ("running_mean", "running_variance"))
        scale, bias = v.get("scale"), v.get("bias")

        def call() -> Any:
            y, mean, inverse = torch.native_batch_norm(
                v["x"], scale, bias, old_mean, old_variance, True, momentum, op.epsilon
            )
            return finish(y, v), mean, inverse

        return call

    kept: tuple[str | None, ...] = ("y", "mean", "inv_variance")
    if op.mode != "spatial":
        kept = (None, None, None)
    return Peer("native_batch_norm" + names, kept, prepare)


def _infer(problem: Problem) -> Peer:
    op: Any = problem.op
    names, finish = _after(problem)
    if op.mode != "spatial":
        raise NotSupported("the framework has no given statistics per activation")

    def prepare(t: Tensors) -> Call:
        variance = t["variance"] if "variance" in t else t["inv_variance"].double() ** -2 - op.epsilon
        variance = variance.to(t["mean"].dtype)
        scale, bias = t.get("scale"), t.get("bias")
        return lambda: finish(
            torch.native_batch_norm(t["x"], scale, bias, t["mean"], variance, False, 0.0, op.epsilon)[0], t
        )

    return Peer("native_batch_norm" + names, ("y",), prepare)


def _bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    e = problem.epilogue
    name, gradient = _GRADIENTS[e.activation] if e.activation != "identity" else ("", None)
    if op.mode != "spatial":
        raise NotSupported("the framework has no backward operator for statistics per activation")

    def prepare(t: Tensors) -> Call:
        kind = t["mean"].dtype
        inverse = t["inv_variance"] if "inv_variance" in t else (t["variance"] + op.epsilon).rsqrt()
        running = (t["mean"], (inverse.double() ** -2 - op.epsilon).to(kind)) if op.frozen else (None, None)
        scale = t["scale"] if "scale" in t else torch.ones_like(t["mean"])
        source = t.get("y")
        if gradient is not None and source is None:  # the framework keeps what its activation's gradient reads
            shape = (1, -1, *[1] * (t["x"].ndim - 2))
            before = (t["x"] - t["mean"].reshape(shape)) * (inverse * scale).reshape(shape)
            before = before + t["bias"].reshape(shape) if "bias" in t else before
            before = (before + t["z"] if "z" in t else before).to(t["x"].dtype)
            source = _FROM_OUTPUT.get(e.activation, lambda v: v)(before)

        def call() -> Any:
            g = t["dy"] if gradient is None or source is None else gradient(t["dy"], source, e.parameter)
            found = aten.native_batch_norm_backward(
                g, t["x"], scale, *running, t["mean"], inverse, not op.frozen, op.epsilon, [True] * 3
            )
            return (*found, g) if op.residual else found

        return call

    outputs = ("dx", "dscale", "dbias", "dz") if op.residual else ("dx", "dscale", "dbias")
    return Peer((f"{name} + " if name else "") + "native_batch_norm_backward", outputs, prepare)


def _gpu(problem: Problem) -> None:
    if not problem.target.is_gpu:
        raise NotSupported("the framework has the pieces of a synchronised batch normalization for GPUs only")
    if getattr(problem.op, "mode", "spatial") != "spatial" or problem.epilogue.activation != "identity":
        raise NotSupported("the framework has no such piece of a batch normalization")


def _stats(problem: Problem) -> Peer:
    _gpu(problem)
    return Peer("batch_norm_stats", ("mean", None), lambda t: lambda: torch.batch_norm_stats(t["x"], 1e-5))


def _sums(problem: Problem) -> Peer:
    _gpu(problem)

    def prepare(t: Tensors) -> Call:
        inverse = t["inv_variance"] if "inv_variance" in t else (t["variance"] + problem.op.epsilon).rsqrt()  # type: ignore
        flags = (True, True, True)
        return lambda: torch.batch_norm_backward_reduce(t["dy"], t["x"], t["mean"], inverse, t.get("scale"), *flags)

    return Peer("batch_norm_backward_reduce", (None, None, "dscale", "dbias"), prepare)


PEERS = {
    "batch_norm_train_fwd": _train,
    "batch_norm_infer_fwd": _infer,
    "batch_norm_bwd": _bwd,
    "batch_norm_stats": _stats,
    "batch_norm_bwd_sums": _sums,
}
