"""The framework's activation modules and functions in lucidnn's terms: a name and a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as T

from ..core.errors import InvalidArgument, NotSupported
from ..ops.activation import ACTIVATIONS, check_activation

Named = tuple[str, float]

_MODULES: dict[type, str] = {
    torch.nn.Identity: "identity",
    torch.nn.ReLU: "relu",
    torch.nn.Sigmoid: "sigmoid",
    torch.nn.Tanh: "tanh",
    torch.nn.SiLU: "silu",
    torch.nn.Hardswish: "hardswish",
    torch.nn.Hardsigmoid: "hardsigmoid",
    torch.nn.Mish: "mish",
}
FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", torch.relu_: "relu", T.relu: "relu", T.relu_: "relu", T.relu6: "relu6",
    torch.sigmoid: "sigmoid", T.sigmoid: "sigmoid", torch.tanh: "tanh", T.tanh: "tanh", T.silu: "silu",
    T.gelu: "gelu", T.hardswish: "hardswish", T.hardsigmoid: "hardsigmoid", T.mish: "mish",
    T.leaky_relu: "leaky_relu", T.elu: "elu", T.softplus: "softplus",
}  # fmt: skip
"""The framework's functions of one tensor; what else they are given is in `from_call`'s hands."""


def activation_of(activation: Any) -> Named:
    """Name and parameter of an activation.

    Parameters
    ----------
    activation : str, torch.nn.Module or None
        A name of `lucidnn.ops.activation`, one of the framework's modules, or None for none.

    Raises
    ------
    NotSupported
        The module is of a kind, or has numbers, that no fused kernel knows.

    Examples
    --------
    >>> activation_of("leaky_relu"), activation_of(torch.nn.ReLU6()), activation_of(None)
    (('leaky_relu', 0.01), ('clipped_relu', 6.0), ('identity', 0.0))
    """
    if activation is None:
        return "identity", 0.0
    if isinstance(activation, str):
        parameter = ACTIVATIONS[activation].parameter if activation in ACTIVATIONS else None
        check_activation(activation, parameter or 0.0)
        return activation, parameter or 0.0
    if not isinstance(activation, torch.nn.Module):
        raise InvalidArgument("activation", type(activation).__name__, "a name, a module or None")
    module: Any = activation
    kind = type(module)
    if kind in _MODULES:
        return _MODULES[kind], 0.0
    if kind is torch.nn.LeakyReLU:
        return "leaky_relu", float(module.negative_slope)
    if kind is torch.nn.ELU:
        return "elu", float(module.alpha)
    if kind is torch.nn.GELU:
        return ("gelu" if module.approximate == "none" else "gelu_tanh"), 0.0
    if kind in (torch.nn.ReLU6, torch.nn.Hardtanh) and module.min_val == 0 and module.max_val >= 0:
        return "clipped_relu", float(module.max_val)
    if kind is torch.nn.Softplus and module.beta == 1 and module.threshold >= 20:
        return "softplus", 0.0
    raise NotSupported(f"no fused kernel has the activation {activation}")


def from_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Name and parameter of a call of one of `FUNCTIONS`, its tensor left out of `args`."""
    name = FUNCTIONS[function]
    kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    if name == "relu6":
        return "clipped_relu", 6.0
    if name == "gelu":
        return activation_of(torch.nn.GELU(*args, **kwargs))
    if name in ("leaky_relu", "elu", "softplus"):
        module = {"leaky_relu": torch.nn.LeakyReLU, "elu": torch.nn.ELU, "softplus": torch.nn.Softplus}[name]
        return activation_of(module(*args, **kwargs))
    return name, 0.0
