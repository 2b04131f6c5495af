"""Activations on tensors, with the framework's names and arguments; all of them are ``pointwise_fwd``.

The formulas are those of `lucidnn.ops.activation`. NaN stays NaN, and every one can be differentiated twice.
"""

from __future__ import annotations

import torch

from ..core.errors import InvalidArgument, NotSupported
from .elementwise import pointwise_tensor
from .pointwise import pointwise_fwd


def _activated(input: torch.Tensor, activation: str, parameter: float = 0.0, alpha: float = 1.0) -> torch.Tensor:
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    return pointwise_fwd(input, None, None, float(alpha), 0.0, activation, float(parameter))


def leaky_relu(input, negative_slope=0.01):
    """``input`` where it is positive, else ``negative_slope * input``.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16. The same for all activations here.
    negative_slope : float

    Examples
    --------
    >>> leaky_relu(torch.tensor([-1.0, 2.0]), 0.5)
    tensor([-0.5000,  2.0000])
    """
    return _activated(input, "leaky_relu", negative_slope)


def elu(input, alpha=1.0):
    """``input`` where it is positive, else ``alpha * (exp(input) - 1)``.

    Examples
    --------
    >>> elu(torch.tensor([-1.0, 2.0]))
    tensor([-0.6321,  2.0000])
    """
    return _activated(input, "elu", alpha)


def sigmoid(input):
    """``1 / (1 + exp(-input))``.

    Examples
    --------
    >>> sigmoid(torch.tensor([0.0]))
    tensor([0.5000])
    """
    return _activated(input, "sigmoid")


def tanh(input):
    """The hyperbolic tangent.

    Examples
    --------
    >>> tanh(torch.tensor([1.0]))
    tensor([0.7616])
    """
    return _activated(input, "tanh")


def silu(input):
    """``input * sigmoid(input)``, which cuDNN calls swish.

    Examples
    --------
    >>> silu(torch.tensor([1.0]))
    tensor([0.7311])
    """
    return _activated(input, "silu")


def gelu(input, approximate="none"):
    """``input`` times the normal distribution up to it, exact or by a hyperbolic tangent.

    Parameters
    ----------
    input : torch.Tensor
    approximate : {'none', 'tanh'}

    Examples
    --------
    >>> gelu(torch.tensor([1.0])), gelu(torch.tensor([1.0]), approximate="tanh")
    (tensor([0.8413]), tensor([0.8412]))
    """
    if approximate not in ("none", "tanh"):
        raise InvalidArgument("approximate", repr(approximate), "'none' or 'tanh'")
    return _activated(input, "gelu" if approximate == "none" else "gelu_tanh")


def softplus(input, beta=1, threshold=20):
    """``log(1 + exp(beta * input)) / beta``, exact also past the framework's threshold.

    Parameters
    ----------
    input : torch.Tensor
    beta : float
        Not 0.
    threshold : float
        Where the framework goes over to the input itself; 20 or more, where that makes no difference.

    Examples
    --------
    >>> softplus(torch.tensor([0.0]))
    tensor([0.6931])
    """
    if not beta:
        raise InvalidArgument("beta", beta, "a number other than 0")
    if threshold < 20:
        raise NotSupported(f"softplus with a threshold of {threshold}; accepted: 20 or more")
    found = _activated(input, "softplus", alpha=beta)
    return found if beta == 1 else pointwise_tensor("identity", found, alpha1=1.0 / beta)


def hardswish(input):
    """``input * min(max(input + 3, 0), 6) / 6``.

    Examples
    --------
    >>> hardswish(torch.tensor([-4.0, 0.0, 4.0]))
    tensor([-0., 0., 4.])
    """
    return _activated(input, "hardswish")


def hardsigmoid(input):
    """``min(max(input + 3, 0), 6) / 6``.

    Examples
    --------
    >>> hardsigmoid(torch.tensor([-4.0, 0.0, 4.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return _activated(input, "hardsigmoid")


def relu6(input):
    """``min(max(input, 0), 6)``.

    Examples
    --------
    >>> relu6(torch.tensor([-1.0, 3.0, 9.0]))
    tensor([0., 3., 6.])
    """
    return _activated(input, "clipped_relu", 6.0)


def hardtanh(input, min_val=-1.0, max_val=1.0):
    """``min(max(input, min_val), max_val)``; the gradient is 0 at both ends.

    Examples
    --------
    >>> hardtanh(torch.tensor([-2.0, 0.5, 2.0]))
    tensor([-1.0000,  0.5000,  1.0000])
    """
    if not min_val <= max_val:
        raise InvalidArgument("min_val", min_val, f"a number that is at most max_val, {max_val}")
    if min_val == 0.0:
        return _activated(input, "clipped_relu", max_val)
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    return pointwise_tensor("clip", input, lower=min_val, upper=max_val)


def mish(input):
    """``input * tanh(softplus(input))``.

    Examples
    --------
    >>> mish(torch.tensor([1.0]))
    tensor([0.8651])
    """
    return _activated(input, "mish")
