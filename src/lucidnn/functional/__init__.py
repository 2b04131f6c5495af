"""Functions on framework tensors, with the framework's names and arguments, gradients included.

>>> import torch
>>> from lucidnn.functional import conv2d, max_pool2d, relu
>>> x = torch.randn(2, 3, 8, 8)
>>> w = torch.randn(4, 3, 3, 3, requires_grad=True)
>>> max_pool2d(relu(conv2d(x, w, padding=1)), 2).sum().backward()
>>> w.grad.shape
torch.Size([4, 3, 3, 3])
"""

from .activation import (
    elu,
    gelu,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    mish,
    relu6,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from .adaptive_pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
)
from .average_pooling import avg_pool1d, avg_pool2d, avg_pool3d, lp_pool1d, lp_pool2d, lp_pool3d
from .batch_normalization import batch_norm
from .convolution import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d, linear
from .cross_entropy import cross_entropy, nll_loss
from .dropout import DropoutGenerator, alpha_dropout, dropout, dropout1d, dropout2d, dropout3d, feature_alpha_dropout
from .elementwise import add_tensor, op_tensor, pointwise_tensor, scale_tensor, set_tensor
from .folding import channel_shuffle, fold, pixel_shuffle, pixel_unshuffle, unfold
from .grid_sample import affine_grid, grid_sample
from .local_response import divisive_normalization, local_response_norm
from .lp_normalization import normalize, weight_norm
from .modes import POINTWISE_MODES, activation_backward, clipped_relu, clipped_relu_backward, pointwise_mode, swish
from .normalization import group_norm, instance_norm, layer_norm, rms_norm
from .pointwise import relu
from .pooling import max_pool1d, max_pool2d, max_pool3d
from .reduction import amax, amin, max, mean, min, norm, prod, reduce_tensor, sum, vector_norm
from .resampling import interpolate, upsample
from .softmax import log_softmax, softmax, softmin
from .sync_batch_norm import sync_batch_norm
from .transform import transform_tensor
from .unpooling import max_unpool1d, max_unpool2d, max_unpool3d

__all__ = [
    "DropoutGenerator",
    "POINTWISE_MODES",
    "activation_backward",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "add_tensor",
    "affine_grid",
    "alpha_dropout",
    "amax",
    "amin",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "channel_shuffle",
    "clipped_relu",
    "clipped_relu_backward",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "divisive_normalization",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "elu",
    "feature_alpha_dropout",
    "fold",
    "gelu",
    "grid_sample",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "instance_norm",
    "interpolate",
    "layer_norm",
    "leaky_relu",
    "linear",
    "local_response_norm",
    "log_softmax",
    "lp_pool1d",
    "lp_pool2d",
    "lp_pool3d",
    "max",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_unpool1d",
    "max_unpool2d",
    "max_unpool3d",
    "mean",
    "min",
    "mish",
    "nll_loss",
    "norm",
    "normalize",
    "op_tensor",
    "pixel_shuffle",
    "pixel_unshuffle",
    "pointwise_mode",
    "pointwise_tensor",
    "prod",
    "reduce_tensor",
    "relu",
    "relu6",
    "rms_norm",
    "scale_tensor",
    "set_tensor",
    "sigmoid",
    "silu",
    "softmax",
    "softmin",
    "softplus",
    "sum",
    "swish",
    "sync_batch_norm",
    "tanh",
    "transform_tensor",
    "unfold",
    "upsample",
    "vector_norm",
    "weight_norm",
]
