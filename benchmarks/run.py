"""``python -m benchmarks.run``: the suites, one JSON line a result, with the environment in every line.

::

    python -m benchmarks.run                          # every suite, on the GPU if there is one
    python -m benchmarks.run --suite step,host --device cpu --threads 2

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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", default=",".join(SUITES), show_default=True, help="Suites to run, separated by commas.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", metavar="FILE", help="One file for all results instead of one a suite under benchmarks/results.")
@click.option(
    "--policy", default="heuristic,find", show_default=True, help="How plans are chosen; several are compared."
)
@click.option("--problems", metavar="FILE", multiple=True, help="Problem lines for the suite conv, instead of its own.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; left out: the framework's number.")
@click.option("--commit", help="Commit of the sources, where git cannot be asked.")
@click.option("--quick", is_flag=True, help="Few samples: to see whether it runs, not to learn anything.")
def command(
    suite: str,
    device: str,
    out: str | None,
    policy: str,
    problems: tuple[str, ...],
    threads: int | None,
    commit: str | None,
    quick: bool,
) -> None:
    """Measure lucidnn beside the framework's own kernels."""
    try:
        _run(_listed("suite", suite, SUITES), device, out, policy, problems, threads, commit, quick)
    except KeyboardInterrupt:
        raise Failure("interrupted; finished suites are written, the one under way is not", 130) from None
    except LucidnnError as error:
        raise Failure(str(error)) from error


def _run(
    suites: list[str],
    device: str,
    out: str | None,
    policy: str,
    problems: tuple[str, ...],
    threads: int | None,
    commit: str | None,
    quick: bool,
) -> None:
    import torch

    from lucidnn.cli.environment import environment
    from lucidnn.cli.problems import device_of
    from lucidnn.cli.terminal import json_place
    from lucidnn.core import settings

    policies = _listed("policy", policy, ("heuristic", "find"))
    if threads:
        torch.set_num_threads(threads)
    where = device_of(device)
    place = json_place(out)
    load = os.getloadavg()[0]
    here: dict[str, Any] = {**environment(where, commit), "load": round(load, 2)}
    if load > torch.get_num_threads() / 2:
        click.echo(f"-- this machine is busy (load {load:.1f}): times will say little", err=True)
    click.echo("  ".join(f"{name} {value}" for name, value in here.items()))
    if place is None:
        RESULTS.mkdir(exist_ok=True)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as rows, settings.using(cache_dir=Path(rows)):
        context = Context(where, policies, [Path(p) for p in problems], quick)
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
