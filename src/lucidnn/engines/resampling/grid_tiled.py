"""``resample.grid_tiled``: sampling by a grid on a GPU, forward and the grid's gradient, every mode, in Triton.

Method: a program takes a block of output points, works out the neighbours' places and weights along each axis, and goes
through the channels a block at a time: points are neighbours in memory where W is innermost, channels where C is. The
gradient of the grid is summed over channels in the program, in one order. Both are deterministic.
Cost: a read a tap, channel and point, mostly from the first-level cache. The gradient of x is not made here: see
``resample.grid_scatter``.
"""

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32
from .._triton.launch import Launch, TritonEngine
from ._grid import TYPES, configs, grid_sample, has_points, sample_arguments, tiles, turned
from ._grid_last import tap_traffic


class GridTiled(TritonEngine):
    name = "resample.grid_tiled"
    operations = ("grid_sample_fwd", "grid_sample_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        r.require(
            has_points(problem) or not tiles(problem, self.configs(problem)[0]), "points in x", problem["x"].shape
        )
        r.require("dx" not in problem.tensors, "gradients = grid", getattr(problem.op, "gradients", ""))
        if not r:
            blocks = min(tiles(problem, c) for c in self.configs(problem))
            r.require(blocks <= INT32, f"at most {INT32} tiles", blocks)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return configs(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        moved = problem.bytes + tap_traffic(problem, channels_last=not turned(problem))
        busy = max(min(1.0, tiles(problem, config) / problem.target.processors), 1e-3)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.7 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        if not tiles(problem, config):
            return []
        args, constexprs = sample_arguments(problem, config, sums=None)
        grid = (tiles(problem, config),)
        return [Launch(grid_sample, grid, args, constexprs, config["num_warps"], config["num_stages"])]
