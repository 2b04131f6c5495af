"""What every suite is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

PROBLEMS = Path(__file__).resolve().parent.parent / "problems"


@dataclasses.dataclass(frozen=True)
class Context:
    """The device to measure on, the policies to choose plans by, problem files that replace a suite's own, haste.

    For the suite models: which part of how many of its list to run, and how long one call may take by estimate.
    """

    device: Any
    policies: list[str]
    problems: list[Path]
    quick: bool = False
    part: tuple[int, int] = (1, 1)
    call_seconds: float = 0.3

    @property
    def rounds(self) -> int:
        """Samples of each contestant."""
        return 3 if self.quick else 9

    @property
    def batch_size(self) -> int:
        """Images of a training step."""
        return 4 if self.quick else 64
