"""``lucidnn bench``: engines timed against one another and against the framework's own kernel, and checked."""

from __future__ import annotations

from typing import Any

import click

from .problems import device_option, problem_arguments


@click.command(short_help="Time engines beside the framework's own kernel.")
@problem_arguments
@device_option
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="Time this engine only; may be repeated.")
@click.option("--configs", is_flag=True, help="Time every configuration of an engine, not only its best by estimate.")
@click.option("--graph/--no-graph", default=True, help="On a GPU: time replays of a captured graph, or eager calls.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(3), help="Samples of each contestant.")
@click.option("--json", "json_path", metavar="FILE", help="Also write all figures, with the environment, to FILE.")
@click.pass_context
def command(
    ctx: click.Context,
    line: tuple[str, ...],
    file: str | None,
    device: str | None,
    engines: tuple[str, ...],
    configs: bool,
    graph: bool,
    rounds: int,
    json_path: str | None,
) -> None:
    """Time every engine that takes PROBLEM beside the framework's own kernel, in one interleaved run.

    Results are compared with the float64 reference in the same run; the exit code is 1 if one is wrong.
    The ratio is the framework's time over the engine's: above 1 the engine is faster.
    """
    from .problems import checked_engines, problems_here
    from .terminal import json_place, write_json

    place = json_place(json_path)
    problems = problems_here(line, file, device)
    checked_engines(engines, [problem for problem, _ in problems])

    from .compare import compare, contestants
    from .environment import environment

    rows: list[dict[str, Any]] = []
    for problem, where in problems:
        found = compare(problem, where, contestants(problem, engines, configs), graph=graph, rounds=rounds)
        show(found)
        rows += found
    if place is not None:
        places = {str(where): environment(where) for _, where in problems}
        write_json(place, {"environments": places, "rows": rows})
    ctx.exit(1 if any(row["fault"] for row in rows) else 0)


def show(rows: list[dict[str, Any]]) -> None:
    """Print one problem's figures."""
    from .compare import worst
    from .terminal import ratio, say, seconds, settings_text, show_table, size

    first = rows[0]
    say(first["problem"], style="bold")
    say("times of graph replays" if first["graph"] else "times of eager calls, outputs allocated in the call")
    lines = []
    for row in sorted(rows, key=lambda row: (row["seconds"] is None, row["seconds"] or 0.0)):
        cells = [
            row["engine"],
            seconds(row["seconds"]),
            *_rates(row["seconds"], row["spread"], row["tflops"], row["tbs"]),
            ratio(row["ratio"]),
            worst(row["error"]),
            size(row["workspace"]),
            settings_text(row["config"]),
        ]
        lines.append(cells)
        if row["fault"]:
            lines.append([f"!  {row['fault']}", *[""] * 8])
    name = f"framework: {first['peer'] or 'nothing'}"
    if first["peer_seconds"]:
        lines.append(
            [
                name,
                seconds(first["peer_seconds"]),
                *_rates(first["peer_seconds"], first["peer_spread"], first["peer_tflops"], first["peer_tbs"]),
                "1",
                worst(first["peer_error"]),
                "",
                "",
            ]
        )
    else:
        lines.append([f"{name} ({first['peer_fault']})", *[""] * 8])
    show_table(
        ("engine", ">median", ">spread", ">TFLOP/s", ">TB/s", ">ratio", ">error", ">workspace", "configuration"), lines
    )


def _rates(seconds: float | None, spread: float | None, tflops: float | None, tbs: float | None) -> list[str]:
    if seconds is None:
        return ["-", "-", "-"]
    return [f"{spread:.1%}", f"{tflops:.3g}", f"{tbs:.3g}"]
