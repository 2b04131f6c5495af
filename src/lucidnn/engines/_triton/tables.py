"""Numbers that a kernel reads but that follow from the problem alone: made on the host, kept on each device.

A launch's arguments are tensors of the problem, workspace and plain numbers. A table goes as a number too: its address,
which the kernel makes a pointer of again (``address.to(tl.pointer_type(tl.int32))``). The tables are copied to a device
once, when the plan is built there or first called there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.problem import Problem
from ...core.target import Target
from .launch import INTERPRETED, Launch, Program

NOWHERE = 1 << 40  # stands for an address where nothing is started

Addresses = Mapping[str, int]


class TabledProgram:
    """Like `Program`, for launches that depend on where the tables are.

    Parameters
    ----------
    problem : Problem
    tables : mapping of str to numpy.ndarray
    launches : callable
        ``launches(addresses)`` gives the launches, from the tables' addresses by name.
    """

    def __init__(
        self, problem: Problem, tables: Mapping[str, np.ndarray], launches: Callable[[Addresses], Sequence[Launch]]
    ):
        self.problem, self.tables, self.launches = problem, tables, launches
        self._programs: dict[int, tuple[Program, Any]] = {}
        self._lock = threading.Lock()
        import torch

        if not INTERPRETED and torch.cuda.is_available():
            device = torch.cuda.current_device()
            if Target.of(f"cuda:{device}").arch == problem.target.arch:
                self._on(device)
                return
        if not INTERPRETED:
            for launch in launches(dict.fromkeys(tables, NOWHERE)):
                launch.compile(problem)

    def __call__(self, tensors: tuple[Any, ...], workspace: Any = None) -> None:
        device = tensors[-1].get_device()
        program = self._programs.get(device)
        if program is None:
            program = self._on(device)
        program[0](tensors, workspace)

    def _on(self, device: int) -> tuple[Program, Any]:
        """The program for a device, with its tables there."""
        import torch

        with self._lock:
            if device not in self._programs:
                place = torch.device("cpu" if device < 0 else f"cuda:{device}")
                kept = {name: torch.from_numpy(table).to(place) for name, table in self.tables.items()}
                program = Program(self.problem, list(self.launches({n: t.data_ptr() for n, t in kept.items()})))
                self._programs[device] = (program, kept)
            return self._programs[device]
