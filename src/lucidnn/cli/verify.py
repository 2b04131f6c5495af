"""``lucidnn verify``: every engine held to the float64 reference, on poisoned memory with guard bands around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import click

from .problems import device_option, problem_arguments


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one engine on one problem: refusals, or errors by output and a fault ('' where there is none)."""

    problem: Any
    engine: str
    config: dict[str, Any]
    refusals: tuple[str, ...] = ()
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    share: float = 0.0  # of the accepted error that was used up
    fault: str = ""


@click.command(short_help="Check every engine against the float64 reference.")
@problem_arguments
@device_option
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="Check this engine only; may be repeated.")
@click.option("--configs", is_flag=True, help="Check every configuration of an engine, not only its best by estimate.")
@click.option("--accuracy", is_flag=True, help="Show each engine's error on four kinds of inputs, and the framework's.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--json", "json_path", metavar="FILE", help="Also write all outcomes to FILE.")
@click.pass_context
def command(
    ctx: click.Context,
    line: tuple[str, ...],
    file: str | None,
    device: str | None,
    engines: tuple[str, ...],
    configs: bool,
    accuracy: bool,
    seed: int,
    json_path: str | None,
) -> None:
    """Check every engine on PROBLEM: its results against the float64 reference, and that it stays in its memory.

    Outputs and workspace start as NaN, with guard bands before and after. The exit code is 1 if there is a fault. With
    --accuracy nothing is judged: errors are shown, also on inputs with a large mean, a wide range, NaN and infinity.
    """
    from .accuracy import measure, show
    from .environment import environment
    from .problems import checked_engines, problems_here
    from .terminal import json_place, write_json

    place = json_place(json_path)
    problems = problems_here(line, file, device)
    checked_engines(engines, [problem for problem, _ in problems])
    outcomes: list[Any] = []
    with _progress(len(problems)) as advance:
        for problem, where in problems:
            check = measure if accuracy else verify
            outcomes += check(problem, where, engines, configs, seed)
            advance()
    if accuracy:
        show(outcomes)
    elif file is None:
        _show_one(outcomes)
    else:
        _show_many(outcomes, len(problems))
    if place is not None:
        rows = [vars(o) | {"problem": str(o.problem)} for o in outcomes]
        places = {str(where): environment(where) for _, where in problems}
        write_json(place, {"environments": places, "rows": rows})
    ctx.exit(1 if not accuracy and any(o.fault for o in outcomes) else 0)


def verify(problem: Any, device: Any, names: tuple[str, ...], configs: bool, seed: int) -> Iterator[Outcome]:
    """Check the engines of a problem one after another; an exception is a fault like any other."""
    from .. import testing
    from ..core.plan import candidates

    for c in sorted(candidates(problem), key=lambda c: c.engine.name):
        if names and c.engine.name not in names:
            continue
        if c.refusals:
            yield Outcome(problem, c.engine.name, {}, c.refusals)
            continue
        for config in c.engine.configs(problem) if configs else [c.config]:
            try:
                check = testing.verify(problem, c.engine, config, device, seed)
            except Exception as error:
                check = testing.Check({}, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            errors = dict(check.errors)
            share = max((_share(problem, role, error) for role, error in errors.items()), default=0.0)
            yield Outcome(problem, c.engine.name, dict(config), (), errors, share, check.fault)


def _share(problem: Any, role: str, error: float) -> float:
    from .. import testing

    if problem[role].dtype in testing.EXACT:
        return float("inf") if error else 0.0
    if problem[role].dtype == "i8":
        return 0.0  # elements are held to half a step, a relative error to nothing
    return error / testing.tolerance(problem, role)


def _progress(count: int) -> Any:
    """A bar on a terminal, where there is more than one problem; gives the function that moves it on."""
    import contextlib

    from rich.progress import MofNCompleteColumn, Progress

    from .terminal import console

    @contextlib.contextmanager
    def shown() -> Iterator[Any]:
        bar = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=(out := console(stderr=True)),
            transient=True,
            disable=count < 2 or not out.is_terminal,
        )
        with bar:
            task = bar.add_task("problems", total=count)
            yield lambda: bar.advance(task)

    return shown()


def _show_one(outcomes: list[Outcome]) -> None:
    from .terminal import say, settings_text, show_table

    if not outcomes:
        return
    say(str(outcomes[0].problem), style="bold")
    rows = []
    for o in outcomes:
        if o.refusals:
            rows.append((o.engine, "takes no part", f"{o.refusals[0]}", "", ""))
            continue
        errors = "  ".join(f"{role} {error:.2e}" for role, error in o.errors.items())
        rows.append(
            (o.engine, "!FAULT" if o.fault else "agrees", o.fault or errors, f"{o.share:.0%}", settings_text(o.config))
        )
    show_table(("engine", "outcome", "error, or what is wrong", ">of the bound", "configuration"), rows)


def _show_many(outcomes: list[Outcome], count: int) -> None:
    from .terminal import say, settings_text, show_table

    rows = []
    for name in sorted({o.engine for o in outcomes}):
        own = [o for o in outcomes if o.engine == name]
        ran = [o for o in own if not o.refusals]
        faults = sum(bool(o.fault) for o in ran)
        worst = max((o.share for o in ran if not o.fault), default=0.0)
        rows.append((name, str(len(ran)), str(len(own) - len(ran)), f"{worst:.0%}", f"!{faults}" if faults else "0"))
    columns = ("engine", ">runs", ">refused", ">worst error, of the bound", ">faults")
    show_table(columns, rows, title=f"{count} problems")
    for o in outcomes:
        if o.fault:
            config = f" ({settings_text(o.config)})" if o.config else ""
            say(f"{o.engine}{config}: {o.fault}\n  {o.problem}", style="red")
