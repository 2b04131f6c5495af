"""``dropout.reference``: the definition of dropout, on any device, slow on purpose.

Method: Philox-4x32-10 in whole-tensor operations on 64-bit integers, which hold the products of 32-bit words once these
are cut in two; the values in float64. Every other engine's mask must be the same bit for bit. Cost: some two hundred
passes over as many 64-bit numbers as there are elements.
"""

from __future__ import annotations

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.dropout import number_strides, scale, threshold

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product of 32-bit words."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four random words for each counter: ten rounds. Words are the lower halves of int64 elements.

    Examples
    --------
    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(word.item()) for word in philox([zero] * 4, [zero] * 2)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


class DropoutReference(Engine):
    """Both directions, straight from the formulas."""

    name = "dropout.reference"
    operations = ("dropout_fwd", "dropout_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role not in ("state", "mask"):
                r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, bytes=3000.0 * problem.items[0][1].numel + 1, launches=200)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)
        first, out = problem.inputs[0], problem.outputs[0]
        p, feature = problem.op.p, problem.op.feature  # type: ignore[attr-defined]
        strides, shape = number_strides(problem[first], feature), problem[first].shape
        beta = problem.epilogue.beta

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            state = pack["state"]
            number = torch.zeros(shape, dtype=torch.int64, device=state.device)
            for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
                steps = torch.arange(size, device=state.device) * stride
                number += steps.reshape(-1, *[1] * (len(shape) - 1 - axis))
            seed, offset = state[0], state[1]
            quad = number >> 2
            counter = [quad & _LOW, quad >> 32, (offset & _LOW).expand(shape), (offset >> 32 & _LOW).expand(shape)]
            words = torch.stack(philox(counter, [seed & _LOW, seed >> 32 & _LOW]))
            keep = words.gather(0, (number & 3).unsqueeze(0)).squeeze(0) >= threshold(p)
            y = pack[first].detach().double() * (keep.double() * scale(p))
            if "z" in pack:
                y = y + beta * pack["z"].detach().double()
            pack[out].copy_(y)
            if "mask" in pack:
                pack["mask"].copy_(keep)

        return run
