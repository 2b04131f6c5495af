"""``pointwise.relu``: relu and its gradient on a CPU where all tensors are one dense run of memory, in Numba.

Method: one loop over the run that LLVM turns into compares and selects on whole vectors; 16-bit values are widened
for the comparison only and their own bits are stored. Cost: the memory traffic, or the cache's.
Limits: one type for all tensors, the same dense layout, no scaling, bias or second input.
"""

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from ._loops import merged

TYPES = ("f64", "f32", "f16", "bf16")
GRAIN = 32768  # elements that are worth a thread


@nb.kernel
def _forward_part(part, parts, x_address, y_address, count, like):
    x, y = nb.pointer(x_address, like), nb.pointer(y_address, like)
    zero = nb.cast(0, like)  # the same bits in all four types
    for i in range(count * part // parts, count * (part + 1) // parts):
        y[i] = zero if nb.load(x, i) <= 0 else x[i]


@nb.kernel
def _backward_part(part, parts, dy_address, x_address, dx_address, count, like):
    dy, x, dx = nb.pointer(dy_address, like), nb.pointer(x_address, like), nb.pointer(dx_address, like)
    zero = nb.cast(0, like)
    for i in range(count * part // parts, count * (part + 1) // parts):
        dx[i] = zero if nb.load(x, i) <= 0 else dy[i]


@nb.kernel
def _forward(parts, threads, x, y, count, like):
    nb.launch(_forward_part, parts, threads, (x, y, count, like))


@nb.kernel
def _backward(parts, threads, dy, x, dx, count, like):
    nb.launch(_backward_part, parts, threads, (dy, x, dx, count, like))


class Relu(Engine):
    name = "pointwise.relu"
    operations = ("pointwise_fwd", "pointwise_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        e = problem.epilogue
        r.require(e.activation == "relu", "the activation relu", e.activation)
        r.require(e.alpha == 1.0, "alpha = 1", e.alpha)
        extra = ", ".join({"z", "bias"} & set(problem.inputs))
        r.require(not extra, "no bias and no z", extra)
        types = {t.dtype for _, t in problem.items}
        known = len(types) == 1 and types <= {*TYPES}
        r.require(known, f"one type of {', '.join(TYPES)} for all tensors", ", ".join(sorted(types)))
        if not extra:
            loops = merged(problem)
            dense = len(loops.sizes) == 1 and all(s in ((1,), (0,)) for s in loops.strides.values())
            dense = dense and (loops.sizes[0] <= 1 or (0,) not in loops.strides.values())
            r.require(dense, "one dense layout for all tensors", ", ".join(str(t) for _, t in problem.items))
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0)

    def build(self, problem: Problem, config: Config) -> Run:
        count = problem.items[0][1].numel
        like = nb.token(problem.items[0][1].dtype)
        parts = max(1, min(count // GRAIN, 4 * problem.target.processors))
        threads = nb.threads if parts > 1 else lambda: 1
        if problem.op.name == "pointwise_fwd":
            _forward(0, 1, 0, 0, count, like)  # compiles, or loads from disk; no part is run

            def forward(tensors, workspace):
                x, y = tensors
                _forward(parts, threads(), x.data_ptr(), y.data_ptr(), count, like)

            return forward
        _backward(0, 1, 0, 0, 0, count, like)

        def backward(tensors, workspace):
            dy, x, dx = tensors
            _backward(parts, threads(), dy.data_ptr(), x.data_ptr(), dx.data_ptr(), count, like)

        return backward
