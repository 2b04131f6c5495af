"""Functions on framework tensors, with the framework's names and arguments, gradients included.

>>> import torch
>>> from lucidnn.functional import conv2d, max_pool2d, relu
>>> x = torch.randn(2, 3, 8, 8)
>>> w = torch.randn(4, 3, 3, 3, requires_grad=True)
>>> max_pool2d(relu(conv2d(x, w, padding=1)), 2).sum().backward()
>>> w.grad.shape
torch.Size([4, 3, 3, 3])
"""

from .convolution import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d, linear
from .pointwise import relu
from .pooling import max_pool1d, max_pool2d, max_pool3d

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "relu",
]
