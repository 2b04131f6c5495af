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
    "f64": ("float64", 8),
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "f8e4m3": ("float8_e4m3fn", 1),
    "f8e5m2": ("float8_e5m2", 1),
    "i64": ("int64", 8),
    "i32": ("int32", 4),
    "i8": ("int8", 1),
    "u8": ("uint8", 1),
    "bool": ("bool", 1),
}
_SHORT = {long: short for short, (long, _) in DTYPES.items()}
FLOATING = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
MAX_ALIGNMENT = 16  # bytes; the widest access a thread makes, and what every allocator guarantees

_LAYOUTS = {2: ("nc", ""), 3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}


def short_dtype(dtype: Any) -> str:
    """Short name of a framework data type or of a long or short name.

    Examples
    --------
    >>> short_dtype("bfloat16"), short_dtype("torch.float32"), short_dtype("f16")
    ('bf16', 'f32', 'f16')
    """
    name = str(dtype).removeprefix("torch.")
    short = _SHORT.get(name, name)
    if short not in DTYPES:
        raise InvalidArgument("dtype", name, ", ".join(DTYPES))
    return short


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements.

    Examples
    --------
    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with axis 1 (channels) innermost.

    Examples
    --------
    >>> channels_last_strides((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    n, *inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (n, inner[-1], *inner[:-1])


def is_dense(shape: Sequence[Any], strides: Sequence[Any], channels_last: bool = False) -> bool:
    """Whether strides are those of a dense tensor; axes of length one do not count. Takes symbolic sizes too."""
    order = [*range(2, len(shape))]
    order = [0, *order, 1] if channels_last else [0, 1, *order][: len(shape)]
    step: Any = 1
    for axis in reversed(order):
        if shape[axis] == 0:
            return True
        if shape[axis] != 1 and strides[axis] != step:
            return any(n == 0 for n in shape)
        step = step * shape[axis]
    return True


def is_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether a tensor counts as channels-last: dense so, and not also dense in logical order."""
    return 3 <= len(shape) <= 5 and not is_dense(shape, strides) and is_dense(shape, strides, channels_last=True)


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
    shape : tuple of int
        Logical order: N, C, spatial.
    strides : tuple of int, optional
        In elements, not negative; row-major if left out.
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
        set_ = object.__setattr__
        set_(self, "dtype", short_dtype(self.dtype))
        shape = tuple(int(n) for n in self.shape)
        if any(n < 0 for n in shape):
            raise InvalidArgument("shape", list(shape), "sizes >= 0")
        strides = contiguous_strides(shape) if self.strides is None else tuple(int(s) for s in self.strides)
        if len(strides) != len(shape) or any(s < 0 for s in strides):
            raise InvalidArgument("strides", list(strides), f"{len(shape)} strides >= 0, one for each axis")
        if self.alignment not in (1, 2, 4, 8, 16):
            raise InvalidArgument("alignment", self.alignment, "1, 2, 4, 8 or 16 bytes")
        strides, layout = _normalised(shape, strides)
        set_(self, "shape", shape)
        set_(self, "strides", strides)
        set_(self, "_layout", layout)

    @classmethod
    def make(cls, dtype: str, shape: tuple[int, ...], layout: str = "", alignment: int = MAX_ALIGNMENT) -> TensorDescriptor:
        """Descriptor of a dense tensor in a named layout (``nchw``, ``nhwc``, ... or '' for row-major)."""
        first, last = _LAYOUTS.get(len(shape), ("", ""))
        if layout and layout == last:
            return cls(dtype, shape, channels_last_strides(shape), alignment)
        if layout in ("", first):
            return cls(dtype, shape, None, alignment)  # type: ignore[arg-type]
        known = " or ".join(name for name in (first, last) if name) or "no layout"
        raise InvalidArgument("layout", repr(layout), f"{known} for {len(shape)} axes, or strides in parentheses")

    @classmethod
    def of(cls, tensor: Any) -> TensorDescriptor:
        """Descriptor of a framework tensor (anything with ``dtype``, ``shape``, ``stride()`` and ``data_ptr()``)."""
        return cls(short_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), pointer_alignment(tensor))

    @classmethod
    def parse(cls, text: str) -> TensorDescriptor:
        """Read the text form: ``dtype[sizes]``, then ``@layout`` or ``@(strides)``, then ``%alignment``."""
        match = re.fullmatch(r"(\w+)\[([\d,]*)\](?:@(\w+)|@\(([\d,]*)\))?(?:%(\d+))?", text)
        if not match:
            raise InvalidArgument("tensor", repr(text), "dtype[n,c,...] with @layout or @(strides) and %alignment")
        dtype, sizes, layout, strides, alignment = match.groups()
        shape = _integers(sizes, text)
        align = int(alignment) if alignment else MAX_ALIGNMENT
        if strides is not None:
            return cls(dtype, shape, _integers(strides, text), align)
        return cls.make(dtype, shape, layout or "", align)

    def __str__(self) -> str:
        place = "@(" + ",".join(map(str, self.strides)) + ")" if self.layout == "strided" else f"@{self.layout}" if self.layout else ""
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
        """Whether two index tuples may name one element (stride 0 or interleaved views); such a tensor is no output."""
        reach = 0
        for size, stride in sorted(((n, s) for n, s in zip(self.shape, self.strides, strict=True) if n > 1), key=lambda ns: ns[1]):
            if stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements (an expanded axis counts once)."""
        return self.itemsize * math.prod(n if s or n == 0 else 1 for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def span(self) -> int:
        """Elements from the first to one past the last that an index can reach; 64-bit offsets are needed past 2^31."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def pointer_alignment(tensor: Any) -> int:
    """Largest power of two, at most 16, that divides the tensor's address; 16 where it has none (meta, fake)."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return MAX_ALIGNMENT
    return min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT


def _integers(text: str, whole: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument("tensor", repr(whole), "numbers separated by single commas") from None
