"""``python -m benchmarks.run``: the suites, one JSON line a result, with the environment in every line.

::

    python -m benchmarks.run                          # every suite, on the GPU if there is one
    python -m benchmarks.run --suite step,host --device cpu --threads 2
    python -m benchmarks.run --suite models --device cpu --threads 2 --quick --part 2/6 --out part2.jsonl

The suites models, a thousand problems, and memory run only where they are named.

A suite's results go to ``benchmarks/results/<suite>_<device>.jsonl``, replaced as a whole when the suite has ended; an
interrupted run leaves the old file. Kernels are compiled before anything is timed. Timings found along the way are
kept in a folder that is thrown away, so that a run never builds on an earlier one's rows.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.context import Context
from lucidnn.cli.main import Failure
from lucidnn.core.errors import InvalidArgument, LucidnnError

RESULTS = Path(__file__).parent / "results"
SUITES = ("import", "host", "step", "conv")
MORE = ("models", "memory")  # too long to run unasked


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", default=",".join(SUITES), show_default=True, help="Suites to run, separated by commas.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", metavar="FILE", help="One file for all results instead of one a suite under benchmarks/results.")
@click.option(
    "--policy", default="heuristic,find", show_default=True, help="How plans are chosen; several are compared."
)
@click.option("--problems", metavar="FILE", multiple=True, help="Problem lines instead of a suite's own.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; left out: the framework's number.")
@click.option("--commit", help="Commit of the sources, where git cannot be asked.")
@click.option("--part", default="1/1", show_default=True, help="Which part of how many of the suite models to run.")
@click.option("--call-seconds", type=click.FloatRange(0, min_open=True), help="Longest call of models. [0.3 or 0.03]")
@click.option("--quick", is_flag=True, help="Few samples: to see whether it runs, not to learn anything.")
def command(
    suite: str,
    device: str,
    out: str | None,
    policy: str,
    problems: tuple[str, ...],
    threads: int | None,
    commit: str | None,
    part: str,
    call_seconds: float | None,
    quick: bool,
) -> None:
    """Measure lucidnn beside the framework's own kernels."""
    import torch

    from lucidnn.cli.problems import device_of

    try:
        suites, policies = _listed("suite", suite, SUITES + MORE), _listed("policy", policy, ("heuristic", "find"))
        share = _part(part)
        if threads:
            torch.set_num_threads(threads)
        limit = call_seconds or (0.03 if quick else 0.3)
        files = [Path(p) for p in problems]
        _run(suites, Context(device_of(device), policies, files, quick, share, limit), out, commit)
    except KeyboardInterrupt:
        raise Failure("interrupted; finished suites are written, the one under way is not", 130) from None
    except LucidnnError as error:
        raise Failure(str(error)) from error


def _run(suites: list[str], context: Context, out: str | None, commit: str | None) -> None:
    import torch

    from lucidnn.cli.environment import environment
    from lucidnn.cli.terminal import json_place
    from lucidnn.core import settings
    from lucidnn.engines._numba.jit import cache_directory

    place = json_place(out)
    load = os.getloadavg()[0]
    here: dict[str, Any] = {**environment(context.device, commit), "load": round(load, 2)}
    if load > torch.get_num_threads() / 2:
        click.echo(f"-- this machine is busy (load {load:.1f}): times will say little", err=True)
    click.echo("  ".join(f"{name} {value}" for name, value in here.items()))
    if place is None:
        RESULTS.mkdir(exist_ok=True)
    lines: list[str] = []
    cache_directory()  # compiled CPU kernels stay where they always are: only timings are thrown away
    with tempfile.TemporaryDirectory() as rows, settings.using(cache_dir=Path(rows)):
        for suite in suites:
            start = time.perf_counter()
            found = list(_shown(suite, context))
            text = [json.dumps({"suite": suite, **row, "environment": here}, ensure_ascii=False) for row in found]
            lines += text
            _write(place or RESULTS / f"{suite}_{slug(here['device'])}.jsonl", lines if place else text)
            click.echo(f"-- {suite}: {len(found)} results in {time.perf_counter() - start:.0f} s")


def _shown(suite: str, context: Context) -> Iterator[dict[str, Any]]:
    module = importlib.import_module(f"benchmarks.suite_{suite}")
    from lucidnn.cli.terminal import plain, ratio, seconds

    for row in module.results(context):
        fault = f"  FAULT {row['fault']}" if row.get("fault") else ""
        times = f"{seconds(row['seconds']):>9} {seconds(row.get('peer_seconds')):>9} {ratio(row.get('ratio')):>7}"
        click.echo(f"{suite:7}{times}  {row['name']}{fault}")
        yield plain(row)


def _listed(name: str, text: str, accepted: tuple[str, ...]) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in accepted:
            raise InvalidArgument(name, repr(part), ", ".join(accepted))
    if not parts:
        raise InvalidArgument(name, "nothing", ", ".join(accepted))
    return parts


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise InvalidArgument("part", repr(text), "I/N with 1 <= I <= N")
    return part, parts


def slug(name: str) -> str:
    """A device's name as part of a file's.

    Examples
    --------
    >>> slug("NVIDIA H200"), slug("AMD EPYC 9V74 80-Core Processor")
    ('nvidia_h200', 'amd_epyc_9v74_80_core_processor')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _write(place: Path, lines: list[str]) -> None:
    from lucidnn.cli.terminal import write_text

    write_text(place, "\n".join(lines) + "\n" if lines else "")


if __name__ == "__main__":
    command()
