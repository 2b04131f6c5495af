"""What the commands print with: a console, tables, units, and JSON that is written whole or not at all.

Where the output is a terminal a table is fitted to it; where it is a pipe or a file every line is as wide as its
content, and nothing is cut off.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InvalidArgument

UNLIMITED = 100_000  # columns, where nobody looks at the output line by line


def console(stderr: bool = False) -> Any:
    """A console on standard output (or error) that takes text literally."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNLIMITED
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(text: str = "", style: str | None = None) -> None:
    """Print one line or paragraph."""
    console().print(text, style=style, soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table.

    Parameters
    ----------
    columns : sequence of str
        Headings; one that starts with ``>`` belongs to a column of numbers.
    rows : iterable of sequence of str
        Cells. A cell that starts with ``!`` is a fault and is shown as one.
    title : str
        Line above the table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(Text(name.lstrip(">")), justify=justify, overflow="fold")
    for row in rows:
        cells = (Text(cell[1:], style="bold red") if cell.startswith("!") else Text(cell) for cell in row)
        table.add_row(*cells)
    if title:
        say(title, style="bold")
    out = console()
    if out.is_terminal:
        out.print(table)
    else:  # the cells' padding says nothing to a reader of a file
        with out.capture() as captured:
            out.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    say()


def seconds(value: float | None) -> str:
    """A time with its unit.

    Examples
    --------
    >>> seconds(1.234e-5), seconds(0.5), seconds(75.0), seconds(None)
    ('12.3 µs', '500 ms', '75 s', '-')
    """
    if value is None:
        return "-"
    if value == float("inf"):
        return "inf"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns"


def size(count: int) -> str:
    """A number of bytes with its unit.

    Examples
    --------
    >>> size(0), size(1536), size(3 << 30)
    ('0', '1.5 KiB', '3 GiB')
    """
    if count < 1024:
        return f"{count} B" if count else "0"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    """Three digits, no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return text


def ratio(value: float | None) -> str:
    """How many times faster.

    Examples
    --------
    >>> ratio(1.234), ratio(None)
    ('1.23x', '-')
    """
    return "-" if value is None else f"{value:.2f}x"


def settings_text(config: Any) -> str:
    """Knobs on one line.

    Examples
    --------
    >>> settings_text({"BLOCK_M": 128, "num_warps": 4}), settings_text({})
    ('BLOCK_M=128 num_warps=4', '-')
    """
    return " ".join(f"{name}={value}" for name, value in config.items()) or "-"


def json_place(path: str | None) -> Path | None:
    """Make sure that a report can be written later, before the work is done that it is about.

    Raises
    ------
    InvalidArgument
        The folder is missing or cannot be written to, or the path is a folder.
    """
    if path is None:
        return None
    place = Path(path).expanduser()
    if place.is_dir():
        raise InvalidArgument("json", f"{path}, a folder", "the path of a file to write")
    if not place.parent.is_dir():
        raise InvalidArgument("json", f"{path}, in a folder that does not exist", "a file in an existing folder")
    try:
        with tempfile.TemporaryFile(dir=place.parent):
            pass
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(0, "the file is read-only")
    except OSError as error:
        raise InvalidArgument("json", f"{path} ({error.strerror})", "a file that can be written") from None
    return place


def write_text(place: Path, text: str) -> None:
    """Write a file whole or not at all: into a file beside it, which then takes its name."""
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", text=True)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise InvalidArgument("file", f"{place} ({error.strerror})", "a file that can be written") from None
        raise


def write_json(place: Path, content: Any) -> None:
    """Write a report as JSON, whole or not at all."""
    write_text(place, json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n")


def plain(content: Any) -> Any:
    """The same with infinity and NaN, which JSON lacks, as text.

    Examples
    --------
    >>> plain({"error": {"y": float("inf")}, "times": (1.0, 2.0)})
    {'error': {'y': 'inf'}, 'times': [1.0, 2.0]}
    """
    if isinstance(content, dict):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
