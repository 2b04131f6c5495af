"""Tensor descriptors: data type, logical shape, strides and pointer alignment, with a text form.

Shapes are in logical order (N, C, spatial...) whatever the strides; the layout is derived from the strides and never
stored, so that it cannot contradict them. Axes of length one have no meaningful stride: they are normalised, and a
tensor that is both channels-first and channels-last (C = 1, or one pixel) counts as channels-first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgument

# short name -> (framework's name, bytes). The short names are the ones in problem lines and kernel signatures.
DTYPES = {
    "f64": ("float64", 8), "f32": ("float32", 4), "f16": ("float16", 2), "bf16": ("bfloat16", 2),
    "f8e4m3": ("float8_e4m3fn", 1), "f8e5m2": ("float8_e5m2", 1),
    "i64": ("int64", 8), "i32": ("int32", 4), "i8": ("int8", 1), "u8": ("uint8", 1), "bool": ("bool", 1),
}  # fmt: skip
FLOATING = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
MAX_ALIGNMENT = 16  # bytes; the widest access a thread makes, and what every allocator guarantees

_SHORT = {long: short for short, (long, _) in DTYPES.items()}
_LAYOUTS = {2: ("nc", ""), 3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}


def short_dtype(dtype: Any) -> str:
    """Short name of a framework data type, or of a long or short name.

    Examples
    --------
    >>> short_dtype("bfloat16"), short_dtype("torch.float32"), short_dtype("f16")
    ('bf16', 'f32', 'f16')
    """
    name = str(dtype).removeprefix("torch.")
    if (short := _SHORT.get(name, name)) not in DTYPES:
        raise InvalidArgument("dtype", name, ", ".join(DTYPES))
    return short


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides with axis 1 (channels) innermost.

    Examples
    --------
    >>> channels_last_strides((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    n, *inner, c = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (n, c, *inner)


def is_dense(shape: Sequence[Any], strides: Sequence[Any], channels_last: bool = False) -> bool:
    """Whether strides are those of a dense tensor; axes of length one do not count. Takes symbolic sizes too."""
    order = [0, *range(2, len(shape)), 1] if channels_last else [*range(len(shape))]
    step: Any = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != step:
            return any(n == 0 for n in shape)
        step = step * shape[axis]
    return True


def is_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether a tensor counts as channels-last: dense so, and not also dense in logical order."""
    return (
        3 <= len(shape) <= 5 and not is_dense(shape, strides) and is_dense(shape, strides, channels_last=True)
    )


@functools.lru_cache(maxsize=4096)
def _normalised(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Strides with meaningless entries filled in, and the layout's name."""
    names = _LAYOUTS.get(len(shape), ("", ""))
    if is_dense(shape, strides):
        return contiguous_strides(shape), names[0]
    if is_channels_last(shape, strides):
        return channels_last_strides(shape), names[1]
    # An axis of length one is never stepped along; stride 1 keeps the text form unique.
    return tuple(1 if n == 1 else s for n, s in zip(shape, strides, strict=True)), "strided"


@dataclasses.dataclass(frozen=True)
class TensorDescriptor:
    """One tensor as a problem sees it.

    Parameters
    ----------
    dtype : str
        Short name, see `DTYPES`.
    shape, strides : tuple of int
        Logical order (N, C, spatial); strides in elements, not negative, row-major if left out.
    alignment : int
        Power of two, at most 16: what the first element's address is a multiple of, in bytes.

    Examples
    --------
    >>> TensorDescriptor.make("bf16", (64, 256, 56, 56), "nhwc")
    TensorDescriptor('bf16[64,256,56,56]@nhwc')
    >>> TensorDescriptor.parse("f32[2,3]@(0,1)%4").strides
    (0, 1)
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below
    alignment: int = MAX_ALIGNMENT

    def __post_init__(self):
        shape = tuple(int(n) for n in self.shape)
        strides = contiguous_strides(shape) if self.strides is None else tuple(int(s) for s in self.strides)
        if any(n < 0 for n in shape):
            raise InvalidArgument("shape", list(shape), "sizes >= 0")
        if len(strides) != len(shape) or any(s < 0 for s in strides):
            raise InvalidArgument("strides", list(strides), f"{len(shape)} strides >= 0, one for each axis")
        if self.alignment not in (1, 2, 4, 8, 16):
            raise InvalidArgument("alignment", self.alignment, "1, 2, 4, 8 or 16 bytes")
        strides, layout = _normalised(shape, strides)
        fields = {"dtype": short_dtype(self.dtype), "shape": shape, "strides": strides, "_layout": layout}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def make(
        cls, dtype: str, shape: Sequence[int], layout: str = "", alignment: int = MAX_ALIGNMENT
    ) -> TensorDescriptor:
        """Descriptor of a dense tensor in a named layout (``nchw``, ``nhwc``, ... or '' for row-major)."""
        first, last = _LAYOUTS.get(len(shape), ("", ""))
        if layout not in ("", first, last):
            known = " or ".join(name for name in (first, last) if name) or "no layout"
            accepted = f"{known} for {len(shape)} axes, or strides in parentheses"
            raise InvalidArgument("layout", repr(layout), accepted)
        strides = channels_last_strides(shape) if layout and layout == last else None
        return cls(dtype, tuple(shape), strides, alignment)  # type: ignore[arg-type]

    @classmethod
    def of(cls, tensor: Any) -> TensorDescriptor:
        """Descriptor of a framework tensor (``dtype``, ``shape``, ``stride()``, ``data_ptr()``)."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # fake and meta tensors have no address
            address = 0
        alignment = min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT
        return cls(short_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), alignment)

    @classmethod
    def parse(cls, text: str) -> TensorDescriptor:
        """Read the text form: ``dtype[sizes]``, then ``@layout`` or ``@(strides)``, then ``%alignment``."""
        numbers = r"(\d+(?:,\d+)*)?"
        match = re.fullmatch(rf"(\w+)\[{numbers}\](?:@(\w+)|(@)\({numbers}\))?(?:%(\d+))?", text)
        if not match:
            form = "dtype[n,c,...] with @layout or @(strides) and %alignment"
            raise InvalidArgument("tensor", repr(text), form)
        dtype, sizes, layout, explicit, strides, alignment = match.groups()
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        align = int(alignment or MAX_ALIGNMENT)
        if explicit:
            return cls(dtype, shape, tuple(map(int, strides.split(","))) if strides else (), align)
        return cls.make(dtype, shape, layout or "", align)

    def __str__(self) -> str:
        strides = ",".join(map(str, self.strides))
        place = {"strided": f"@({strides})", "": ""}.get(self.layout, f"@{self.layout}")
        odd = "" if self.alignment == MAX_ALIGNMENT else f"%{self.alignment}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{place}{odd}"

    def __repr__(self) -> str:
        return f"TensorDescriptor({str(self)!r})"

    @property
    def layout(self) -> str:
        """``nchw``-like, ``nhwc``-like (by rank), ``strided``, or '' where the rank has no named layout."""
        return self._layout  # type: ignore[attr-defined]

    @property
    def is_contiguous(self) -> bool:
        """Dense in logical order."""
        return self.layout != "strided" and not self.is_channels_last

    @property
    def is_channels_last(self) -> bool:
        """Dense with channels innermost, and not also dense in logical order."""
        return self.ndim > 2 and self.layout == _LAYOUTS.get(self.ndim, ("", "?"))[1]

    @property
    def is_overlapping(self) -> bool:
        """Whether two index tuples may name one element; such a tensor is no output."""
        reach = 0
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride <= reach:
                return self.numel > 0
            reach += (size - 1) * stride
        return False

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements, an expanded axis counted in full."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements (an expanded axis counts once)."""
        sizes = (n if s or n == 0 else 1 for n, s in zip(self.shape, self.strides, strict=True))
        return self.itemsize * math.prod(sizes)

    @property
    def span(self) -> int:
        """Elements from the first to one past the last that an index reaches (64-bit offsets past 2^31)."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return 1 + reach if self.numel else 0
