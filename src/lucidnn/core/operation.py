"""What an operation is: named tensors, attributes with a text form, shape rules and costs. No operation is defined here.

An operation is a frozen dataclass whose fields are its attributes (stride, padding, ...). It says which tensors it
reads and writes, what the outputs look like, which combinations are ill-formed, and how many operations and bytes it
needs. Output shape and layout are decided here and nowhere else: kernels, fake functions and descriptors all ask.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .descriptor import TensorDescriptor
from .errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is done to a result before it is stored: ``act(alpha * result + beta * z + bias)``.

    Parameters
    ----------
    alpha, beta : float
        Factors of the result and of the tensor ``z`` (which may be the output itself).
    activation : str
        Name from `lucidnn.ops.activation.ACTIVATIONS`.
    parameter : float
        Slope, clip or alpha of the activation, where it has one.
    """

    alpha: float = 1.0
    beta: float = 0.0
    activation: str = "identity"
    parameter: float = 0.0


class Codec:
    """Text form of one attribute type."""

    def __init__(self, write: Callable[[Any], str], read: Callable[[str], Any], form: str):
        self.write, self.read, self.form = write, read, form


def _read_bool(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _read_pads(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split(":") for part in text.split(",")]
    return tuple(
        (int(p[0]), int(p[-1])) for p in pairs if len(p) <= 2 or int(":")
    )  # a third part is an error


def _write_pads(pads: tuple[tuple[int, int], ...]) -> str:
    return ",".join(str(a) if a == b else f"{a}:{b}" for a, b in pads)


INT = Codec(str, int, "a whole number")
FLOAT = Codec(repr, float, "a number")
NAME = Codec(str, str, "a name")
BOOL = Codec(lambda v: str(int(v)), _read_bool, "0 or 1")
INTS = Codec(
    lambda v: ",".join(map(str, v)), lambda s: tuple(int(p) for p in s.split(",")), "numbers such as 2,1"
)
PADS = Codec(_write_pads, _read_pads, "numbers or before:after pairs such as 1,0:2")


def attribute(codec: Codec, default: Any = dataclasses.MISSING) -> Any:
    """Declare an attribute of an operation: a dataclass field with its text form."""
    return dataclasses.field(default=default, metadata={"codec": codec})


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """Base of all operations. Subclasses are frozen dataclasses; their fields are the attributes.

    Attributes
    ----------
    name : str
        First word of a problem line.
    inputs, optional, outputs : tuple of str
        Roles of the tensors read always, read where given, and written.
    batched : tuple of str
        Roles whose first axis is the batch: tuned rows are shared between near batch sizes.
    epilogue : frozenset of str
        Which fields of `Epilogue` the operation takes.
    math_modes : tuple of str
        Allowed values of a problem's ``math``; the first is the default.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]]
    batched: ClassVar[tuple[str, ...]] = ()
    epilogue: ClassVar[frozenset[str]] = frozenset()
    math_modes: ClassVar[tuple[str, ...]] = ("ieee",)

    registry: ClassVar[dict[str, type[Operation]]] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            Operation.registry[cls.name] = cls

    def resolved(self, tensors: Mapping[str, TensorDescriptor]) -> Operation:
        """The operation with defaults that depend on the tensors' rank written out; the place for argument checks."""
        return self

    @abc.abstractmethod
    def infer(self, tensors: Mapping[str, TensorDescriptor]) -> dict[str, TensorDescriptor]:
        """Descriptors of all outputs from those of the inputs: the one place that decides shape, type and layout."""

    @abc.abstractmethod
    def check(self, tensors: Mapping[str, TensorDescriptor], epilogue: Epilogue) -> None:
        """Raise `InvalidArgument` where the tensors (outputs included) do not fit together."""

    @abc.abstractmethod
    def flops(self, tensors: Mapping[str, TensorDescriptor]) -> float:
        """Floating-point operations of the plain definition (a multiply-add counts two)."""

    def bytes(self, tensors: Mapping[str, TensorDescriptor]) -> float:
        """Fewest bytes that must move: every tensor once."""
        return sum(t.nbytes for t in tensors.values())

    def sample(
        self, role: str, tensors: Mapping[str, TensorDescriptor], shape: tuple[int, ...], generator: Any
    ) -> Any:
        """Random values of an input for tests and timings: a CPU tensor of `shape`. Standard normal unless overridden."""
        import torch

        return torch.randn(shape, generator=generator, dtype=torch.float64)

    @classmethod
    def codecs(cls) -> dict[str, Codec]:
        """Attribute name to text form, in declaration order."""
        return {f.name: f.metadata["codec"] for f in dataclasses.fields(cls)}

    def is_default(self, name: str) -> bool:
        """Whether the attribute may be left out of the text."""
        return any(f.name == name and getattr(self, name) == f.default for f in dataclasses.fields(self))

    def attributes_text(self) -> list[str]:
        """``name=value`` for each attribute that is not at its default."""
        return [
            f"{name}={c.write(getattr(self, name))}"
            for name, c in self.codecs().items()
            if not self.is_default(name)
        ]


def lookup(name: str) -> type[Operation]:
    """The operation class of this name; loads `lucidnn.ops` on first use."""
    if not Operation.registry:
        import importlib

        importlib.import_module("lucidnn.ops")
    try:
        return Operation.registry[name]
    except KeyError:
        raise InvalidArgument("operation", repr(name), ", ".join(sorted(Operation.registry))) from None
