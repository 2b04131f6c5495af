"""The pass that finishes a sum on a CPU: ``y = act(alpha * v + beta * z + bias)``, any strides, any type.

The sums lie in scratch memory in whatever arrangement their method gave them; `Finisher` works out once, for one
problem, what `lucidnn.engines._numba.im2col.finish` reads from its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.problem import Problem
from . import im2col
from .epilogue import ACTIVATIONS
from .memory import token
from .pool import threads


class Finisher:
    """Writes sums to the problem's output.

    Parameters
    ----------
    problem : Problem
    like : str
        Type of the sums, f32 or f64.
    limit : int
        Threads that the work is worth.
    shape, source, target : sequence of int
        Sizes and both sides' strides for five axes (N, C, D, H, W); z and the bias are the problem's.
    inner : int
        The axis to loop over innermost.
    """

    def __init__(self, problem: Problem, like: str, limit: int, shape: Sequence[int], source, target, inner: int):
        z, bias = problem.tensors.get("z"), problem.tensors.get("bias")
        add = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (0,) * 5
        shift = (0, bias.strides[0], 0, 0, 0) if bias else (0,) * 5
        order = [axis for axis in range(5) if axis != inner] + [inner]
        values = [values[axis] for values in (shape, source, shift, add, target) for axis in order]
        self.table = torch.tensor([*values, int(z is not None)], dtype=torch.int64)
        epilogue = problem.epilogue
        self.limit = limit
        self.scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter], dtype=torch.float64)
        self.code = ACTIVATIONS[epilogue.activation]
        self.like = token(like)
        self.bias_like = token(bias.dtype) if bias else self.like
        self.z_like = token(z.dtype) if z else self.like
        out = problem[problem.outputs[0]]
        self.out = token(out.dtype)
        self.image_at = order.index(0) if inner != 0 else 4
        self.z_step = add[0] * (z.itemsize if z else 0)
        self.y_step = target[0] * out.itemsize

    def __call__(self, source: torch.Tensor, bias: Any, z: Any, y: torch.Tensor, n0: int, images: int) -> None:
        """Sums of images n0 to n0 + `images`; `source` starts at the first of them, `z` and `y` at image 0."""
        table = self.table
        if images != int(table[self.image_at]):  # the last block may have fewer images
            table = table.clone()
            table[self.image_at] = images
        im2col.finish(
            min(threads(), self.limit),
            table.data_ptr(),
            self.scalars.data_ptr(),
            source.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if z is None else z.data_ptr() + n0 * self.z_step,
            y.data_ptr() + n0 * self.y_step,
            self.code,
            self.like,
            self.bias_like,
            self.z_like,
            self.out,
        )
