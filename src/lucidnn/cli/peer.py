"""The framework's own kernel for a problem, to stand beside lucidnn's: same inputs, data type and memory format.

It lives with the command line, and nothing under ``engines`` may use it. ``peer(problem)`` names what is called, and
prepares a call on given tensors; what the framework needs in another form (an index of another type, a bias of another
type) is converted before the clock runs. cuDNN's choice is the fastest of a search (``benchmark``), and TF32 is allowed
where the problem's math mode allows it: see `flags`.

Where the framework has no kernel that does all of a problem, several calls are made, and the name says so. Convolution,
max pooling and the pointwise operations are here, other families in `lucidnn.cli.peers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import NotSupported
from ..core.operation import Epilogue
from ..core.problem import Problem

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[], Any]
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Peer:
    """What the framework does for a problem.

    Attributes
    ----------
    name : str
        The calls, as a reader would write them.
    outputs : tuple of str
        Roles of what a call returns, in order; None for a result that means something else than the problem's.
    prepare : callable
        ``prepare(tensors)`` gives a function without arguments that does the work once and returns its outputs.
    graph : bool
        Whether a call may be captured into a CUDA graph. One through autograd may not: it runs on the stream that the
        forward ran on.
    """

    name: str
    outputs: tuple[str | None, ...]
    prepare: Callable[[Tensors], Call]
    graph: bool = True

    def results(self, value: Any) -> dict[str, torch.Tensor]:
        """What a call returned, by role."""
        values = value if isinstance(value, tuple) else (value,)
        return {role: v for role, v in zip(self.outputs, values, strict=True) if role is not None}


def peer(problem: Problem) -> Peer:
    """The framework's way to do what a problem says.

    Raises
    ------
    NotSupported
        It has none; says why.

    Examples
    --------
    >>> p = peer(Problem.parse("conv_fprop x=f32[1,1,3,3] w=f32[1,1,3,3] padding=1 act=relu"))
    >>> p.name
    'F.conv2d + relu_'
    >>> p.prepare({"x": torch.ones(1, 1, 3, 3), "w": -torch.ones(1, 1, 3, 3)})().sum().item()
    0.0
    """
    from .peers import dropped_in  # its files import this one

    make = _PEERS.get(problem.op.name) or dropped_in().get(problem.op.name)
    if make is None:
        raise NotSupported(f"the framework's side of {problem.op.name} is not known")
    return make(problem)


def linear_peer(problem: Problem) -> Peer:
    """The framework's way where a convolution over one point stands for a linear layer: its matrix products.

    Examples
    --------
    >>> linear_peer(Problem.parse("conv_fprop x=f32[8,16,1] w=f32[4,16,1]")).name
    'F.linear'
    """
    kind = problem.op.name

    def flat(t: torch.Tensor) -> torch.Tensor:
        return t.flatten(1) if t.ndim > 1 else t

    def fprop(t: Tensors) -> Call:
        return functools.partial(F.linear, flat(t["x"]), flat(t["w"]), t.get("bias"))

    def dgrad(t: Tensors) -> Call:
        return functools.partial(torch.mm, flat(t["dy"]), flat(t["w"]))

    def wgrad(t: Tensors) -> Call:
        return functools.partial(torch.mm, flat(t["dy"]).t(), flat(t["x"]))

    def bgrad(t: Tensors) -> Call:
        return functools.partial(torch.sum, flat(t["dy"]), 0)

    name, prepare = {
        "conv_fprop": ("F.linear", fprop),
        "conv_dgrad": ("mm(dy, w)", dgrad),
        "conv_wgrad": ("mm(dy.t(), x)", wgrad),
        "conv_bgrad": ("sum(dy, 0)", bgrad),
    }[kind]
    shaped = problem[problem.outputs[0]].shape

    def reshaped(t: Tensors) -> Call:
        call = prepare(t)
        return lambda: call().view(shaped)

    return Peer(name, problem.outputs, reshaped)


@contextlib.contextmanager
def flags(problem: Problem) -> Iterator[None]:
    """The framework's flags for a fair comparison: cuDNN searches, TF32 as the problem's math mode says."""
    allowed = problem.math == "tf32"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=allowed):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---- activations and the rest of an epilogue ---------------------------------------------------------------

_ACTIVATIONS: dict[str, tuple[str, Callable[[torch.Tensor, float], torch.Tensor]]] = {
    "relu": ("relu_", lambda v, p: torch.relu_(v)),
    "clipped_relu": ("hardtanh_", lambda v, p: F.hardtanh_(v, 0.0, p)),
    "leaky_relu": ("leaky_relu_", F.leaky_relu_),
    "elu": ("elu_", F.elu_),
    "sigmoid": ("sigmoid_", lambda v, p: v.sigmoid_()),
    "tanh": ("tanh_", lambda v, p: v.tanh_()),
    "silu": ("silu_", lambda v, p: F.silu(v, inplace=True)),
    "gelu": ("gelu", lambda v, p: F.gelu(v)),
    "gelu_tanh": ("gelu(tanh)", lambda v, p: F.gelu(v, approximate="tanh")),
    "softplus": ("softplus", lambda v, p: F.softplus(v)),
    "hardswish": ("hardswish_", lambda v, p: F.hardswish(v, inplace=True)),
    "hardsigmoid": ("hardsigmoid_", lambda v, p: F.hardsigmoid(v, inplace=True)),
    "mish": ("mish_", lambda v, p: F.mish(v, inplace=True)),
}

# What the framework's gradient reads: the activation's input v, or its output.
_GRADIENTS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]]] = {
    "relu": ("aten.threshold_backward", lambda dy, v, p: aten.threshold_backward(dy, v, 0)),
    "clipped_relu": ("aten.hardtanh_backward", lambda dy, v, p: aten.hardtanh_backward(dy, v, 0.0, p)),
    "leaky_relu": ("aten.leaky_relu_backward", lambda dy, v, p: aten.leaky_relu_backward(dy, v, p, False)),
    "elu": ("aten.elu_backward", lambda dy, v, p: aten.elu_backward(dy, p, 1, 1, False, v)),
    "sigmoid": ("aten.sigmoid_backward", lambda dy, out, p: aten.sigmoid_backward(dy, out)),
    "tanh": ("aten.tanh_backward", lambda dy, out, p: aten.tanh_backward(dy, out)),
    "silu": ("aten.silu_backward", lambda dy, v, p: aten.silu_backward(dy, v)),
    "gelu": ("aten.gelu_backward", lambda dy, v, p: aten.gelu_backward(dy, v)),
    "gelu_tanh": ("aten.gelu_backward", lambda dy, v, p: aten.gelu_backward(dy, v, approximate="tanh")),
    "softplus": ("aten.softplus_backward", lambda dy, v, p: aten.softplus_backward(dy, v, 1, 20)),
    "hardswish": ("aten.hardswish_backward", lambda dy, v, p: aten.hardswish_backward(dy, v)),
    "hardsigmoid": ("aten.hardsigmoid_backward", lambda dy, v, p: aten.hardsigmoid_backward(dy, v)),
    "mish": ("aten.mish_backward", lambda dy, v, p: aten.mish_backward(dy, v)),
}
_FROM_OUTPUT = {"sigmoid": torch.sigmoid, "tanh": torch.tanh}


def _finish(problem: Problem, bias_done: bool = False) -> tuple[list[str], Callable[[torch.Tensor, Tensors], Any]]:
    """What comes after the main kernel: its names, and a function that does it in place on a result."""
    e: Epilogue = problem.epilogue
    shape = (1, -1, *[1] * (problem[problem.outputs[0]].ndim - 2))
    out = _dtype(problem, problem.outputs[0])
    names: list[str] = []
    steps: list[Callable[[torch.Tensor, Tensors], torch.Tensor]] = []
    if e.alpha != 1.0:
        names.append("mul_")
        steps.append(lambda v, t: v.mul_(e.alpha))
    if "scale" in problem.inputs:
        names.append("mul_(scale)")
        steps.append(lambda v, t: v.mul_(t["scale"].reshape(shape)))
    if "z" in problem.inputs:
        names.append("add_(z)")
        steps.append(lambda v, t: v.add_(t["z"], alpha=e.beta))
    if "bias" in problem.inputs and not bias_done:
        names.append("add_(bias)")
        steps.append(lambda v, t: v.add_(t["bias"].reshape(shape)))
    if e.activation != "identity":
        name, activate = _ACTIVATIONS[e.activation]
        names.append(name)
        steps.append(lambda v, t: activate(v, e.parameter))
    if problem[problem.outputs[0]].dtype != problem.items[0][1].dtype:
        names.append("to")
        steps.append(lambda v, t: v.to(out))

    def finish(v: torch.Tensor, t: Tensors) -> torch.Tensor:
        for step in steps:
            v = step(v, t)
        return v

    return names, finish


def _dtype(problem: Problem, role: str) -> torch.dtype:
    from ..core.descriptor import DTYPES

    return getattr(torch, DTYPES[problem[role].dtype][0])


# ---- convolution -------------------------------------------------------------------------------------------


def _geometry(problem: Problem) -> tuple[int, list[int], list[int], list[int], list[int] | None]:
    """Number of axes, stride, even padding, dilation; and, where a tensor has to be padded first, with how much."""
    op: Any = problem.op
    before, after = zip(*op.padding, strict=True)
    uneven = None
    if problem.items[0][1].itemsize == 1:
        raise NotSupported(f"the framework has no convolution of {problem.items[0][1].dtype} with wide sums")
    if op.padding_mode != "zeros" and problem.op.name == "conv_dgrad":
        raise NotSupported(f"the framework has no data gradient of a convolution with padding mode {op.padding_mode}")
    if before != after or op.padding_mode != "zeros":
        uneven = [n for pair in reversed(op.padding) for n in pair]
        before = (0,) * len(before)
    return len(op.stride), list(op.stride), list(before), list(op.dilation), uneven


def _turned(problem: Problem, w: torch.Tensor) -> torch.Tensor:
    """The filter as the framework's cross-correlation wants it."""
    return w.flip(*range(2, w.ndim)) if problem.op.flip else w  # type: ignore[attr-defined]


def _pad(problem: Problem, x: torch.Tensor, pads: list[int] | None) -> torch.Tensor:
    mode = problem.op.padding_mode  # type: ignore[attr-defined]
    return x if pads is None else F.pad(x, pads, "constant" if mode == "zeros" else mode)


def _fprop(problem: Problem) -> Peer:
    ndim, stride, pads, dilation, uneven = _geometry(problem)
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[ndim - 1]
    fused = "bias" in problem.inputs and problem.epilogue.alpha == 1.0 and not {"z", "scale"} & set(problem.inputs)
    names, finish = _finish(problem, bias_done=fused)
    groups = problem.op.groups  # type: ignore[attr-defined]

    def prepare(t: Tensors) -> Call:
        bias = t["bias"].to(t["x"].dtype) if fused else None

        def call() -> torch.Tensor:
            x = _pad(problem, t["x"], uneven)
            return finish(convolve(x, _turned(problem, t["w"]), bias, stride, pads, dilation, groups), t)

        return call

    flip = ["flip"] if problem.op.flip else []  # type: ignore[attr-defined]
    around = [*(["F.pad"] if uneven else []), *flip]
    return Peer(" + ".join([*around, f"F.conv{ndim}d", *names]), problem.outputs, prepare)


def _backward(problem: Problem, mask: list[bool]) -> Peer:
    ndim, stride, pads, dilation, uneven = _geometry(problem)
    groups = problem.op.groups  # type: ignore[attr-defined]
    names, finish = _finish(problem)
    data = mask[0]
    x_role, w_role = ("dx", "w") if data else ("x", "dw")
    x_shape = list(problem[x_role].shape)

    def prepare(t: Tensors) -> Call:
        x = torch.empty_like(t["dx"]) if data else t["x"]  # for dgrad only its shape and memory format are read
        w = t["w"] if data else torch.empty_like(t["dw"])
        padded = F.pad(x, uneven) if uneven else x

        def call() -> torch.Tensor:
            wide = padded if uneven is None or data else _pad(problem, x, uneven)
            turned = _turned(problem, w) if data else w
            found = aten.convolution_backward(
                t["dy"], wide, turned, None, stride, pads, dilation, False, [0] * ndim, groups, mask
            )
            result = found[0] if data else _turned(problem, found[1])
            if uneven and data:
                for axis, (first, _) in enumerate(problem.op.padding):  # type: ignore[attr-defined]
                    result = result.narrow(2 + axis, first, x_shape[2 + axis])
                result = result.contiguous()
            return finish(result, t)

        return call

    around = ["contiguous" if data else "F.pad"] if uneven else []
    return Peer(" + ".join(["aten.convolution_backward", *around, *names]), problem.outputs, prepare)


def _bgrad(problem: Problem) -> Peer:
    ndim = problem["dy"].ndim
    axes = [axis for axis in range(ndim) if axis != 1]
    out = _dtype(problem, "db")
    return Peer("sum(dy)", problem.outputs, lambda t: lambda: torch.sum(t["dy"], axes, dtype=out))


# ---- pooling -----------------------------------------------------------------------------------------------


def _even_padding(problem: Problem) -> list[int]:
    padding = problem.op.padding  # type: ignore[attr-defined]
    if any(a != b for a, b in padding):
        raise NotSupported("the framework pads both sides of a pooled axis alike")
    return [a for a, _ in padding]


def _pool_fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim, pads = len(op.window), _even_padding(problem)
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1]
    indices = op.index_type != "none"
    given = {
        "stride": op.stride,
        "padding": pads,
        "dilation": op.dilation,
        "ceil_mode": op.ceil_mode,
        "return_indices": indices,
    }

    def prepare(t: Tensors) -> Call:
        return lambda: pool(t["x"], op.window, **given)

    outputs = ("y", "index" if op.index_type == "i64" else None) if indices else ("y",)
    return Peer(f"F.max_pool{ndim}d", outputs, prepare)


def _pool_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    if op.index_type == "none":
        raise NotSupported("without an index there is no gradient")
    pads, sizes = _even_padding(problem), problem["dx"].shape[2:]
    ndim = len(op.window)
    flat = ndim == 1  # the framework's one-dimensional gradient is its two-dimensional one
    backward = aten.max_pool3d_with_indices_backward if ndim == 3 else aten.max_pool2d_with_indices_backward
    window, stride, padding, dilation = (
        ([fill] if flat else []) + list(values)
        for fill, values in ((1, op.window), (1, op.stride), (0, pads), (1, op.dilation))
    )

    def prepare(t: Tensors) -> Call:
        from ..functional.pooling import _in_plane

        x = torch.empty_like(t["dx"])
        index = t["index"].long()
        if op.index_type == "u8":
            index = _in_plane(index, sizes, op.window, op.stride, pads, op.dilation)
        index = torch.empty_strided(t["dy"].shape, t["dy"].stride(), dtype=index.dtype, device=index.device).copy_(
            index
        )
        dy = t["dy"]
        if flat:
            x, index, dy = x.unsqueeze(2), index.unsqueeze(2), dy.unsqueeze(2)

        def call() -> torch.Tensor:
            dx = backward(dy, x, window, stride, padding, dilation, op.ceil_mode, index)
            return dx.squeeze(2) if flat else dx

        return call

    return Peer(f"aten.max_pool{max(ndim, 2)}d_with_indices_backward", problem.outputs, prepare)


# ---- pointwise ---------------------------------------------------------------------------------------------


def _pointwise_fwd(problem: Problem) -> Peer:
    e = problem.epilogue
    if e.activation == "relu" and e.alpha == 1.0 and problem.inputs == ("x",):
        return Peer("torch.relu", problem.outputs, lambda t: lambda: torch.relu(t["x"]))
    names, finish = _finish(problem)
    return Peer(" + ".join(["clone", *names]), problem.outputs, lambda t: lambda: finish(t["x"].clone(), t))


def _pointwise_bwd(problem: Problem) -> Peer:
    e = problem.epilogue
    if e.activation == "identity":
        return Peer("mul", problem.outputs, lambda t: lambda: torch.mul(t["dy"], e.alpha))
    name, gradient = _GRADIENTS[e.activation]
    told = getattr(problem.op, "from_output", False)
    if told and e.activation == "elu":
        gradient = lambda dy, y, p: torch.ops.aten.elu_backward(dy, p, 1.0, 1.0, True, y)  # noqa: E731

    def prepare(t: Tensors) -> Call:
        source = t["x"] if told else _FROM_OUTPUT.get(e.activation, lambda v: v)(t["x"])
        if e.alpha == 1.0:
            return lambda: gradient(t["dy"], source, e.parameter)
        return lambda: gradient(t["dy"], source, e.parameter).mul_(e.alpha)

    return Peer(name + ("" if e.alpha == 1.0 else " + mul_"), problem.outputs, prepare)


_PEERS: dict[str, Callable[[Problem], Peer]] = {
    "conv_fprop": _fprop,
    "conv_dgrad": lambda problem: _backward(problem, [True, False, False]),
    "conv_wgrad": lambda problem: _backward(problem, [False, True, False]),
    "conv_bgrad": _bgrad,
    "max_pool_fwd": _pool_fwd,
    "max_pool_bwd": _pool_bwd,
    "pointwise_fwd": _pointwise_fwd,
    "pointwise_bwd": _pointwise_bwd,
}
