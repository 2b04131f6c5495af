"""What an operation is: named tensors, attributes with a text form, shape rules and costs. None is defined here.

An operation is a frozen dataclass of its attributes (stride, padding, ...). It says which tensors it reads and writes,
which combinations are ill-formed, how many operations and bytes it needs, and what the outputs look like: that is
decided here and nowhere else, and kernels, fake functions and descriptors all ask.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from .descriptor import TensorDescriptor
from .errors import InvalidArgument

Tensors = Mapping[str, TensorDescriptor]  # by role


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is done to a result before it is stored: ``act(alpha * result + beta * z + bias)``."""

    alpha: float = 1.0
    beta: float = 0.0  # of z, a tensor of the output's shape, or the output itself
    activation: str = "identity"  # see `lucidnn.ops.activation`
    parameter: float = 0.0  # the activation's slope, clip or alpha, where it has one


class Codec(NamedTuple):
    """Text form of one attribute type: `form` says what `read` takes."""

    write: Callable[[Any], str]
    read: Callable[[str], Any]
    form: str

    def parse(self, name: str, text: str) -> Any:
        """Read the value of the attribute `name`."""
        try:
            return self.read(text)
        except (ValueError, KeyError):
            raise InvalidArgument(name, repr(text), self.form) from None


INT = Codec(str, int, "a whole number")
FLOAT = Codec(repr, float, "a number")
NAME = Codec(str, str, "a name")
BOOL = Codec(lambda flag: str(int(flag)), {"0": False, "1": True}.__getitem__, "0 or 1")
INTS = Codec(lambda v: ",".join(map(str, v)), lambda text: tuple(map(int, text.split(","))), "numbers such as 2,1")
PADS = Codec(
    lambda pads: ",".join(str(a) if a == b else f"{a}:{b}" for a, b in pads),
    lambda text: tuple((int(a), int(b if colon else a)) for a, colon, b in (p.partition(":") for p in text.split(","))),
    "numbers or before:after pairs such as 1,0:2",
)
ACTIVATION = Codec(
    lambda act: f"{act[0]}:{act[1]}" if act[1] else act[0],
    lambda text: (text.partition(":")[0], float(text.partition(":")[2] or 0)),
    "name or name:number",
)


def attribute(codec: Codec, default: Any = dataclasses.MISSING) -> Any:
    """Declare an attribute of an operation: a dataclass field with its text form."""
    return dataclasses.field(default=default, metadata={"codec": codec})


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """Base of all operations. Subclasses are frozen dataclasses; their fields are the attributes."""

    name: ClassVar[str]  # first word of a problem line
    inputs: ClassVar[tuple[str, ...]]  # roles of the tensors that are always read
    optional: ClassVar[tuple[str, ...]] = ()  # read where given
    outputs: ClassVar[tuple[str, ...]]  # written
    batched: ClassVar[tuple[str, ...]] = ()  # whose first axis is the batch: near batch sizes share tuned rows
    epilogue: ClassVar[frozenset[str]] = frozenset()  # fields of `Epilogue` that it takes
    rare: ClassVar[frozenset[str]] = frozenset()  # attributes and roles that only an engine naming them in `takes` gets
    math_modes: ClassVar[tuple[str, ...]] = ("ieee",)  # values of a problem's math, the default first
    registry: ClassVar[dict[str, type[Operation]]] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            Operation.registry[cls.name] = cls

    def resolved(self, tensors: Tensors) -> Operation:
        """The operation with defaults that depend on the tensors' rank written out; the place for argument checks."""
        return self

    @abc.abstractmethod
    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        """Descriptors of all outputs from those of the inputs: the one place that decides shape, type and layout."""

    @abc.abstractmethod
    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        """Raise `InvalidArgument` where the tensors (outputs included) do not fit together."""

    @abc.abstractmethod
    def flops(self, tensors: Tensors) -> float:
        """Floating-point operations of the plain definition (a multiply-add counts two)."""

    def bytes(self, tensors: Tensors) -> float:
        """Fewest bytes that must move: every tensor once."""
        return sum(t.nbytes for t in tensors.values())

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Random values of an input for tests and timings, a CPU tensor: standard normal unless overridden."""
        import torch

        return torch.randn(shape, generator=generator, dtype=torch.float64)

    @classmethod
    def codecs(cls) -> dict[str, Codec]:
        """Attribute name to text form, in declaration order."""
        return {f.name: f.metadata["codec"] for f in dataclasses.fields(cls)}

    def is_default(self, name: str) -> bool:
        """Whether the attribute may be left out of the text."""
        return getattr(self, name) == getattr(type(self), name, dataclasses.MISSING)

    def attributes_text(self) -> list[str]:
        """``name=value`` for each attribute that is not at its default."""
        return [f"{n}={c.write(getattr(self, n))}" for n, c in self.codecs().items() if not self.is_default(n)]


def lookup(name: str) -> type[Operation]:
    """The operation class of this name; loads `lucidnn.ops` (by name: it stands above) on first use."""
    importlib.import_module("lucidnn.ops")
    if name not in Operation.registry:
        raise InvalidArgument("operation", repr(name), ", ".join(sorted(Operation.registry)))
    return Operation.registry[name]
