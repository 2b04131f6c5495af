"""Training, the same on lucidnn and on the framework: data on the device, batches, steps, accuracy.

Stochastic gradient descent with momentum; the learning rate falls linearly to zero. Every batch is shifted by a few
pixels at random, the same for both networks: the digits are few, and it is worth a percent of accuracy.

16-bit types compute under the framework's autocast: the weights stay float32 and are rounded on use. Gradients of
float16 would fall below its smallest number, so the loss is multiplied by 1024 and the learning rate divided by it,
which momentum and the step, both linear in the gradient, carry through exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..core.descriptor import DTYPES, short_dtype
from ..core.errors import InvalidArgument
from .data import Dataset
from .network import Network

SHIFT = 3  # pixels, to either side
HALF = ("f16", "bf16")
LOSS_SCALE = {"f16": 1024.0}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes
    ----------
    device : torch.device
    dtype : str
        Short name of the type that the network computes in: f64, f32, f16 or bf16.
    epochs, batch_size : int
    lr, momentum : float
    seed : int
        Of the first weights, the order and the shifts.
    """

    device: Any
    dtype: str = "f32"
    epochs: int = 12
    batch_size: int = 64
    lr: float = 0.03
    momentum: float = 0.9
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The framework's name of the type."""
        return getattr(torch, DTYPES[self.dtype][0])

    @property
    def memory_format(self) -> torch.memory_format:
        """Channels-last where a GPU computes in 16 bits, since its matrix units want it; else the framework's usual."""
        last = self.device.type != "cpu" and self.dtype in HALF
        return torch.channels_last if last else torch.contiguous_format


def dtype_of(text: str) -> str:
    """Short name of a type to train in.

    Examples
    --------
    >>> dtype_of("bfloat16"), dtype_of("f32")
    ('bf16', 'f32')
    """
    accepted = ("float32", "bfloat16", "float16", "float64")
    with contextlib.suppress(InvalidArgument):
        short = short_dtype(text)
        if DTYPES[short][0] in accepted:
            return short
    raise InvalidArgument("dtype", repr(text), ", ".join(accepted))


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What one pass over the training images came to: mean loss, and seconds."""

    loss: float
    seconds: float


class Images:
    """A data set on the device, in the recipe's type."""

    def __init__(self, data: Dataset, recipe: Recipe):
        if recipe.batch_size > len(data.train_y):
            raise InvalidArgument(
                "batch-size", recipe.batch_size, f"1 to {len(data.train_y)}, the images of {data.name}"
            )
        self.recipe = recipe
        kind = recipe.torch_dtype

        def images(pixels: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(pixels).to(recipe.device, kind)

        self.train_x, self.test_x = images(data.train_x), images(data.test_x)
        self.train_y = torch.from_numpy(data.train_y).to(recipe.device)
        self.test_y = torch.from_numpy(data.test_y).to(recipe.device)

    @property
    def steps(self) -> int:
        """Batches of an epoch: images that fill none are left for the next, whose order is another."""
        return len(self.train_y) // self.recipe.batch_size

    def batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The epoch's batches; the recipe's seed and the epoch's number decide them."""
        size = self.recipe.batch_size
        generator = torch.Generator().manual_seed((self.recipe.seed << 20) + epoch)
        order = torch.randperm(len(self.train_y), generator=generator).to(self.recipe.device)
        shifts = torch.randint(-SHIFT, SHIFT + 1, (self.steps, 2), generator=generator).tolist()
        for number, (down, right) in enumerate(shifts):
            chosen = order[number * size : (number + 1) * size]
            x = torch.roll(self.train_x.index_select(0, chosen), (down, right), (2, 3))
            yield x.contiguous(memory_format=self.recipe.memory_format), self.train_y.index_select(0, chosen)


class Trainer:
    """A network with its optimiser.

    Parameters
    ----------
    functions : module
        See `Network`.
    fused : bool
        Likewise.
    recipe : Recipe
    """

    def __init__(self, functions: Any, fused: bool, recipe: Recipe):
        self.recipe = recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            network = Network(functions, fused)
        kind = torch.float64 if recipe.dtype == "f64" else torch.float32
        self.network = network.to(recipe.device, kind, memory_format=recipe.memory_format)  # type: ignore[call-overload]
        self.scale = LOSS_SCALE.get(recipe.dtype, 1.0)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=recipe.lr / self.scale, momentum=recipe.momentum)

    def _computing(self) -> Any:
        if self.recipe.dtype not in HALF:
            return contextlib.nullcontext()
        # Each weight is used once a step, so there is nothing for a cache of rounded weights to save.
        kind = self.recipe.torch_dtype
        return torch.autocast(self.recipe.device.type, dtype=kind, cache_enabled=False)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a batch."""
        with self._computing():
            scores = self.network(x)
        return torch.nn.functional.cross_entropy(scores if scores.dtype == torch.float64 else scores.float(), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Forward, backward and update on one batch; gives the loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x, y)
        (loss * self.scale if self.scale != 1.0 else loss).backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, images: Images, advance: Callable[[Epoch | None], object] = lambda epoch: None) -> list[Epoch]:
        """All epochs of the recipe.

        Parameters
        ----------
        advance : callable
            Called after every step with None, and after every epoch with what it came to.
        """
        epochs = []
        total = self.recipe.epochs * images.steps
        done = itertools.count()
        for number in range(self.recipe.epochs):
            start = time.perf_counter()
            losses = torch.zeros((), device=self.recipe.device, dtype=torch.float64)
            for x, y in images.batches(number):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.recipe.lr / self.scale * (1 - next(done) / total)
                losses += self.step(x, y)
                advance(None)
            mean = float(losses) / images.steps  # waits for the device
            epochs.append(Epoch(mean, time.perf_counter() - start))
            advance(epochs[-1])
        return epochs

    def accuracy(self, images: Images, chunk: int = 256) -> float:
        """Part of the held-out images that the network gets right."""
        right = 0
        with torch.no_grad(), self._computing():
            for start in range(0, len(images.test_y), chunk):
                x = images.test_x[start : start + chunk].contiguous(memory_format=self.recipe.memory_format)
                right += int((self.network(x).argmax(1) == images.test_y[start : start + chunk]).sum())
        return right / len(images.test_y)
