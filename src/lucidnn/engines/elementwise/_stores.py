"""How Triton kernels of this family read and store values of every type."""

import triton
import triton.language as tl

from .._triton.epilogue import convert

LIMITS = {"u8": (0, 255), "i8": (-128, 127), "i32": (-(2**31), 2**31 - 1)}


def cut_of(dtype: str) -> int:
    """What `store` does to results of a type: 1 to cut them off at its `LIMITS`, 2 to make a truth of them."""
    return 2 if dtype == "bool" else 1 if dtype in LIMITS else 0


@triton.jit
def exact(v, TYPE: tl.constexpr):
    """A value as it is computed with: 64-bit whole numbers, or floating point."""
    if TYPE == tl.int64:  # noqa: SIM300
        r = v.to(tl.int64)
    elif v.dtype.is_floating():
        r = convert(v, TYPE)
    else:
        r = v.to(TYPE)
    return r


@triton.jit
def store(y, r, mask, low, high, CUT: tl.constexpr):
    """Write results in y's type; `low` and `high` are the limits where whole numbers are cut off."""
    if CUT == 1:  # to a narrower type of whole numbers
        if r.dtype.is_floating():
            r = convert(r, tl.float64)
            near = tl.floor(r)
            part = r - near
            odd = tl.floor(near * 0.5) * 2.0 != near
            r = tl.where((part > 0.5) | ((part == 0.5) & odd), near + 1.0, near)
            r = tl.where(r != r, 0.0, r)
            r = tl.where(r > high, high, tl.where(r < low, low, r))
        else:
            r = tl.where(r > high.to(tl.int64), high.to(tl.int64), r)
            r = tl.where(r < low.to(tl.int64), low.to(tl.int64), r)
        r = r.to(tl.int64)
    if CUT == 2:  # to a truth
        r = r != 0
    if r.dtype.is_floating() and y.dtype.element_ty.is_floating():
        tl.store(y, convert(r, y.dtype.element_ty), mask=mask)
    elif y.dtype.element_ty.is_floating() and y.dtype.element_ty.primitive_bitwidth == 16:
        tl.store(y, r.to(tl.float32).to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(y, r.to(y.dtype.element_ty), mask=mask)
