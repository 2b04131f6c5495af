"""The framework's dropout. The bits are those of lucidnn's Philox, drawn from the framework's generator.

``torch.manual_seed`` therefore means what it means natively, with other bits. On a CPU the framework makes dropout of
other operators; on a GPU it has a kernel that writes the mask, and a gradient that reads it.
"""

from __future__ import annotations

from ... import functional
from ...core.errors import InvalidArgument, NotSupported
from ...functional._library import run
from ...functional._random import next_state
from ...functional.dropout import _fwd_mask as described
from .._override import override


def _check(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise InvalidArgument("p", p, "a probability from 0 to 1")


@override("dropout", composite=True, devices=("CPU",))
def dropout(input, p, train):
    """Zero each element with probability p and scale the others; without `train` the input itself."""
    _check(p)
    return functional.dropout(input, p, train)


@override("native_dropout", devices=("CUDA",))
def _native_dropout(input, p, train):
    _check(p)
    if not train:
        raise NotSupported("dropout that leaves everything as it is")
    return run(described, (input, next_state(input.device), None), (float(p), False))
