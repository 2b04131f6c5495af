"""Activations, shared by the pointwise operations and by every epilogue.

One table gives each activation its code (what kernels are compiled with), its formula and its parameter. The kernels'
versions live in ``engines/_triton/epilogue.py`` and ``engines/_numba/epilogue.py``; tests hold them to the definitions
in the reference engine. NaN in gives NaN out, always.
"""

from __future__ import annotations

import dataclasses

from ..core.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Activation:
    """One row of the table.

    Attributes
    ----------
    code : int
        Constant under which kernels know it.
    formula : str
        With v the input and p the parameter.
    parameter : float or None
        Default of p; None where there is none.
    """

    code: int
    formula: str
    parameter: float | None = None


_TABLE: tuple[tuple[str, str, float | None], ...] = (
    ("identity", "v", None),
    ("relu", "max(v, 0)", None),
    ("clipped_relu", "min(max(v, 0), p)", 6.0),
    ("leaky_relu", "v if v > 0 else p*v", 0.01),
    ("elu", "v if v > 0 else p*(exp(v) - 1)", 1.0),
    ("sigmoid", "1 / (1 + exp(-v))", None),
    ("tanh", "tanh(v)", None),
    ("silu", "v * sigmoid(v)", None),
    ("gelu", "v/2 * (1 + erf(v/sqrt(2)))", None),
    ("gelu_tanh", "v/2 * (1 + tanh(sqrt(2/pi)*(v + 0.044715*v^3)))", None),
    ("softplus", "log(1 + exp(v))", None),
    ("hardswish", "v * min(max(v + 3, 0), 6) / 6", None),
    ("hardsigmoid", "min(max(v + 3, 0), 6) / 6", None),
    ("mish", "v * tanh(log(1 + exp(v)))", None),
)

ACTIVATIONS: dict[str, Activation] = {
    name: Activation(code, formula, parameter) for code, (name, formula, parameter) in enumerate(_TABLE)
}


def check_activation(name: str, parameter: float) -> None:
    """Raise `InvalidArgument` unless the activation exists and its parameter makes sense.

    Examples
    --------
    >>> check_activation("relu", 0.0)
    >>> check_activation("rleu", 0.0)
    Traceback (most recent call last):
    ...
    lucidnn.core.errors.InvalidArgument: activation: found 'rleu'; accepted: identity, relu, clipped_relu, leaky_relu, \
elu, sigmoid, tanh, silu, gelu, gelu_tanh, softplus, hardswish, hardsigmoid, mish
    """
    if name not in ACTIVATIONS:
        raise InvalidArgument("activation", repr(name), ", ".join(ACTIVATIONS))
    if ACTIVATIONS[name].parameter is None and parameter != 0.0:
        raise InvalidArgument("activation", f"{name} with parameter {parameter}", f"{name} without a parameter")
    if name == "clipped_relu" and not parameter >= 0.0:
        raise InvalidArgument("activation", f"clipped_relu with clip {parameter}", "a clip >= 0")
