"""The framework's own arithmetic, one call a problem where it has one."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Peer

_CALLS: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "min": torch.minimum, "max": torch.maximum,
    "mod": torch.fmod, "pow": torch.pow, "abs": torch.abs, "ceil": torch.ceil, "floor": torch.floor,
    "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "exp": torch.exp, "log": torch.log, "neg": torch.neg, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "erf": torch.erf, "reciprocal": torch.reciprocal,
    "logical_not": torch.logical_not, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "cmp_eq": torch.eq, "cmp_neq": torch.ne, "cmp_gt": torch.gt, "cmp_ge": torch.ge, "cmp_lt": torch.lt,
    "cmp_le": torch.le,
}  # fmt: skip


def _fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    plain = op.alpha1 == op.alpha2 == 1.0 and "z" not in problem.inputs
    call = _CALLS.get(op.mode)
    roles = ("x", "b") if "b" in problem.inputs else ("x",)
    same = all(problem[role].dtype == problem["x"].dtype for role in roles)
    if call is None or not plain or not same or problem["y"] != op.infer(problem.tensors)["y"]:
        raise NotSupported(f"the framework has no one call for {op.mode} as the problem has it")
    return Peer(f"torch.{call.__name__}", ("y",), lambda t: lambda: call(*(t[role] for role in roles)))


PEERS = {"elementwise_fwd": _fwd}
