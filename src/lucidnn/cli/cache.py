"""``lucidnn cache``: the tuned rows of this machine: shown, cleared, carried to another machine and back as text.

The text form has one JSON object a line: first the format's number, then the rows, sorted, so that a difference between
two files shows what changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..core.errors import InvalidArgument


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show, clear, export or import what `find` measured."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(show)


@command.command()
def show() -> None:
    """Show every row, fastest first, by problem (the default)."""
    from .terminal import say, seconds, settings_text, show_table

    store = _store()
    rows = store.rows()
    say(f"{len(rows)} tuned rows in {store.path}")
    for environment in sorted({row.environment for row in rows}):
        here = sorted((r for r in rows if r.environment == environment), key=lambda r: r.problem)
        cells = [
            (row.problem, row.engine, seconds(row.seconds), _outcome(row), settings_text(row.config)) for row in here
        ]
        show_table(("problem", "engine", ">median", "outcome", "configuration"), cells, title=environment)


@command.command()
def clear() -> None:
    """Delete every row; compiled kernels stay."""
    from .terminal import say

    store = _store()
    say(f"{store.clear()} tuned rows deleted from {store.path}")


@command.command("export")
@click.argument("file")
def export(file: str) -> None:
    """Write every row to FILE."""
    from .terminal import say, write_text

    place = Path(file).expanduser()
    if not place.parent.is_dir() or place.is_dir():
        raise InvalidArgument("file", file, "a file in an existing folder")
    rows = _store().rows()
    write_text(place, to_text(rows))
    say(f"{len(rows)} tuned rows written to {file}")


@command.command("import")
@click.argument("file")
def import_(file: str) -> None:
    """Add the rows of FILE to those of this machine; rows of the same measurement are replaced."""
    from .terminal import say

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            "file", f"{file} ({error.strerror})", "a file that `lucidnn cache export` wrote"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument("file", f"{file}, which is not text", "what `lucidnn cache export` wrote") from None
    rows = from_text(text, file)
    store = _store()
    store.put(rows)
    say(f"{len(rows)} tuned rows added to {store.path}")


def to_text(rows: Iterable[Any]) -> str:
    """Rows as text, one a line.

    Examples
    --------
    >>> from lucidnn.core.store import Row
    >>> row = Row("p", "here", "conv.direct", "ab12", {"tile": 4}, 1e-3, 0)
    >>> from_text(to_text([row])) == [row]
    True
    """
    from ..core.store import FORMAT

    lines = sorted(json.dumps(dataclasses.asdict(row), sort_keys=True) for row in rows)
    return "\n".join([json.dumps({"format": FORMAT}), *lines]) + "\n"


def from_text(text: str, name: str = "file") -> list[Any]:
    """Read what `to_text` wrote.

    Raises
    ------
    InvalidArgument
        Not such a text, or of another format; says which line.
    """
    from ..core.store import FORMAT, Row

    head, *lines = text.splitlines() or [""]
    try:
        number = json.loads(head)["format"]
    except (KeyError, TypeError, ValueError):
        expected = f'a file of tuned rows, which starts with {{"format": {FORMAT}}}'
        raise InvalidArgument("file", f"{name}:1: {head[:60]!r}", expected) from None
    if number != FORMAT:
        raise InvalidArgument("file", f"{name}:1: format {number}", f"format {FORMAT}")
    rows = []
    for number, line in enumerate(lines, 2):
        if line.strip():
            try:
                rows.append(_checked(Row(**json.loads(line))))
            except (TypeError, ValueError) as error:
                raise InvalidArgument("file", f"{name}:{number}: {error}", "a tuned row") from None
    return rows


def _checked(row: Any) -> Any:
    """The fields have their types: a wrong one would fail much later, inside a choice."""
    texts = (row.problem, row.environment, row.engine, row.source, row.status, row.reason)
    if not all(isinstance(text, str) for text in texts) or not isinstance(row.config, dict):
        raise TypeError("a field of another type")
    if row.seconds is not None and not (isinstance(row.seconds, (int, float)) and row.seconds > 0):
        raise TypeError(f"seconds {row.seconds!r}")
    if not isinstance(row.workspace, int) or row.status not in ("ok", "failed", "wrong"):
        raise TypeError(f"workspace {row.workspace!r}, status {row.status!r}")
    if (row.status == "ok") != (row.seconds is not None):
        raise TypeError(f"status {row.status!r} with seconds {row.seconds!r}")
    return row


def _outcome(row: Any) -> str:
    return "ok" if row.status == "ok" else f"!{row.status}: {row.reason}"


def _store() -> Any:
    from ..core import settings
    from ..core.store import Store

    return Store(settings.current().directory())
