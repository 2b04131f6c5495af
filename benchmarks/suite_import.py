"""How long an import takes, in a fresh interpreter, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.context import Context
from lucidnn.core.timing import Timing

HEAVY = ("torch", "triton", "numba", "numpy")
_CODE = """
import sys, time, json
{before}
start = time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - start, [m for m in {heavy} if m in sys.modules]]))
"""


def results(context: Context) -> Iterator[dict[str, Any]]:
    runs = 1 if context.quick else 15
    for name, before, statement in (
        ("import lucidnn", "", "import lucidnn"),
        ("the command line", "", "import lucidnn.cli.main"),
        ("lucidnn.functional, after torch", "import torch", "import lucidnn.functional"),
        ("all engines, after torch", "import torch", "from lucidnn.core import registry; registry.engines()"),
    ):
        if not context.quick:
            _once(before, statement)  # writes bytecode, fills the system's file cache
        found = [_once(before, statement) for _ in range(runs)]
        timing = Timing.of([seconds for seconds, _ in found])
        yield {"name": name, "seconds": timing.median, "spread": round(timing.spread, 4), "loads": found[0][1]}


def _once(before: str, statement: str) -> tuple[float, list[str]]:
    code = _CODE.format(before=before, statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, loaded
