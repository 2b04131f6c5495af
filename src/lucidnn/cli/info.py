"""``lucidnn info``: what is here: versions, targets, settings, engines, and what could not be loaded."""

from __future__ import annotations

import dataclasses

import click


@click.command()
def command() -> None:
    """Show versions, targets, settings and engines."""
    import platform

    from .. import __version__
    from ..core import registry, settings
    from ..core.engine import NOTES
    from ..core.store import Store
    from .environment import PACKAGES, driver, version
    from .terminal import say, show_table

    say(f"lucidnn {__version__}, Python {platform.python_version()}", style="bold")
    found = [(name, version(name) or "not installed") for name in PACKAGES]
    if driver():
        found.append(("NVIDIA driver", driver() or ""))
    show_table(("package", "version"), found)
    show_table(("target", "device", "name"), _targets(), title="Targets of this machine")

    now = settings.current()
    plain = settings.Settings()
    rows = []
    for field in dataclasses.fields(now):
        value = getattr(now, field.name)
        mark = "" if value == getattr(plain, field.name) else "changed"
        rows.append((field.name, _text(value), mark))
    show_table(("setting", "value", ""), rows, title="Settings in force")
    say("Cache", style="bold")
    say(f"directory   {now.directory()}")
    say(f"tuned rows  {len(Store(now.directory()).rows())}")
    say()

    table = [
        (e.name, " ".join(e.operations), " ".join(e.targets), " ".join(sorted(e.notes)))
        for e in sorted(registry.engines().values(), key=lambda e: e.name)
    ]
    show_table(("engine", "operations", "targets", "notes"), table, title="Engines")
    used = sorted({note for e in registry.engines().values() for note in e.notes})
    show_table(("note", "meaning"), [(note, NOTES[note]) for note in used])
    if failures := registry.failures():
        show_table(("engine file", "why it takes no part"), [(m, "!" + w) for m, w in failures.items()])


def _targets() -> list[tuple[str, str, str]]:
    import torch

    from ..core.target import Target
    from ..tuning import device_name

    rows = [(str(Target.of("cpu")), "cpu", device_name("cpu"))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        target = Target.of(device)
        rows.append((str(target), str(device), device_name(target.kind, device)))
    return rows


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
