"""Starts the CPU convolutions whose kernels read everything fixed about a problem from one table.

Such a kernel takes the addresses of its table and scalars, of the operands, of what the epilogue adds (0 where there is
none), of the result and the workspace, then the number of threads and a token for each type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.engine import Run
from ..core.problem import Problem
from . import _numba as nb


def convolving(problem: Problem, kernel: Callable[..., None], table: Any, scalars: Any, acc: str, limit: int) -> Run:
    """The function that runs a forward or data-gradient kernel on at most `limit` threads, sums being of type `acc`."""
    roles = problem.inputs
    like, sums = nb.token(problem[roles[0]].dtype), nb.token(acc)
    out = nb.token(problem[problem.outputs[0]].dtype)
    bias_like = nb.token(problem["bias"].dtype) if "bias" in roles else sums
    bias_at = roles.index("bias") if "bias" in roles else None
    z_at = roles.index("z") if "z" in roles else None
    z_like = nb.token(problem["z"].dtype) if "z" in roles else out
    table_at, scalars_at, threads = table.data_ptr(), scalars.data_ptr(), nb.threads

    def run(tensors: tuple[Any, ...], workspace: Any, keep: Any = (table, scalars)) -> None:
        kernel(
            table_at,
            scalars_at,
            tensors[0].data_ptr(),
            tensors[1].data_ptr(),
            0 if bias_at is None else tensors[bias_at].data_ptr(),
            0 if z_at is None else tensors[z_at].data_ptr(),
            tensors[-1].data_ptr(),
            workspace.data_ptr(),
            min(threads(), limit),
            like,
            bias_like,
            sums,
            z_like,
            out,
        )

    return run


def summing(problem: Problem, kernel: Callable[..., None], table: Any, scalars: Any, acc: str, limit: int) -> Run:
    """The function that runs a filter-gradient kernel; as `convolving`, without a bias."""
    like, sums, out = (nb.token(t) for t in (problem["x"].dtype, acc, problem["dw"].dtype))
    has_z = "z" in problem.tensors
    z_like = nb.token(problem["z"].dtype) if has_z else out
    table_at, scalars_at, threads = table.data_ptr(), scalars.data_ptr(), nb.threads

    def run(tensors: tuple[Any, ...], workspace: Any, keep: Any = (table, scalars)) -> None:
        kernel(
            table_at,
            scalars_at,
            tensors[0].data_ptr(),
            tensors[1].data_ptr(),
            tensors[2].data_ptr() if has_z else 0,
            tensors[-1].data_ptr(),
            workspace.data_ptr(),
            min(threads(), limit),
            like,
            sums,
            z_like,
            out,
        )

    return run
