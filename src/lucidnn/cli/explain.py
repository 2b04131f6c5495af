"""``lucidnn explain``: every engine's answer to a problem, and which one would run, without running anything."""

from __future__ import annotations

import dataclasses

import click


@click.command(short_help="Show who would run a problem, and why not the others.")
@click.argument("line", nargs=-1, required=True, metavar="PROBLEM")
@click.option("--on", metavar="TARGET", help="Explain for this target, present or not: cpu, cuda:sm_90, hip:gfx942.")
@click.option("--engine", metavar="NAME", help="Explain as if this engine had been asked for.")
@click.pass_context
def command(ctx: click.Context, line: tuple[str, ...], on: str | None, engine: str | None) -> None:
    """Show which engines take PROBLEM, at which estimated cost, why the others do not, and who would run.

    The exit code is 1 if nothing takes it.
    """
    from ..core import plan, registry, settings
    from ..core.problem import Problem
    from ..core.target import Target
    from .problems import default_target
    from .terminal import say, seconds, settings_text, show_table, size

    problem = Problem.parse(" ".join(line), default_target())
    if on:
        problem = dataclasses.replace(problem, target=Target.parse(on))
    now = settings.current()
    if engine:
        registry.get(engine)
    # A plan may be chosen for a target that is not here, so nothing is timed.
    finding = now.policy == "find"
    with settings.using(policy="heuristic" if finding else now.policy, engine=engine or now.engine):
        told = plan.explain(problem)

    say(str(problem))
    say(f"{problem.flops:.4g} operations, {size(int(problem.bytes))} to move at least")
    say()
    rows = []
    for c in told.candidates:
        first, *others = c.refusals or ("",)
        answer = f"no: {first}" if c.refusals else seconds(c.cost)
        rows.append(
            (
                c.engine.name,
                answer,
                size(c.workspace_size) if not c.refusals else "",
                " ".join(sorted(c.engine.notes)),
                "" if c.refusals else settings_text(c.config),
            )
        )
        rows += [("", f"    {reason}", "", "", "") for reason in others]
    show_table(("engine", "estimate, or why not", ">workspace", "notes", "configuration"), rows)
    for module, why in registry.failures().items():
        say(f"{module} takes no part: {why}")
    if told.choice is None:
        say(told.failure.splitlines()[0], style="bold red")
        ctx.exit(1)
    say(f"{told.choice.candidate.engine.name} would run: {told.choice.reason}", style="bold")
    if finding and "timings" not in told.choice.reason and not engine:
        say("Policy 'find' would time the candidates first; `lucidnn find` does it now.")
