"""The states that dropout draws its bits by: two 64-bit numbers, seed and offset, in a tensor on the device.

By default they come from the framework's own generator of the device, so that ``torch.manual_seed``, ``fork_rng`` and
recomputation (``torch.utils.checkpoint``) mean for them what they mean for the framework's kernels, and a captured
CUDA graph draws anew at each replay: there the numbers are drawn on the device, by the framework, inside the graph.

Outside a capture a GPU's states are made without a kernel. The generator's seed and offset are the state; it is told to
go on, and the tensor is one of a table that was copied to the device in one piece.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..core.errors import InvalidArgument

_AHEAD = 256  # states in one copy to the device
_STEP = 4  # what the framework's generator of a GPU goes on by


class DropoutGenerator:
    """Independent random bits for `dropout`, apart from the framework's generator.

    Every call of a dropout function takes the present state, and the offset goes up by one, on the device: under the
    capture of a CUDA graph each replay goes on from the one before.

    Parameters
    ----------
    seed : int
        64 bits, of either sign.
    device : torch.device or str
        Where the tensors are that it is for.

    Examples
    --------
    >>> from lucidnn.functional import dropout
    >>> g = DropoutGenerator(7)
    >>> before = g.get_state()
    >>> x = torch.ones(1000)
    >>> y = dropout(x, 0.5, generator=g)
    >>> torch.equal(dropout(x, 0.5, generator=g), y)
    False
    >>> g.set_state(before)
    >>> torch.equal(dropout(x, 0.5, generator=g), y)
    True
    """

    def __init__(self, seed: int = 0, device: Any = "cpu"):
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self.manual_seed(seed)

    @property
    def device(self) -> torch.device:
        return self._state.device

    def manual_seed(self, seed: int) -> DropoutGenerator:
        """Start anew from a seed."""
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise InvalidArgument("seed", seed, "a whole number of 64 bits")
        self._state.copy_(torch.tensor([seed, 0]))
        return self

    def get_state(self) -> torch.Tensor:
        """Seed and offset: int64 of shape [2], a copy on the generator's device."""
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from what `get_state` gave."""
        if not isinstance(state, torch.Tensor) or state.dtype != torch.int64 or state.shape != (2,):
            raise InvalidArgument("state", repr(state), "a tensor of two int64: seed and offset")
        self._state.copy_(state)

    def next_state(self) -> torch.Tensor:
        """The present state; the generator goes on to the next."""
        taken = self._state.clone()
        self._state[1:].add_(1)
        return taken


class _Ahead:
    """States of a GPU's generator, kept as rows of tensors on the device, by seed and offset."""

    def __init__(self, generator: Any, device: torch.device):
        self.generator, self.device = generator, device
        self.seed, self.base, self.rows = 0, 0, ()

    def next_state(self) -> torch.Tensor:
        generator = self.generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + _STEP)
        place, between = divmod(offset - self.base, _STEP)
        if between or seed != self.seed or not 0 <= place < len(self.rows):
            signed = (seed + 2**63) % 2**64 - 2**63
            table = torch.tensor([(signed, offset + _STEP * i) for i in range(_AHEAD)], dtype=torch.int64)
            self.seed, self.base, self.rows = seed, offset, table.to(self.device).unbind()
            place = 0
        return self.rows[place]


@functools.cache
def _ahead(device: torch.device) -> _Ahead:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _Ahead(torch.cuda.default_generators[index], device)


def next_state(device: torch.device, generator: DropoutGenerator | None = None) -> torch.Tensor:
    """A state for one call on a device, from a generator or by default from the framework's own.

    Examples
    --------
    >>> _ = torch.manual_seed(1)
    >>> a, b = next_state(torch.device("cpu")), next_state(torch.device("cpu"))
    >>> _ = torch.manual_seed(1)
    >>> torch.equal(next_state(torch.device("cpu")), a), torch.equal(a, b)
    (True, False)
    """
    if generator is not None:
        if not isinstance(generator, DropoutGenerator):
            raise InvalidArgument("generator", type(generator).__name__, "a DropoutGenerator")
        return generator.next_state()
    if torch.compiler.is_compiling():
        return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(2, dtype=torch.int64, device=device).random_()
    return _ahead(device).next_state()
