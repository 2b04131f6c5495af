"""A problem: one operation on described tensors, with epilogue, numerics and target, and a one-line text form.

The line is the log line, the tuning key, the test id, the command-line argument, the benchmark row and the bug report::

    conv_fprop x=bf16[64,256,56,56]@nhwc w=bf16[256,256,3,3]@nhwc y=... padding=1,1 act=relu math=ieee on=cuda:sm_90:132

and it parses back: ``Problem.parse(str(p)) == p``. It may leave out outputs, attributes at their defaults, the target.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from math import isfinite
from types import MappingProxyType
from typing import Any, Self

from .descriptor import TensorDescriptor, derived
from .errors import InvalidArgument, ProblemSyntaxError
from .operation import ACTIVATION, FLOAT, NAME, Epilogue, Operation, Tensors, lookup
from .target import Target

_COMMON = {"alpha": FLOAT, "beta": FLOAT, "act": ACTIVATION, "math": NAME}  # beside an operation's own attributes
_WORDS = {"activation": "act", "parameter": "act"}  # argument -> the word of a line that gives it


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question for the engines. Build it with `create` or `parse`, which check it.

    >>> p = Problem.parse("conv_fprop x=f32[8,3,32,32] w=f32[32,3,3,3] padding=1 act=relu on=cuda:sm_90")
    >>> print(p)
    conv_fprop x=f32[8,3,32,32]@nchw w=f32[32,3,3,3]@nchw y=f32[8,32,32,32]@nchw padding=1,1 act=relu on=cuda:sm_90:132
    >>> Problem.parse(str(p)) == p, p["y"].shape, p.op.stride
    (True, (8, 32, 32, 32), (1, 1))
    """

    op: Operation  # with its attributes, defaults written out
    items: tuple[tuple[str, TensorDescriptor], ...]  # every tensor by role, inputs in order, then outputs
    epilogue: Epilogue
    math: str  # ieee, or tf32 where float32 operands may be rounded for the matrix units
    target: Target
    inputs: tuple[str, ...] = derived()  # roles read, in the order in which a plan takes them
    outputs: tuple[str, ...] = derived()  # roles written, in the order in which a plan takes or returns them
    is_empty: bool = derived()  # whether some tensor has no element
    flops: float = derived()  # of the plain definition
    bytes: float = derived()  # fewest that must move

    def __post_init__(self):
        inputs = tuple(role for role, _ in self.items if role not in self.op.outputs)
        outputs = tuple(role for role, _ in self.items if role in self.op.outputs)
        known = {"inputs": inputs, "outputs": outputs, "is_empty": any(t.numel == 0 for _, t in self.items)}
        vars(self).update(known, flops=self.op.flops(self.tensors), bytes=self.op.bytes(self.tensors))

    @classmethod
    def create(
        cls, op: Operation, tensors: Tensors, target: Target, epilogue: Epilogue = Epilogue(), math: str | None = None
    ) -> Self:
        """Check everything, fill in what is left out (outputs, rank-dependent defaults) and put the roles in order.

        `InvalidArgument` names the tensor, attribute or setting that is wrong, the value found and what is accepted.
        """
        roles = op.inputs + op.optional + op.outputs
        for role in op.inputs:
            if role not in tensors:
                raise InvalidArgument(role, "nothing", f"a tensor: {op.name} reads {', '.join(op.inputs)}")
        for role in tensors:
            if role not in roles:
                raise InvalidArgument("tensor", role, f"the roles of {op.name}: {', '.join(roles)}")
        math = math or op.math_modes[0]
        if math not in op.math_modes:
            raise InvalidArgument("math", math, f"{', '.join(op.math_modes)} for {op.name}")
        for name, value in vars(epilogue).items():
            plain = getattr(Epilogue, name)
            if value != plain and name not in op.epilogue:
                raise InvalidArgument(name, value, f"{plain}: {op.name} has no such epilogue")
            if isinstance(value, float) and not isfinite(value):
                raise InvalidArgument(name, value, "a finite number")
        if ("z" in tensors) != (epilogue.beta != 0.0):
            raise InvalidArgument("beta", epilogue.beta, "a number other than 0 exactly where z is given")
        op = op.resolved(tensors)
        inputs = {role: tensors[role] for role in op.inputs + op.optional if role in tensors}
        outputs = op.infer(inputs) | {role: tensors[role] for role in op.outputs if role in tensors}
        for role, tensor in outputs.items():
            if tensor.is_overlapping:
                raise InvalidArgument(role, str(tensor), "an output whose elements do not overlap in memory")
        op.check(inputs | outputs, epilogue)
        if math == "tf32" and all(tensors[role].dtype != "f32" for role in op.inputs):
            math = "ieee"  # the mode means nothing for other operands: one problem, one text
        return cls(op, tuple((inputs | outputs).items()), epilogue, math, target)

    def __getitem__(self, role: str) -> TensorDescriptor:
        return self.tensors[role]

    def __reduce__(self):  # without what is derived or cached: a read-only mapping does not pickle
        return type(self), (self.op, self.items, self.epilogue, self.math, self.target)

    @functools.cached_property
    def tensors(self) -> Tensors:
        """Role to descriptor, inputs first."""
        return MappingProxyType(dict(self.items))

    @functools.cached_property
    def rare(self) -> dict[str, str]:
        """The attributes and roles in use that an engine must know of (`Operation.rare`), with their text."""
        found = dict(word.split("=", 1) for word in self.op.attributes_text()) | {r: str(t) for r, t in self.items}
        return {name: text for name, text in found.items() if name in self.op.rare}

    text = functools.cached_property(lambda self: f"{self._text(self.items)} on={self.target}")  # the line

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def tuning_key(self) -> str:
        """The text without the target and with the batch rounded up to a power of two: near sizes share a tuned row."""

        def bucket(role: str, t: TensorDescriptor) -> TensorDescriptor:
            if role not in self.op.batched or t.ndim == 0:
                return t
            return dataclasses.replace(t, shape=(1 << max(t.shape[0] - 1, 0).bit_length(), *t.shape[1:]))

        return self._text((role, bucket(role, t)) for role, t in self.items)

    def _text(self, items: Iterable[tuple[str, TensorDescriptor]]) -> str:
        e, usual = self.epilogue, self.op.math_modes[0]
        plain = {"alpha": 1.0, "beta": 0.0, "act": ("identity", 0.0), "math": usual}
        common = {"alpha": e.alpha, "beta": e.beta, "act": (e.activation, e.parameter), "math": self.math}
        words = [f"{name}={_COMMON[name].write(v)}" for name, v in common.items() if v != plain[name]]
        return " ".join([self.op.name, *(f"{r}={t}" for r, t in items), *self.op.attributes_text(), *words])

    @classmethod
    def parse(cls, text: str, target: Target | None = None) -> Self:
        """Read a problem line. `target` is used where the line has no ``on=``; without either it is this host's CPU.

        `ProblemSyntaxError` says why the line does not parse or is ill-formed, and points at the token.
        """
        words = [(m.start(), m.group()) for m in re.finditer(r"\S+", text)]
        if not words:
            raise ProblemSyntaxError(text, 0, "an empty line; a problem starts with its operation's name")
        given: dict[str, Any] = {}
        starts: dict[str, int] = {}
        at, name = words[0]
        try:
            kind = lookup(name)
            roles, codecs = kind.inputs + kind.optional + kind.outputs, kind.codecs() | _COMMON
            for start, word in words[1:]:
                key, _, value = word.partition("=")
                at = start + len(key) + 1
                if not value:
                    raise ProblemSyntaxError(text, start, f"expected name=value, found {word!r}")
                if key in given:
                    raise ProblemSyntaxError(text, start, f"{key} is given twice")
                starts[key] = start
                if key in roles:
                    given[key] = TensorDescriptor.parse(value)
                elif key in codecs:
                    given[key] = codecs[key].parse(key, value)
                elif key == "on":
                    given[key] = Target.parse(value)
                else:
                    known = ", ".join([*roles, *codecs, "on"])
                    raise ProblemSyntaxError(text, start, f"{kind.name} has no {key!r}; it has {known}")
        except InvalidArgument as error:
            raise ProblemSyntaxError(text, at, str(error)) from None
        tensors = {role: given[role] for role in roles if role in given}
        attributes = {name: given[name] for name in kind.codecs() if name in given}
        epilogue = Epilogue(given.get("alpha", 1.0), given.get("beta", 0.0), *given.get("act", ()))
        on = given.get("on") or target or Target.parse("cpu")
        try:
            return cls.create(kind(**attributes), tensors, on, epilogue, given.get("math"))
        except InvalidArgument as error:
            word = _WORDS.get(error.argument, error.argument)
            word = "z" if word == "beta" and word not in starts else word  # z is there alone
            raise ProblemSyntaxError(text, starts.get(word, words[0][0]), str(error)) from None
