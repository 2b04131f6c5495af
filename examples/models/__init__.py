"""Well-known architectures in plain PyTorch, each with a size argument: what lucidnn is tried on as a whole.

Written from the published descriptions; nothing here knows of lucidnn. `MODELS` maps a name to a function that makes
a small instance and an input for it; the classes themselves make the full ones.

>>> import torch
>>> from examples.models import resnet18
>>> resnet18(classes=10, width=8)(torch.zeros(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .convnext import ConvNeXt, convnext_t
from .dcgan import Discriminator, Generator
from .efficientnet import EfficientNet, efficientnet_b0
from .mobilenet import MobileNetV2
from .resnet import Bottleneck, ResNet, resnet18, resnet50
from .unet import UNet
from .vgg import VGG, vgg16_bn
from .video_vae import VideoVAE
from .wav2vec import Wav2VecEncoder

__all__ = [
    "MODELS",
    "VGG",
    "ConvNeXt",
    "Discriminator",
    "EfficientNet",
    "Generator",
    "MobileNetV2",
    "ResNet",
    "UNet",
    "VideoVAE",
    "Wav2VecEncoder",
    "convnext_t",
    "efficientnet_b0",
    "resnet18",
    "resnet50",
    "vgg16_bn",
]

MODELS: dict[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
    "resnet18": lambda: (resnet18(classes=10, width=8), (2, 3, 64, 64)),
    "resnet50": lambda: (ResNet(Bottleneck, (1, 1, 1, 1), 10, 8), (2, 3, 64, 64)),
    "vgg16_bn": lambda: (vgg16_bn(classes=10, width=8, hidden=16, pooled=1), (2, 3, 32, 32)),
    "mobilenet_v2": lambda: (MobileNetV2(classes=10, multiplier=0.25), (2, 3, 64, 64)),
    "efficientnet_b0": lambda: (EfficientNet(classes=10, width=0.25, drop=0.0, survive=1.0), (2, 3, 64, 64)),
    "convnext_t": lambda: (ConvNeXt(classes=10, depths=(1, 1, 2, 1), width=8), (2, 3, 32, 32)),
    "unet": lambda: (UNet(width=8, levels=2), (2, 3, 16, 16)),
    "video_vae": lambda: (VideoVAE(width=8, latent=2), (2, 3, 4, 8, 8)),
    "wav2vec": lambda: (Wav2VecEncoder(width=8, layers=((10, 5), (3, 2), (2, 2))), (2, 1, 200)),
    "dcgan_generator": lambda: (Generator(latent=8, width=4, size=16), (2, 8, 1, 1)),
    "dcgan_discriminator": lambda: (Discriminator(width=4, size=16), (2, 3, 16, 16)),
}


def example(name: str, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    """A small instance of one of `MODELS` and an input, the same ones for the same seed."""
    torch.manual_seed(seed)
    model, shape = MODELS[name]()
    return model, torch.randn(shape)
