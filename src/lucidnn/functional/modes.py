"""cuDNN's pointwise modes by their own names, and the activations and gradients that the framework has no name for.

``docs/pointwise-modes.md`` lists every mode with the function that is the same without a name in a string.
"""

from __future__ import annotations

import math

import torch

from ..core.errors import InvalidArgument
from ..ops.activation import ACTIVATIONS
from ..ops.elementwise import MODES
from .elementwise import pointwise_tensor
from .pointwise import pointwise_bwd, pointwise_fwd

# cuDNN's name of an activation, and the one in `lucidnn.ops.activation`.
_ACTIVATIONS = {
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "elu": "elu",
    "gelu": "gelu",
    "gelu_approx_tanh": "gelu_tanh",
    "softplus": "softplus",
    "swish": "silu",
}
_ARITHMETIC = tuple(mode for mode in MODES if mode not in ("relu", "relu_bwd", "clip", "not"))
POINTWISE_MODES = (
    *_ARITHMETIC,
    "relu_fwd",
    "relu_bwd",
    *(f"{name}_{way}" for name in _ACTIVATIONS for way in ("fwd", "bwd")),
)


def clipped_relu(input, lower=0.0, upper=math.inf, slope=0.0):
    """``input`` between two limits: `upper` above, below `lower` a line of slope `slope` from there.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.
    lower, upper : float
        ``lower <= upper``.
    slope : float

    Returns
    -------
    torch.Tensor
        ``upper`` where ``input >= upper``, ``input`` where it is above `lower`, else ``lower + slope * (input -
        lower)``. The gradient is 0 at `upper` and `slope` at `lower`.

    Examples
    --------
    >>> clipped_relu(torch.tensor([-2.0, 0.5, 9.0]), lower=-1.0, upper=6.0, slope=0.5)
    tensor([-1.5000,  0.5000,  6.0000])
    """
    return pointwise_tensor("relu", input, lower=lower, upper=upper, slope=slope)


def clipped_relu_backward(grad, input, lower=0.0, upper=math.inf, slope=0.0):
    """What `clipped_relu` passes back of a gradient.

    Examples
    --------
    >>> clipped_relu_backward(torch.ones(3), torch.tensor([-2.0, 0.5, 9.0]), upper=6.0, slope=0.25)
    tensor([0.2500, 1.0000, 0.0000])
    """
    return pointwise_tensor("relu_bwd", grad, input, lower=lower, upper=upper, slope=slope)


def swish(input, beta=1.0):
    """``input * sigmoid(beta * input)``.

    Examples
    --------
    >>> swish(torch.tensor([1.0]), beta=2.0)
    tensor([0.8808])
    """
    _check("input", input)
    if not beta:
        raise InvalidArgument("beta", beta, "a number other than 0")
    found = pointwise_fwd(input, None, None, float(beta), 0.0, "silu", 0.0)
    return found if beta == 1.0 else pointwise_tensor("identity", found, alpha1=1.0 / beta)


def activation_backward(grad, input, activation, parameter=None, *, beta=1.0):
    """The gradient of an activation: ``grad * act'(beta * input)``.

    Parameters
    ----------
    grad, input : torch.Tensor
        The gradient of the activation's result, and what the activation was given; one shape.
    activation : str
        Name from `lucidnn.ops.activation.ACTIVATIONS`.
    parameter : float, optional
        The activation's parameter, where it has one; its default if left out.
    beta : float
        Of ``act(beta * input) / beta``: swish and softplus with a scale.

    Examples
    --------
    >>> activation_backward(torch.ones(2), torch.tensor([-1.0, 0.0]), "elu", 2.0)
    tensor([0.7358, 2.0000])
    """
    _check("grad", grad)
    _check("input", input)
    if parameter is None:
        parameter = ACTIVATIONS[activation].parameter or 0.0 if activation in ACTIVATIONS else 0.0
    if beta != 1.0:
        input = pointwise_tensor("identity", input, alpha1=beta)
    return pointwise_bwd(grad, input, 1.0, activation, float(parameter))


def pointwise_mode(
    mode, x, b=None, t=None, *, axis=0, relu_lower_clip=0.0, relu_upper_clip=math.inf, relu_lower_clip_slope=0.0,
    elu_alpha=1.0, softplus_beta=1.0, swish_beta=1.0,
):  # fmt: skip
    """One of cuDNN's pointwise modes, ``CUDNN_POINTWISE_`` taken off and in small letters.

    Parameters
    ----------
    mode : str
        One of `POINTWISE_MODES`, such as ``add`` or ``relu_bwd``.
    x : torch.Tensor
        The gradient in modes that end in ``_bwd``.
    b : torch.Tensor, optional
        The second tensor; what the activation was given in modes that end in ``_bwd``.
    t : torch.Tensor, optional
        The predicate of binary_select.
    axis : int
        Of gen_index.
    relu_lower_clip, relu_upper_clip, relu_lower_clip_slope, elu_alpha, softplus_beta, swish_beta : float
        cuDNN's attributes of the modes that they name.

    Raises
    ------
    InvalidArgument
        A name that is no mode, tensors that the mode does not read or lacks.

    Examples
    --------
    >>> x = torch.tensor([-1.0, 2.0])
    >>> pointwise_mode("relu_fwd", x, relu_lower_clip_slope=0.5), pointwise_mode("add", x, x)
    (tensor([-0.5000,  2.0000]), tensor([-2.,  4.]))
    """
    if mode not in POINTWISE_MODES:
        raise InvalidArgument("mode", repr(mode), ", ".join(POINTWISE_MODES))
    if mode in _ARITHMETIC:
        return pointwise_tensor(mode, x, b, t, axis=axis)
    name, _, way = mode.rpartition("_")
    if t is not None or (b is None) != (way == "fwd"):
        found = "t" if t is not None else "b" if b is not None else "no b"
        raise InvalidArgument("b", found, f"{mode} reads {'x' if way == 'fwd' else 'x and b'}")
    if name == "relu":
        limits = (relu_lower_clip, relu_upper_clip, relu_lower_clip_slope)
        return clipped_relu(x, *limits) if way == "fwd" else clipped_relu_backward(x, b, *limits)
    beta = {"softplus": softplus_beta, "swish": swish_beta}.get(name, 1.0)
    parameter = float(elu_alpha) if name == "elu" else 0.0
    activation = _ACTIVATIONS[name]
    if way == "bwd":
        return activation_backward(x, b, activation, parameter, beta=beta)
    _check("x", x)
    if not beta:
        raise InvalidArgument(f"{name}_beta", beta, "a number other than 0")
    found = pointwise_fwd(x, None, None, float(beta), 0.0, activation, parameter)
    return found if beta == 1.0 else pointwise_tensor("identity", found, alpha1=1.0 / beta)


def _check(name: str, t: object) -> None:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(name, type(t).__name__, "a torch tensor")
