"""``lucidnn find``: the best candidates timed now, and kept for every later choice on this machine."""

from __future__ import annotations

from typing import Any

import click

from .problems import device_option, problem_arguments


@click.command(short_help="Time the best candidates and keep the times.")
@problem_arguments
@device_option
@click.pass_context
def command(ctx: click.Context, line: tuple[str, ...], file: str | None, device: str | None) -> None:
    """Time the best candidates for PROBLEM, check the winner against the reference, and keep the times.

    A later call of the same problem, with a batch of about that size, takes the fastest. The exit code is 1 if an
    engine failed or was wrong.
    """
    from ..core import plan, settings
    from ..core.store import Store
    from .problems import problems_here
    from .terminal import say, show_table

    faults, found = 0, []
    problems = problems_here(line, file, device)
    for problem, where in problems:
        say(str(problem), style="bold")
        rows = plan.find(problem, device=where)
        if not rows:
            told = plan.explain(problem, device=where)
            say(f"nothing to time: {told.choice.candidate.engine.name if told.choice else 'no engine'} takes it")
            continue
        found += rows
        faults += sum(row.status != "ok" for row in rows)
        show_table(("engine", ">median", ">workspace", "outcome", "configuration"), [_cells(row) for row in rows])
    plan.forget()
    store = Store(settings.current().directory())
    stored = store.rows()
    # A store that cannot be written has been warned of, and is no error.
    say(f"kept in {store.path}" if all(row in stored for row in found) else f"not kept: {store.path} cannot be written")
    ctx.exit(1 if faults else 0)


def _cells(row: Any) -> tuple[str, ...]:
    from .terminal import seconds, settings_text, size

    outcome = "ok" if row.status == "ok" else f"!{row.status}: {row.reason}"
    return row.engine, seconds(row.seconds), size(row.workspace), outcome, settings_text(row.config)
