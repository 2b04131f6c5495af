r"""Cross-entropy between logits and target classes or class probabilities, without the probabilities in memory.

With :math:`\log p_{ic} = x_{ic} - \mathrm{stats}_i`, where :math:`\mathrm{stats}_i = \log \sum_c e^{x_{ic}}`, and i
running over all but the class axis (axis 1):

.. math::  l_i = -\sum_c q_{ic} \log p_{ic} \qquad
           dx_{ic} = dy_i \Bigl(p_{ic} \sum_k q_{ik} - q_{ic}\Bigr)

.. math::  q_{ic} = w_c \Bigl((1 - \varepsilon)\, t_{ic} + \frac{\varepsilon}{C}\Bigr)

with class weights w, label smoothing :math:`\varepsilon` and t the target: probabilities of the shape of x, or whole
numbers, one a row, that stand for probability 1 of that class. A row whose class is `ignore_index` counts nothing.
`reduction` none keeps the :math:`l_i`; sum adds them; mean divides the sum by the sum of the :math:`w` of the rows'
classes (kept as `total`, for the backward pass), or by the number of rows where the target is probabilities.
With `from_log`, x holds logarithms of probabilities already: stats is taken as 0 (the frameworks' nll_loss).

A class outside 0 to C - 1 is an error on a CPU; a GPU cannot raise one in the middle of its work and gives NaN, for the
row and for what it is summed into.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, FLOAT, INT, NAME, Epilogue, Operation, Tensors, attribute
from .pointwise import like

REDUCTIONS = ("none", "sum", "mean")
TYPES = FLOATING[:4]


def by_class(target: TensorDescriptor) -> bool:
    """Whether a target is class numbers, not probabilities."""
    return target.dtype == "i64"


@dataclasses.dataclass(frozen=True)
class _CrossEntropy(Operation):
    """Attributes that both directions share.

    Parameters
    ----------
    reduction : {'none', 'sum', 'mean'}
    smoothing : float
        The part of each target that is spread over all classes, 0 to 1.
    ignore_index : int
        The class number of rows that do not count.
    from_log : bool
        x holds log-probabilities. Without smoothing, and with class numbers only.
    """

    reduction: str = attribute(NAME, "mean")
    smoothing: float = attribute(FLOAT, 0.0)
    ignore_index: int = attribute(INT, -100)
    from_log: bool = attribute(BOOL, False)

    def resolved(self, tensors: Tensors) -> Operation:
        if self.reduction not in REDUCTIONS:
            raise InvalidArgument("reduction", self.reduction, ", ".join(REDUCTIONS))
        if not 0.0 <= self.smoothing <= 1.0:
            raise InvalidArgument("smoothing", self.smoothing, "a number from 0 to 1")
        x, target = tensors["x"], tensors["target"]
        if x.ndim < 2:
            raise InvalidArgument("x", str(x), "at least two axes: batch, classes")
        if self.from_log and (self.smoothing or not by_class(target)):
            raise InvalidArgument("from_log", 1, "0 with smoothing, or with a target that is probabilities")
        return self

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x, target = tensors["x"], tensors["target"]
        rows = rows_shape(x)
        expected = {"dx": x.shape, "stats": rows, "weight": (x.shape[1],), "total": ()}
        expected["target"] = rows if by_class(target) else x.shape
        expected["y"] = expected["dy"] = rows if self.reduction == "none" else ()
        for role, t in tensors.items():
            if role == "target" and not by_class(t) and t.dtype not in TYPES:
                raise InvalidArgument(role, str(t), f"class numbers (i64), or probabilities of {', '.join(TYPES)}")
            if role != "target" and t.dtype not in TYPES:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(TYPES)}")
            if role in expected and t.shape != expected[role]:
                raise InvalidArgument(role, str(t), f"shape {list(expected[role])} for x {x}")
        for role in ("stats", "total"):
            if role in tensors and tensors[role].dtype != sum_type(x):
                raise InvalidArgument(role, str(tensors[role]), f"type {sum_type(x)} for x {x}")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Classes that exist, some of them ignored; positive weights; probabilities that sum to 1."""
        import torch

        if role == "target" and by_class(tensors["target"]):
            classes = torch.randint(0, max(tensors["x"].shape[1], 1), shape, generator=generator)
            return torch.where(torch.rand(shape, generator=generator) < 0.1, self.ignore_index, classes)
        value = super().sample(role, tensors, shape, generator)
        if role == "target":
            value = value.exp()
            return value / value.sum(1, keepdim=True)
        if role == "stats":  # about what logits of standard normal values have
            return value * 0.1 + math.log(max(tensors["x"].shape[1], 1)) + 0.5
        return value.abs() + 0.5 if role in ("weight", "total") else value

    def flops(self, tensors: Tensors) -> float:
        x = tensors["x"]
        return float(x.numel // max(x.shape[1], 1)) if self.from_log else 6.0 * x.numel


def rows_shape(x: TensorDescriptor) -> tuple[int, ...]:
    """The shape without the class axis."""
    return (x.shape[0], *x.shape[2:])


def sum_type(x: TensorDescriptor) -> str:
    """What sums over x are kept in."""
    return "f64" if x.dtype == "f64" else "f32"


@dataclasses.dataclass(frozen=True)
class CrossEntropyFwd(_CrossEntropy):
    """``y``, the loss; ``stats``, each row's log-sum-exp; ``total``, the weights' sum, for a mean over classes."""

    name = "cross_entropy_fwd"
    inputs, optional, outputs = ("x", "target"), ("weight",), ("y", "stats", "total")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        rows = rows_shape(x)
        found = {"y": TensorDescriptor(x.dtype, rows if self.reduction == "none" else ())}
        if not self.from_log:
            found["stats"] = TensorDescriptor(sum_type(x), rows)
        if self.reduction == "mean" and by_class(tensors["target"]):
            found["total"] = TensorDescriptor(sum_type(x), ())
        return found

    def bytes(self, tensors: Tensors) -> float:
        return _bytes(self, tensors)


@dataclasses.dataclass(frozen=True)
class CrossEntropyBwd(_CrossEntropy):
    """``dx`` from the loss's gradient dy, and what the forward pass kept."""

    name = "cross_entropy_bwd"
    inputs, optional, outputs = ("dy", "x", "target"), ("stats", "weight", "total"), ("dx",)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(tensors["x"])}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if ("stats" in tensors) == self.from_log:
            raise InvalidArgument("stats", str(tensors.get("stats", "nothing")), "a tensor exactly without from_log")
        if ("total" in tensors) != (self.reduction == "mean" and by_class(tensors["target"])):
            found = str(tensors.get("total", "nothing"))
            raise InvalidArgument("total", found, "a tensor exactly for the mean over class numbers")

    def bytes(self, tensors: Tensors) -> float:
        return _bytes(self, tensors)


def _bytes(op: _CrossEntropy, tensors: Tensors) -> float:
    """Logarithms are read, in either direction, for the target classes only."""
    moved = sum(t.nbytes for t in tensors.values())
    if op.from_log:
        x = tensors["x"]
        moved -= x.nbytes - x.itemsize * min(x.numel // max(x.shape[1], 1), x.distinct)
    return moved
