"""A problem: one operation on described tensors, with epilogue, numerics and target, and a one-line text form.

The line is the log line, the tuning key, the test id, the command-line argument, the benchmark row and the bug report::

    conv_fprop x=bf16[64,256,56,56]@nhwc w=bf16[256,256,3,3]@nhwc y=... padding=1,1 act=relu math=ieee on=cuda:sm_90:132

and it parses back: ``Problem.parse(str(p)) == p``. Written by hand it may leave out outputs (they are inferred),
attributes at their defaults and the target.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from types import MappingProxyType

from .descriptor import TensorDescriptor
from .errors import InvalidArgument, ProblemSyntaxError
from .operation import FLOAT, Epilogue, Operation, lookup
from .target import Target

MATH_MODES = ("ieee", "tf32")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question for the engines. Build it with `create` or `parse`, which check it.

    Attributes
    ----------
    op : Operation
        The operation with its attributes, defaults written out.
    items : tuple of (str, TensorDescriptor)
        Role and descriptor of every tensor that takes part: inputs in order, then outputs.
    epilogue : Epilogue
    math : str
        ``ieee``, or ``tf32`` where float32 operands may be rounded for the matrix units.
    target : Target

    Examples
    --------
    >>> p = Problem.parse("conv_fprop x=f32[8,3,32,32] w=f32[32,3,3,3] padding=1 act=relu on=cuda:sm_90")
    >>> print(p)
    conv_fprop x=f32[8,3,32,32]@nchw w=f32[32,3,3,3]@nchw y=f32[8,32,32,32]@nchw padding=1,1 act=relu on=cuda:sm_90:132
    >>> Problem.parse(str(p)) == p
    True
    >>> p["y"].shape, p.op.stride
    ((8, 32, 32, 32), (1, 1))
    """

    op: Operation
    items: tuple[tuple[str, TensorDescriptor], ...]
    epilogue: Epilogue
    math: str
    target: Target

    @classmethod
    def create(
        cls,
        op: Operation,
        tensors: Mapping[str, TensorDescriptor],
        target: Target,
        epilogue: Epilogue = Epilogue(),
        math: str | None = None,
    ) -> Problem:
        """Check everything, fill in what is left out (outputs, rank-dependent defaults) and put the roles in order.

        Raises
        ------
        InvalidArgument
            Names the tensor, attribute or setting that is wrong, the value found and what is accepted.
        """
        roles = op.inputs + op.optional
        for role in op.inputs:
            if role not in tensors:
                raise InvalidArgument(role, "nothing", f"a tensor: {op.name} reads {', '.join(op.inputs)}")
        for role in tensors:
            if role not in roles + op.outputs:
                raise InvalidArgument(
                    "tensor", role, f"the roles of {op.name}: {', '.join(roles + op.outputs)}"
                )
        math = op.math_modes[0] if math is None else math
        if math not in op.math_modes:
            raise InvalidArgument("math", math, f"{', '.join(op.math_modes)} for {op.name}")
        for field in dataclasses.fields(Epilogue):
            value = getattr(epilogue, field.name)
            if value != field.default and field.name not in op.epilogue:
                raise InvalidArgument(field.name, value, f"{field.default}: {op.name} has no such epilogue")
            if isinstance(value, float) and not isfinite(value):
                raise InvalidArgument(field.name, value, "a finite number")
        if ("z" in tensors) != (epilogue.beta != 0.0):
            raise InvalidArgument("beta", epilogue.beta, "a number other than 0 exactly where z is given")
        op = op.resolved(tensors)
        inputs = {role: tensors[role] for role in roles if role in tensors}
        outputs = op.infer(inputs)
        outputs.update({role: tensors[role] for role in op.outputs if role in tensors})
        for role, tensor in outputs.items():
            if tensor.is_overlapping:
                raise InvalidArgument(role, str(tensor), "an output whose elements do not overlap in memory")
        everything = inputs | outputs
        op.check(everything, epilogue)
        if math == "tf32" and all(tensors[role].dtype != "f32" for role in op.inputs):
            math = "ieee"  # the mode means nothing for other operands: one problem, one text
        return cls(op, tuple(everything.items()), epilogue, math, target)

    def __getitem__(self, role: str) -> TensorDescriptor:
        return self.tensors[role]

    def __getstate__(self):  # without what is cached: a read-only mapping does not pickle
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorDescriptor]:
        """Role to descriptor, inputs first."""
        return MappingProxyType(dict(self.items))

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Roles read, in the order in which a plan takes them."""
        return tuple(role for role, _ in self.items if role not in self.op.outputs)

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """Roles written, in the order in which a plan takes or returns them."""
        return tuple(role for role, _ in self.items if role in self.op.outputs)

    @functools.cached_property
    def flops(self) -> float:
        return self.op.flops(self.tensors)

    @functools.cached_property
    def bytes(self) -> float:
        return self.op.bytes(self.tensors)

    @property
    def is_empty(self) -> bool:
        """Whether some tensor has no element."""
        return any(t.numel == 0 for _, t in self.items)

    @functools.cached_property
    def text(self) -> str:
        return self._text(self.items)

    def __str__(self) -> str:
        return self.text

    def _text(self, items: Iterable[tuple[str, TensorDescriptor]], target: bool = True) -> str:
        parts = [self.op.name, *(f"{role}={tensor}" for role, tensor in items), *self.op.attributes_text()]
        for name in ("alpha", "beta"):
            value = getattr(self.epilogue, name)
            if value != getattr(Epilogue, name):
                parts.append(f"{name}={FLOAT.write(value)}")
        if self.epilogue.activation != "identity":
            parameter = f":{FLOAT.write(self.epilogue.parameter)}" if self.epilogue.parameter else ""
            parts.append(f"act={self.epilogue.activation}{parameter}")
        if self.math != self.op.math_modes[0]:
            parts.append(f"math={self.math}")
        return " ".join(parts + [f"on={self.target}"] * target)

    @functools.cached_property
    def tuning_key(self) -> str:
        """The text without the target and with the batch rounded up to a power of two: near sizes share a tuned row."""

        def bucket(role: str, t: TensorDescriptor) -> TensorDescriptor:
            if role not in self.op.batched or t.ndim == 0:
                return t
            n = 1 << max(t.shape[0] - 1, 0).bit_length()
            shape = (n, *t.shape[1:])
            if t.layout == "strided":
                return TensorDescriptor(t.dtype, shape, t.strides, t.alignment)
            return TensorDescriptor.make(t.dtype, shape, t.layout, t.alignment)

        return self._text([(role, bucket(role, t)) for role, t in self.items], target=False)

    @classmethod
    def parse(cls, text: str, target: Target | None = None) -> Problem:
        """Read a problem line. `target` is used where the line has no ``on=``; without either it is this host's CPU.

        Raises
        ------
        ProblemSyntaxError
            The line does not parse or is ill-formed; points at the token.
        """
        words = [(m.start(), m.group()) for m in re.finditer(r"\S+", text)]
        if not words:
            raise ProblemSyntaxError(text, 0, "an empty line; a problem starts with its operation's name")
        start, name = words[0]
        try:
            kind = lookup(name)
        except InvalidArgument as error:
            raise ProblemSyntaxError(text, start, str(error)) from None
        codecs = kind.codecs()
        roles = kind.inputs + kind.optional + kind.outputs
        tensors: dict[str, TensorDescriptor] = {}
        attributes: dict[str, object] = {}
        finish: dict[str, object] = {}
        math: str | None = None
        where: dict[str, int] = {}
        for start, word in words[1:]:
            key, equals, value = word.partition("=")
            at = start + len(key) + 1
            if not equals or not value:
                raise ProblemSyntaxError(text, start, f"expected name=value, found {word!r}")
            if key in where:
                raise ProblemSyntaxError(text, start, f"{key} is given twice")
            where[key] = start
            try:
                if key in roles:
                    tensors[key] = TensorDescriptor.parse(value)
                elif key in codecs:
                    attributes[key] = _decode(codecs[key].read, value, key, codecs[key].form)
                elif key in ("alpha", "beta"):
                    finish[key] = _decode(float, value, key, "a number")
                elif key == "act":
                    finish["activation"], _, parameter = value.partition(":")
                    finish["parameter"] = _decode(float, parameter or "0", key, "name or name:number")
                elif key == "math":
                    if value not in MATH_MODES:
                        raise InvalidArgument("math", value, " or ".join(MATH_MODES))
                    math = value
                elif key == "on":
                    target = Target.parse(value)
                else:
                    known = ", ".join([*roles, *codecs, "alpha", "beta", "act", "math", "on"])
                    raise ProblemSyntaxError(text, start, f"{kind.name} has no {key!r}; it has {known}")
            except InvalidArgument as error:
                raise ProblemSyntaxError(text, at, str(error)) from None
        try:
            op = kind(**attributes)
            return cls.create(op, tensors, target or Target.parse("cpu"), Epilogue(**finish), math)  # type: ignore[arg-type]
        except InvalidArgument as error:
            word = {"activation": "act", "parameter": "act", "target": "on"}.get(
                error.argument, error.argument
            )
            if word == "beta" and word not in where:  # z is there alone
                word = "z"
            raise ProblemSyntaxError(text, where.get(word, 0), str(error)) from None


def _decode(read, value: str, key: str, form: str):
    try:
        return read(value)
    except (ValueError, KeyError, IndexError):
        raise InvalidArgument(key, repr(value), form) from None
