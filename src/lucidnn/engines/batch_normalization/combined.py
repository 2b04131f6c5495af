"""``batch_norm.combined``: statistics of a batch from those of its parts, on a CPU in Numba.

Method: Chan's formula from part to part, in order and in float64; a channel is one thread's. Cost: a few values a
channel and part. Limits: none but the four types. Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979.
"""

import math

import numpy as np

from ...core.descriptor import contiguous_strides
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.batch_normalization import TYPES
from .. import _numba as nb
from .._numba.channels import TYPES as NUMBERS
from .._numba.channels import get, put

GRAIN = 4096  # values that are worth a thread
COUNTS, MEANS, SQUARES, MEAN, INVERSE, OLD_MEAN, OLD_VARIANCE, NEW_MEAN, NEW_VARIANCE, FACTOR = range(10)
ROLES = (
    "counts", "means", "m2s", "mean", "inv_variance", "running_mean", "running_variance", "next_mean", "next_variance",
    "factor",
)  # fmt: skip
# What the table holds: channels, parts, the three steps from part to part, the type of each tensor, and then for each
# channel where it lies in each tensor.
CHANNELS, PARTS, STEPS, KINDS, OFFSETS = 0, 1, 2, 5, 15


@nb.kernel
def _part(part, parts, addresses, table, numbers):
    t, a, numbers = nb.pointer(table, 0), nb.pointer(addresses, 0), nb.pointer(numbers, 0.0)
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        at = OFFSETS + c * 10
        n, mean, m2 = 0.0, 0.0, 0.0
        for p in range(t[PARTS]):
            more = get(t[KINDS + COUNTS], a[COUNTS], p * t[STEPS + COUNTS])
            d = get(t[KINDS + MEANS], a[MEANS], t[at + MEANS] + p * t[STEPS + MEANS]) - mean
            m2 += get(t[KINDS + SQUARES], a[SQUARES], t[at + SQUARES] + p * t[STEPS + SQUARES])
            total = n + more
            if total != 0:
                m2 += d * d * (n * (more / total))
                mean += d * (more / total)
            n = total
        if m2 != m2:
            mean = m2
        put(t[KINDS + MEAN], a[MEAN], t[at + MEAN], mean)
        put(t[KINDS + INVERSE], a[INVERSE], t[at + INVERSE], 1.0 / math.sqrt(m2 / (n if n != 0 else 1.0) + numbers[0]))
        if t[KINDS + OLD_MEAN] >= 0:
            f = get(t[KINDS + FACTOR], a[FACTOR], 0) if t[KINDS + FACTOR] >= 0 else numbers[1]
            f = 0.0 if n == 0 else f
            old = get(t[KINDS + OLD_MEAN], a[OLD_MEAN], t[at + OLD_MEAN])
            put(t[KINDS + NEW_MEAN], a[NEW_MEAN], t[at + NEW_MEAN], old + f * (mean - old))
            old = get(t[KINDS + OLD_VARIANCE], a[OLD_VARIANCE], t[at + OLD_VARIANCE])
            new = m2 / max(n - 1.0, 1.0)
            put(t[KINDS + NEW_VARIANCE], a[NEW_VARIANCE], t[at + NEW_VARIANCE], old + f * (new - old))


@nb.kernel
def _run(parts, threads, addresses, table, numbers):
    nb.launch(_part, parts, threads, (addresses, table, numbers))


class Combined(Engine):
    name = "batch_norm.combined"
    operations = ("batch_norm_combine",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0) + 2e-9 * problem["means"].numel

    def build(self, problem: Problem, config: Config) -> Run:
        tensors, means = problem.tensors, problem["means"]
        sizes = means.shape[1:]
        channels = math.prod(sizes)
        places = np.zeros((channels, len(ROLES)), dtype=np.int64)
        for axis, below in enumerate(contiguous_strides(sizes)):
            index = np.arange(channels) // below % sizes[axis]
            for slot, role in enumerate(ROLES):
                if role in tensors and role not in ("counts", "factor"):
                    places[:, slot] += index * tensors[role].strides[axis - len(sizes)]
        kinds = [NUMBERS[tensors[role].dtype] if role in tensors else -1 for role in ROLES]
        steps = [tensors[role].strides[0] for role in ROLES[:3]]
        head = np.array([channels, means.shape[0], *steps, *kinds], dtype=np.int64)
        table = np.concatenate([head, places.reshape(-1)])
        op = problem.op
        constants = (op.epsilon, op.momentum)  # type: ignore[attr-defined]
        numbers = np.array(constants, dtype=np.float64)
        parts = max(1, min(channels, means.numel // GRAIN, 4 * problem.target.processors))
        threads = nb.threads if parts > 1 else lambda: 1
        names = tuple(tensors)
        order = [names.index(role) if role in names else -1 for role in ROLES]
        at, numbers_at = table.ctypes.data, numbers.ctypes.data
        _run(0, 1, 0, at, numbers_at)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=(table, numbers)):
            addresses = np.array([tensors[i].data_ptr() if i >= 0 else 0 for i in order], dtype=np.int64)
            _run(parts, threads(), addresses.ctypes.data, at, numbers_at)

        return run
