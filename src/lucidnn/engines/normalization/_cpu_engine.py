"""What the CPU normalization engines do around their kernels: which tensor goes where, and when."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.problem import Problem
from .. import _numba as nb
from ._cpu import TYPES, offsets_of

OPERATIONS = (
    "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd", "group_norm_fwd", "group_norm_bwd",
)  # fmt: skip


def plain_refusals(problem: Problem) -> Refusals:
    """Types that are not computed with, and tensors without elements."""
    r = Refusals()
    r.require_tensors(problem.items, tuple(TYPES))
    r.require(problem["x"].numel > 0, "elements in x", str(problem["x"]))
    return r


class CpuNormalization(Engine):
    """An engine with a forward and a backward kernel of the signatures in ``rows.py``.

    `plan` gives, for a problem: `table` and an equal one with `nothing` to do, `like` (the type that is computed in),
    the number of `parts`, whether it is `backward`, and ``workspace(problem)`` in bytes.
    """

    targets = ("cpu",)
    kernels: ClassVar[tuple[Any, Any]]
    plan: ClassVar[Any]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self.plan(problem).workspace(problem)

    def build(self, problem: Problem, config: Config) -> Run:
        plan, e = self.plan(problem), problem.epilogue
        like = nb.token(plan.like)
        numbers = np.array([getattr(problem.op, "epsilon", 0.0), e.parameter], dtype=np.float64)
        table, parts, nothing = plan.table, plan.parts, plan.nothing
        table_at, numbers_at = table.ctypes.data, numbers.ctypes.data
        most = max(1, min(problem.target.processors, parts, nb.worthwhile(20 * problem["x"].numel, 1 << 30)))
        threads = (lambda: min(nb.threads(), most)) if most > 1 else (lambda: 1)
        order = {role: i for i, (role, _) in enumerate(problem.items)}
        offsets = {role: offsets_of(problem.tensors.get(role)) for role in ("scale", "bias", "dscale", "dbias")}
        facts = {}
        for role, places in offsets.items():
            kind = TYPES[problem[role].dtype] if role in order else 1
            facts[role] = (kind, 0 if places is None else places.ctypes.data)
        roles = ("x", "dy", "dx", "mean", "inv_variance") if plan.backward else ("x", "y", "mean", "inv_variance")
        ways = [order.get(role) for role in roles]
        parameters = [(order.get(r), *facts[r]) for r in offsets if plan.backward or r in ("scale", "bias")]
        kernel = self.kernels[plan.backward]
        # Compiles, or loads from disk; there is nothing to do.
        kernel(0, 1, nothing.ctypes.data, *[0] * (len(ways) + 3 * len(parameters) + 1), numbers_at, like)

        def run(tensors, workspace, _keep=(table, numbers, offsets)):
            at = [0 if i is None else tensors[i].data_ptr() for i in ways]
            for i, kind, places in parameters:
                at += (0 if i is None else tensors[i].data_ptr(), kind, places)
            scratch = workspace.data_ptr() + 63 & -64
            kernel(parts, threads(), table_at, *at, scratch, numbers_at, like)

        return run
