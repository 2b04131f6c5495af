r"""Arithmetic, comparisons and logic on one to three tensors, point by point: cuDNN's list of pointwise modes.

.. math::  y = f(\alpha_1 x, \alpha_2 b, t) + \beta z

The tensors broadcast by numpy's rules. The modes and their formulas are in `MODES`; activations and their gradients,
but for a relu with limits, are the operations of `lucidnn.ops.pointwise`. What is computed in: float64 where a tensor
has that type, else float32; whole numbers (bool counts as 0 and 1) are computed exactly, in 64 bits. Results are cut
off at the limits of a narrower type of whole numbers; a floating-point value becomes the nearest whole number, a NaN 0.
What is compared gives bool.

NaN: min, max, clip and relu let it through, comparisons with it are false but for neq, logic takes it for true.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..core.descriptor import DTYPES, FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import FLOAT, INT, NAME, Epilogue, Operation, Tensors, attribute
from .pointwise import like

TYPES = tuple(name for name in DTYPES if not name.startswith("f8"))
WHOLE = ("bool", "u8", "i8", "i32", "i64")


class Mode(NamedTuple):
    """One row of the table."""

    code: int  # constant under which kernels know it
    reads: tuple[str, ...]  # roles, beside z
    whole: bool  # whether it takes whole numbers
    formula: str


_ROWS: tuple[tuple[str, str, bool, str], ...] = (
    ("identity", "x", True, "x"),
    ("add", "x b", True, "x + b"),
    ("add_square", "x b", True, "x + b^2"),
    ("sub", "x b", True, "x - b"),
    ("mul", "x b", True, "x * b"),
    ("div", "x b", False, "x / b"),
    ("min", "x b", True, "the smaller"),
    ("max", "x b", True, "the larger"),
    ("mod", "x b", False, "x - b * trunc(x / b)"),
    ("pow", "x b", False, "x^b"),
    ("abs", "x", True, "|x|"),
    ("ceil", "x", False, "the next whole number up"),
    ("floor", "x", False, "the next whole number down"),
    ("rsqrt", "x", False, "1 / sqrt(x)"),
    ("sqrt", "x", False, "sqrt(x)"),
    ("exp", "x", False, "exp(x)"),
    ("log", "x", False, "log(x)"),
    ("neg", "x", True, "-x"),
    ("sin", "x", False, "sin(x)"),
    ("cos", "x", False, "cos(x)"),
    ("tan", "x", False, "tan(x)"),
    ("erf", "x", False, "erf(x)"),
    ("reciprocal", "x", False, "1 / x"),
    ("not", "x", True, "1 - x"),
    ("clip", "x", False, "min(max(x, lower), upper)"),
    ("logical_not", "x", True, "x = 0"),
    ("logical_and", "x b", True, "x and b, true where not 0"),
    ("logical_or", "x b", True, "x or b"),
    ("cmp_eq", "x b", True, "x = b"),
    ("cmp_neq", "x b", True, "x != b"),
    ("cmp_gt", "x b", True, "x > b"),
    ("cmp_ge", "x b", True, "x >= b"),
    ("cmp_lt", "x b", True, "x < b"),
    ("cmp_le", "x b", True, "x <= b"),
    ("binary_select", "x b t", True, "x where t is not 0, else b"),
    ("gen_index", "x", True, "the index along `axis`; of x only the shape counts"),
    ("relu", "x", False, "upper where x >= upper, x where x > lower, else lower + slope * (x - lower)"),
    ("relu_bwd", "x b", False, "0 where b >= upper, x where b > lower, else slope * x: x is the gradient"),
)
MODES = {name: Mode(code, tuple(reads.split()), whole, text) for code, (name, reads, whole, text) in enumerate(_ROWS)}
TRUTHS = tuple(name for name in MODES if name.startswith(("cmp_", "logical_")))


def broadcast(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of tensors given by role.

    Examples
    --------
    >>> broadcast({"x": (4, 1, 3), "b": (2, 1)})
    (4, 2, 3)
    """
    out: tuple[int, ...] = ()
    for role, shape in shapes.items():
        ndim = max(len(out), len(shape))
        a, b = (1,) * (ndim - len(out)) + out, (1,) * (ndim - len(shape)) + shape
        if any(n != m and 1 not in (n, m) for n, m in zip(a, b, strict=True)):
            raise InvalidArgument(role, f"shape {list(shape)}", f"sizes that are 1 or those of {list(out)}")
        out = tuple(m if n == 1 else n for n, m in zip(a, b, strict=True))
    return out


def spread_strides(t: TensorDescriptor, ndim: int) -> tuple[int, ...]:
    """Strides along the axes of the result: 0 where the tensor repeats."""
    own = tuple(s if n != 1 else 0 for n, s in zip(t.shape, t.strides, strict=True))
    return (0,) * (ndim - t.ndim) + own


def promoted(dtypes: list[str]) -> str:
    """The type of a result: the framework's rule for tensors.

    Examples
    --------
    >>> promoted(["bf16", "f16"]), promoted(["i8", "u8"]), promoted(["bool", "i32"]), promoted(["f64", "bf16"])
    ('f32', 'i32', 'i32', 'f64')
    """
    found = set(dtypes)
    if len(found) == 1:
        return dtypes[0]
    floats = found & {*FLOATING}
    if floats:
        return floats.pop() if len(floats) == 1 else "f64" if "f64" in floats else "f32"
    if found == {"i8", "u8"}:  # the framework has 16 bits for these two, this library does not
        return "i32"
    return max(found, key=WHOLE.index)


@dataclasses.dataclass(frozen=True)
class ElementwiseFwd(Operation):
    """``y = f(alpha1 * x, alpha2 * b, t) + beta * z``.

    Parameters
    ----------
    mode : str
        One of `MODES`.
    alpha1, alpha2 : float
        Factors of x and b; whole ones for tensors of whole numbers.
    axis : int
        For gen_index.
    lower, upper : float
        For clip, relu and relu_bwd.
    slope : float
        For relu and relu_bwd; where it is 0, an infinity below `lower` is no NaN.
    """

    mode: str = attribute(NAME, "identity")
    alpha1: float = attribute(FLOAT, 1.0)
    alpha2: float = attribute(FLOAT, 1.0)
    axis: int = attribute(INT, 0)
    lower: float = attribute(FLOAT, 0.0)
    upper: float = attribute(FLOAT, 0.0)
    slope: float = attribute(FLOAT, 0.0)

    name = "elementwise_fwd"
    inputs, optional, outputs = ("x",), ("b", "t", "z"), ("y",)
    epilogue = frozenset({"beta"})

    def resolved(self, tensors: Tensors) -> Operation:
        if self.mode not in MODES:
            raise InvalidArgument("mode", repr(self.mode), ", ".join(MODES))
        reads = MODES[self.mode].reads
        for role in ("b", "t"):
            if (role in tensors) != (role in reads):
                found = str(tensors[role]) if role in tensors else "nothing"
                raise InvalidArgument(role, found, f"{self.mode} reads {' and '.join(reads)}")
        for name, used in (("alpha1", self.mode not in ("gen_index", *TRUTHS)), ("alpha2", "b" in reads)):
            if getattr(self, name) != 1.0 and not used:
                raise InvalidArgument(name, getattr(self, name), f"1.0 for {self.mode}")
        if self.slope != 0.0 and self.mode not in ("relu", "relu_bwd"):
            raise InvalidArgument("slope", self.slope, f"0.0 for {self.mode}")
        if self.mode in ("clip", "relu", "relu_bwd") and not self.lower <= self.upper:
            raise InvalidArgument("lower", self.lower, f"a number that is at most upper, {self.upper}")
        if self.mode != "gen_index":
            return self
        ndim = tensors["x"].ndim
        if not -ndim <= self.axis < ndim:
            raise InvalidArgument("axis", self.axis, f"an axis from {-ndim} to {ndim - 1}")
        return dataclasses.replace(self, axis=self.axis % ndim)

    def shape(self, tensors: Tensors) -> tuple[int, ...]:
        """Of y."""
        return broadcast({role: tensors[role].shape for role in ("x", "b", "t", "z") if role in tensors})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        shape = self.shape(tensors)
        dtype = promoted([tensors[role].dtype for role in ("x", "b") if role in tensors])
        if self.mode in TRUTHS:
            dtype = "bool"
        elif self.mode == "gen_index":
            dtype = "i64"
        x = tensors["x"]
        return {"y": like(x, dtype) if x.shape == shape else TensorDescriptor(dtype, shape)}

    @staticmethod
    def is_whole(tensors: Tensors) -> bool:
        """Whether x and b are whole numbers, and so what is computed."""
        return all(tensors[role].dtype in WHOLE for role in ("x", "b") if role in tensors)

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        whole = self.is_whole(tensors)
        for role, t in tensors.items():
            if t.dtype not in TYPES:
                raise InvalidArgument(role, str(t), f"one of the types {', '.join(TYPES)}")
            if role in ("b", "z") and (t.dtype in WHOLE) != whole:
                kind = "whole numbers" if whole else "a floating-point type"
                raise InvalidArgument(role, str(t), f"{kind}, as {'the others' if role == 'z' else 'x'}")
        if whole and not MODES[self.mode].whole:
            raise InvalidArgument("x", str(tensors["x"]), f"a floating-point type for {self.mode}")
        factors = {"alpha1": self.alpha1, "alpha2": self.alpha2, "beta": epilogue.beta}
        for name, value in factors.items():
            if whole and value != int(value):
                raise InvalidArgument(name, value, "a whole number, as the tensors are")
        if not whole and self.mode not in ("identity", "gen_index", *TRUTHS) and tensors["y"].dtype in WHOLE:
            raise InvalidArgument("y", str(tensors["y"]), f"a floating-point type for {self.mode} of such")
        shape = self.shape(tensors)
        if tensors["y"].shape != shape:
            raise InvalidArgument("y", str(tensors["y"]), f"shape {list(shape)}")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors["y"].numel)

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Whole numbers are small and may be 0, roots and logarithms have positive values, comparisons ties."""
        import torch

        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if tensors[role].dtype in WHOLE:
            low = 0 if tensors[role].dtype in ("bool", "u8") else -5
            return torch.randint(low, 2 if tensors[role].dtype == "bool" else 7, shape, generator=generator)
        if self.mode.startswith(("cmp_", "logical_")) or role == "t":
            return values.round()
        if (self.mode in ("sqrt", "rsqrt", "log", "pow") and role == "x") or (
            self.mode in ("div", "mod") and role == "b"
        ):
            return values.abs() + 0.25
        if self.mode in ("reciprocal", "tan"):
            return (values.abs() + 0.5) if self.mode == "reciprocal" else values.clamp(-1.2, 1.2)
        return values
