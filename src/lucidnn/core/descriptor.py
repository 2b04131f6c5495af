"""Tensor descriptors: data type, logical shape, strides and pointer alignment, with a text form.

Shapes are in logical order (N, C, spatial...) whatever the strides, from which the layout is derived. Axes of length
one have no meaningful stride: they are normalised, and where both layouts fit (C = 1, or one pixel) it is the first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, Self

from .errors import InvalidArgument

# short name -> (framework's name, bytes). The short names are the ones in problem lines and kernel signatures.
DTYPES = {
    "f64": ("float64", 8), "f32": ("float32", 4), "f16": ("float16", 2), "bf16": ("bfloat16", 2),
    "f8e4m3": ("float8_e4m3fn", 1), "f8e5m2": ("float8_e5m2", 1),
    "i64": ("int64", 8), "i32": ("int32", 4), "i8": ("int8", 1), "u8": ("uint8", 1), "bool": ("bool", 1),
}  # fmt: skip
FLOATING = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
MAX_ALIGNMENT = 16  # bytes; the widest access a thread makes, and what every allocator guarantees

# A field that follows from the others; `__post_init__` sets it through vars(), past the lock of a frozen dataclass.
derived = functools.partial(dataclasses.field, init=False, compare=False, repr=False)
_SHORT = {long: short for short, (long, _) in DTYPES.items()}
_LAYOUTS = {2: ("nc", ""), 3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}


def short_dtype(dtype: Any) -> str:
    """Short name of a framework data type, or of a long or short name.

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
    return 3 <= len(shape) <= 5 and not is_dense(shape, strides) and is_dense(shape, strides, True)


def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            return 0 not in shape
        reach += (size - 1) * stride
    return False


@functools.lru_cache(maxsize=4096)
def _derive(shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
    """What follows from shape and strides, and the strides with meaningless entries filled in."""
    first, last = _LAYOUTS.get(len(shape), ("", ""))
    contiguous, channels_last = is_dense(shape, strides), is_channels_last(shape, strides)
    if contiguous:
        strides, layout = contiguous_strides(shape), first
    elif channels_last:
        strides, layout = channels_last_strides(shape), last
    else:  # an axis of length one is never stepped along; stride 1 keeps the text form unique
        strides, layout = tuple(1 if n == 1 else s for n, s in zip(shape, strides, strict=True)), "strided"
    numel = math.prod(shape)
    axes = [*zip(shape, strides, strict=True)]
    reach, distinct = sum((n - 1) * s for n, s in axes), math.prod(n if s or n == 0 else 1 for n, s in axes)
    known = {"strides": strides, "layout": layout, "is_contiguous": contiguous, "is_channels_last": channels_last}
    known |= {"ndim": len(shape), "numel": numel, "distinct": distinct, "span": 1 + reach if numel else 0}
    return known | {"is_overlapping": _overlap(shape, strides)}


@dataclasses.dataclass(frozen=True, repr=False)
class TensorDescriptor:
    """One tensor as a problem sees it: sizes and strides in logical order (N, C, spatial).

    >>> TensorDescriptor.make("bf16", (64, 256, 56, 56), "nhwc")
    TensorDescriptor('bf16[64,256,56,56]@nhwc')
    >>> TensorDescriptor.parse("f32[2,3]@(0,1)%4").strides
    (0, 1)
    """

    dtype: str  # short name, see `DTYPES`
    shape: tuple[int, ...]
    strides: tuple[int, ...] = None  # type: ignore[assignment]  # in elements, none negative; row-major if left out
    alignment: int = MAX_ALIGNMENT  # the power of two, at most 16, that divides the first element's address, in bytes
    layout: str = derived()  # nchw-like, nhwc-like, strided, or '' where the rank has no named layout
    is_contiguous: bool = derived()  # dense in logical order
    is_channels_last: bool = derived()  # dense with channels innermost, and not also in logical order
    is_overlapping: bool = derived()  # whether two index tuples may name one element; such a tensor is no output
    ndim: int = derived()
    numel: int = derived()  # an expanded axis (stride 0) counted in full
    distinct: int = derived()  # an expanded axis counted once
    span: int = derived()  # elements from the first to one past the last that an index reaches
    itemsize: int = derived()  # bytes
    nbytes: int = derived()  # of the distinct elements

    def __post_init__(self):
        dtype, shape = short_dtype(self.dtype), tuple(int(n) for n in self.shape)
        strides = contiguous_strides(shape) if self.strides is None else tuple(int(s) for s in self.strides)
        if min(shape, default=0) < 0:
            raise InvalidArgument("shape", list(shape), "sizes >= 0")
        if len(strides) != len(shape) or min(strides, default=0) < 0:
            raise InvalidArgument("strides", list(strides), f"{len(shape)} strides >= 0, one for each axis")
        if self.alignment not in (1, 2, 4, 8, 16):
            raise InvalidArgument("alignment", self.alignment, "1, 2, 4, 8 or 16 bytes")
        known, itemsize = _derive(shape, strides), DTYPES[dtype][1]
        vars(self).update(known, dtype=dtype, shape=shape, itemsize=itemsize, nbytes=itemsize * known["distinct"])

    @classmethod
    def make(cls, dtype: str, shape: Sequence[int], layout: str = "", alignment: int = 16) -> Self:
        """Descriptor of a dense tensor in a named layout (``nchw``, ``nhwc``, ... or '' for row-major)."""
        names = [name for name in _LAYOUTS.get(len(shape), ()) if name]
        if layout and layout not in names:
            accepted = f"{' or '.join(names) or 'no layout'} for {len(shape)} axes, or strides in parentheses"
            raise InvalidArgument("layout", repr(layout), accepted)
        strides = channels_last_strides(shape) if layout in names[1:] else contiguous_strides(shape)
        return cls(dtype, tuple(shape), strides, alignment)

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """Descriptor of a framework tensor (``dtype``, ``shape``, ``stride()``, ``data_ptr()``)."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # fake and meta tensors have no address
            address = 0
        alignment = min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT
        return cls(short_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), alignment)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form: ``dtype[sizes]``, then ``@layout`` or ``@(strides)``, then ``%alignment``."""
        numbers = r"((?:\d+(?:,\d+)*)?)"
        match = re.fullmatch(rf"(\w+)\[{numbers}\](?:@(?:(\w+)|\({numbers}\)))?(?:%(\d+))?", text)
        if not match:
            raise InvalidArgument("tensor", repr(text), "dtype[n,c,...] with @layout or @(strides) and %alignment")
        dtype, sizes, layout, strides, alignment = match.groups()
        shape, align = tuple(int(n) for n in sizes.split(",") if n), int(alignment or MAX_ALIGNMENT)
        if strides is None:
            return cls.make(dtype, shape, layout or "", align)
        return cls(dtype, shape, tuple(int(s) for s in strides.split(",") if s), align)

    def __str__(self) -> str:
        strides = ",".join(map(str, self.strides))
        place = {"strided": f"@({strides})", "": ""}.get(self.layout, f"@{self.layout}")
        odd = "" if self.alignment == MAX_ALIGNMENT else f"%{self.alignment}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{place}{odd}"

    def __repr__(self) -> str:
        return f"TensorDescriptor({str(self)!r})"
