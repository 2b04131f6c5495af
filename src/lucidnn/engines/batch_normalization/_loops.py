"""A normalization on a CPU as a table of numbers: its loops, their shares, and what lies where in the workspace.

The table is what the kernels read (``_numba/channels.py``). Where channels lie innermost and there are few, several
neighbouring pixels are taken as one with so many times the channels: runs are long then, and the statistics of these
are only more parts to combine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.descriptor import contiguous_strides
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.batch_normalization import LARGE, statistics_type
from .. import _numba as nb
from .._numba.channels import BLOCK, CHANNEL_AT, ROW_AT, TYPES
from ._view import View


class Loops:
    """A problem's table, how it is shared out, and how its workspace is laid out.

    Parameters
    ----------
    problem : Problem
    roles : sequence of str
        The tensor of each slot; a slot may be unused.

    Attributes
    ----------
    table, counts : numpy.ndarray
        The integers, and as float64 how many values of a channel each part has.
    parts, planes, workspace : int
        Of the whole problem, for passes that are shared out by channels and values, and by rows of channels; bytes.
    """

    def __init__(self, problem: Problem, roles: Sequence[str]):
        view = View.of(problem)
        tensors = problem.tensors
        last = view.channels_inner
        rows, lanes = math.prod(view.summed[:-1]), view.summed[-1]
        outer, inner = math.prod(view.kept[:-1]), view.kept[-1]
        steps = {role: (s[0][-1], s[1][-1]) for role, s in view.strides.items()}
        large = [role for role in steps if role in LARGE]
        repeat = 1
        if last and outer == 1 and all(steps[role] == (inner, 1) for role in large):
            repeat = max(k for k in range(1, max(BLOCK // inner, 1) + 1) if lanes % k == 0)
        width = inner * repeat
        lanes //= repeat
        blocks = outer * -(-width // BLOCK) if last else 0
        wanted = nb.worthwhile(20 * view.channels * view.values, problem.target.processors)
        wanted = 1 if wanted == 1 else 4 * wanted
        c_parts = min(blocks if last else view.channels, wanted)
        r_parts = max(1, min(rows * lanes if last else rows, wanted // c_parts))
        shares = rows * lanes if last else rows
        self.counts = np.array(
            [
                (shares * (p + 1) // r_parts - shares * p // r_parts) * (1 if last else lanes)
                for p in range(r_parts)
                for _ in range(repeat)
            ],
            dtype=np.float64,
        )
        self.parts, self.last, self.channels = r_parts * c_parts, last, view.channels
        self.planes = min(rows * view.channels, wanted)
        self.channel_parts = max(1, min(view.channels // 256, wanted))
        self.split = len(self.counts) > 1  # whether statistics are found in pieces
        native = TYPES[statistics_type(problem["x"].dtype)]
        layout = [128]  # bytes: the addresses of the tensors, then arrays of 8 bytes a channel
        for count in (len(self.counts), len(self.counts), 1, 1, 1, 1, 1):
            layout.append(layout[-1] + 8 * count * view.channels)
        self.workspace = layout[-1] + 64
        code = ACTIVATIONS[problem.epilogue.activation].code
        head = [
            outer, inner, rows, lanes, repeat, r_parts, c_parts, blocks, view.channels, int(last), code, native,
            len(roles), view.values, *layout[:7], 0, 0,
        ]  # fmt: skip
        for role in roles:
            along, across = steps.get(role, (0, 0))
            head += [TYPES[tensors[role].dtype] if role in tensors else -1, along * repeat, across]
        head[ROW_AT] = len(head)
        head[CHANNEL_AT] = head[ROW_AT] + rows * len(roles)
        row_table = _offsets(view.summed[:-1], [view.strides.get(role, ((0,), (0,)))[0] for role in roles])
        channel_table = _offsets(view.kept[:-1], [view.strides.get(role, ((0,), (0,)))[1] for role in roles])
        self.table = np.concatenate([np.array(head, dtype=np.int64), row_table, channel_table])


def _offsets(sizes: tuple[int, ...], strides: list[tuple[int, ...]]) -> np.ndarray:
    """Offsets of every slot for every point of the outer loops, the slots of a point side by side."""
    points = np.zeros((math.prod(sizes), len(strides)), dtype=np.int64)
    number = np.arange(len(points))
    for axis, below in enumerate(contiguous_strides(sizes)):
        place = number // below % sizes[axis]
        for slot, steps in enumerate(strides):
            if len(steps) > axis + 1:
                points[:, slot] += place * steps[axis]
    return points.reshape(-1)
