"""``resample.grid_scatter_turned``: the gradients of sampling by a grid, of images with pixels innermost, in Triton.

Method: as `resample.grid_turned`, over a copy of x with channels last. The gradient of x is added up atomically in the
workspace, in float32 (float64), with channels last too, and turned when it is rounded into dx: neighbouring lanes then
add to neighbouring places. The order of the sums is not fixed, so two runs may differ in the last bits.
Cost: x copied, the sums cleared, met by an atomic addition a tap, channel and point, and read. 2-D images.
"""

from typing import Any

from ...core.engine import Config
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.launch import Launch, TritonEngine
from ._grid_last import copied_bytes, last_configs, last_launches, last_refusals, summed_bytes, tap_traffic


class GridScatterTurned(TritonEngine):
    name = "resample.grid_scatter_turned"
    operations = ("grid_sample_bwd",)
    notes = frozenset({"runtime_compilation", "nondeterministic"})

    def refusals(self, problem: Problem) -> list[str]:
        r = last_refusals(problem, self.configs(problem))
        op: Any = problem.op
        r.require("dx" in problem.tensors, "gradients = both or x", op.gradients)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return last_configs(problem)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return copied_bytes(problem) + summed_bytes(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        moved = problem.bytes + 2 * copied_bytes(problem) + 3 * summed_bytes(problem)
        moved += tap_traffic(problem, channels_last=True)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.6, launches=3)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return last_launches(problem, config)
