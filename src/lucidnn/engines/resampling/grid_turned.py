"""``resample.grid_turned``: sampling by a grid on a GPU from images with pixels innermost, by a copy, in Triton.

Method: x is turned to channels last in the workspace, then sampled with channels as lanes, a tile being turned on its
way to y; so also the gradient of the grid alone, summed over channels in one order. Deterministic.
Cost: x read, written and read again, and a sector a tap, point and 32 bytes of channels, where `resample.grid_tiled`
meets one a channel unless neighbouring points lie close to each other in x. 2-D images.
"""

from ...core.engine import Config
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.launch import Launch, TritonEngine
from ._grid_last import copied_bytes, last_configs, last_launches, last_refusals, tap_traffic


class GridTurned(TritonEngine):
    name = "resample.grid_turned"
    operations = ("grid_sample_fwd", "grid_sample_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = last_refusals(problem, self.configs(problem))
        r.require("dx" not in problem.tensors, "gradients = grid", getattr(problem.op, "gradients", ""))
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return last_configs(problem)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return copied_bytes(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        moved = problem.bytes + 2 * copied_bytes(problem) + tap_traffic(problem, channels_last=True)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.7, launches=2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return last_launches(problem, config)
