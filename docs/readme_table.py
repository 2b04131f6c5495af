"""Writes the README's tables from the committed results, so that no figure there is typed by hand.

::

    python docs/readme_table.py           # rewrite what stands between the markers
    python docs/readme_table.py --check   # say whether that would change anything (exit code 1 if it would)

A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``; the names are those of `TABLES`. Results are the
lines of ``benchmarks/results/*.jsonl``; every table ends with the environment that its figures were measured in.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class TableError(Exception):
    """The README or a result file is not as it should be; the message says where."""


def read_results(folder: Path) -> list[Row]:
    """Every result line, by file name and line.

    Raises
    ------
    TableError
        A line is not a result.
    """
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                row["suite"], row["name"], row["environment"]["device"]
            except (ValueError, KeyError, TypeError) as error:
                raise TableError(f"{path}:{number}: not a result ({type(error).__name__}: {error})") from None
            rows.append(row)
    return rows


def rewritten(text: str, rows: Sequence[Row]) -> str:
    """The text with every marked table made anew.

    Raises
    ------
    TableError
        A marker without end, or a table of another name.
    """
    opened = re.findall(r"<!-- table:([\w-]+) -->", text)
    for name in opened:
        if name not in TABLES:
            raise TableError(f"table:{name} is not known; there are {', '.join(TABLES)}")
    if len(opened) != len(MARKED.findall(text)):
        raise TableError(f"a table has no <!-- end -->; those that begin: {', '.join(opened)}")
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](rows) + m[4], text)


# ---- pieces ------------------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """A time with its unit, three digits.

    Examples
    --------
    >>> seconds(0.0123), seconds(4.5e-6), seconds(None)
    ('12.3 ms', '4.5 µs', '-')
    """
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale or unit == "µs":
            number = value / scale
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    raise AssertionError


def mean_ratio(ratios: Iterable[float]) -> float:
    """Geometric mean.

    Examples
    --------
    >>> round(mean_ratio([0.5, 2.0]), 6)
    1.0
    """
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, nothing without rows; a column whose name starts with ``>`` holds numbers."""
    rows = list(rows)
    if not rows:
        return ""
    head = "| " + " | ".join(name.lstrip(">") for name in columns) + " |"
    rule = "|" + "|".join("---:" if name.startswith(">") else "---" for name in columns) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(cells) + " |" for cells in rows)]) + "\n"


def environments(rows: Iterable[Row]) -> str:
    """One line for every environment in which rows were measured."""
    lines = []
    for row in rows:
        e = row["environment"]
        parts = [e["device"]]
        if e["target"].startswith("cpu"):
            parts.append(f"{e['threads']} threads")
        parts += [
            f"{name} {e[name]}" for name in ("driver", "cuda", "cudnn", "torch", "triton", "numba") if e.get(name)
        ]
        if e.get("commit"):
            parts.append(f"commit {e['commit']}")
        parts.append(e["date"][:10])
        lines.append(", ".join(parts))
    unique = dict.fromkeys(lines)
    return "\n" + "\n".join(f"<sub>{line}</sub><br>" for line in unique).removesuffix("<br>") + "\n" if unique else ""


def by_device(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows grouped by device, GPUs first."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["environment"]["target"].startswith("cpu")):
        groups.setdefault(row["environment"]["device"], []).append(row)
    return groups


def _of(rows: Iterable[Row], suite: str) -> list[Row]:
    return [row for row in rows if row["suite"] == suite]


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}" if row.get("ratio") else row.get("fault") or "-"


def _by_policy(rows: Iterable[Row], policy: str) -> list[Row]:
    return [row for row in rows if policy in row.get("policies", ())]


def _kind(row: Row) -> tuple[str, str]:
    """Operation and data type of a problem line."""
    return row["problem"].partition(" ")[0], row["problem"].partition("=")[2].partition("[")[0]


# ---- the tables --------------------------------------------------------------------------------------------


def step_table(rows: Sequence[Row]) -> str:
    """Whole training steps."""
    own = _of(rows, "step")
    lines = [
        (
            device,
            f"batch {row['batch']}, {row['dtype']} {row['layout']}",
            row["how"],
            {"heuristic": "estimate", "find": "timing"}[row["policy"]],
            seconds(row["seconds"]),
            seconds(row["peer_seconds"]),
            _ratio(row),
        )
        for device, group in by_device(own).items()
        for row in group
    ]
    columns = ("device", "training step", "launched as", "plans by", ">lucidnn", ">framework", ">ratio")
    return table(columns, lines) + environments(own)


def conv_table(rows: Sequence[Row]) -> str:
    """Single kernels, problem by problem: the plan by estimate and the plan by timing."""
    own = _of(rows, "conv")
    lines = []
    for device, group in by_device(own).items():
        for name in dict.fromkeys(row["name"] for row in group):
            same = [row for row in group if row["name"] == name]
            first, best = ((_by_policy(same, policy) or [None])[0] for policy in ("heuristic", "find"))
            shown = best or first or same[0]
            rate = f"{shown['tflops']:.0f}" if (shown.get("tflops") or 0) >= 10 else ""
            lines.append(
                (
                    device,
                    f"`{name}`",
                    f"`{shown['engine']}`" if shown.get("engine") else "-",
                    seconds(shown["seconds"]),
                    rate,
                    seconds(shown.get("peer_seconds")),
                    _ratio(first) if first else "-",
                    _ratio(best) if best else "-",
                )
            )
    columns = ("device", "problem", "engine", ">lucidnn", ">TFLOP/s", ">framework", ">ratio by estimate", ">by timing")
    return table(columns, lines) + environments(own)


def host_table(rows: Sequence[Row]) -> str:
    """Host time of a call."""
    own = _of(rows, "host")
    lines = [
        (device, f"`{row['call']}`", row["mode"], seconds(row["seconds"]), seconds(row["peer_seconds"]), _ratio(row))
        for device, group in by_device(own).items()
        for row in group
    ]
    return table(("device", "call", "gradient", ">lucidnn", ">framework", ">ratio"), lines) + environments(own)


def import_table(rows: Sequence[Row]) -> str:
    """Import times."""
    own = _of(rows, "import")
    lines = [
        (device, row["name"], seconds(row["seconds"]), ", ".join(row["loads"]) or "nothing")
        for device, group in by_device(own).items()
        for row in group
    ]
    return table(("machine", "import", ">time", "heavy packages loaded"), lines) + environments(own)


SHOWN = ("step", "conv", "models", "host")  # suites in the summary


def summary_table(rows: Sequence[Row]) -> str:
    """The main figures of every device: steps, kernels by kind, the host's share."""
    lines = []
    for device, group in by_device(rows).items():
        parts = (_step_lines(group), _kernel_lines(group), _model_lines(group), _host_lines(group))
        lines += [(device, *cells) for part in parts for cells in part]
    columns = ("device", "measured", ">lucidnn", ">framework", ">ratio")
    return table(columns, lines) + environments(row for suite in SHOWN for row in _of(rows, suite))


def _step_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Of each type and way to launch, the plans by timing where there are any."""
    found: dict[tuple[str, ...], Row] = {}
    for row in sorted(_of(rows, "step"), key=lambda row: row["policy"] == "find"):
        found[(row["dtype"], row["layout"], row["how"], str(row["batch"]))] = row
    return [
        (
            f"training step, batch {batch}, {dtype} {layout}, {how}",
            seconds(r["seconds"]),
            seconds(r["peer_seconds"]),
            _ratio(r),
        )
        for (dtype, layout, how, batch), r in found.items()
    ]


def _kernel_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Geometric means over the problems of one operation and type; by estimate and by timing."""
    own = _of(rows, "conv")
    lines = []
    for operation, dtype in dict.fromkeys(_kind(row) for row in own):
        kind = [row for row in own if _kind(row) == (operation, dtype)]
        count = len({row["name"] for row in kind})
        for policy, how in (("heuristic", "plans by estimate"), ("find", "plans by timing")):
            ratios = [row["ratio"] for row in _by_policy(kind, policy) if row.get("ratio")]
            if not ratios:
                continue
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            what = f"`{operation}` {dtype}, {count} problem{'s' * (count > 1)}, {how}"
            missing = f", {count - len(ratios)} without result" if len(ratios) < count else ""
            lines.append((what + missing, "", "", f"{mean_ratio(ratios):.2f}{spread}"))
    return lines


def _model_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Geometric means over the layers of known models, by direction; the summary's own rows have no class."""
    own = [row for row in _of(rows, "models") if row.get("class") and row.get("ratio")]
    lines = []
    for operation, dtype in dict.fromkeys(_kind(row | {"problem": row["name"]}) for row in own):
        ratios = [r["ratio"] for r in own if _kind(r | {"problem": r["name"]}) == (operation, dtype)]
        slow = sum(ratio < 0.7 for ratio in ratios)
        what = f"`{operation}` {dtype}, {len(ratios)} layers of known models" + (f", {slow} below 0.7" if slow else "")
        lines.append((what, "", "", f"{mean_ratio(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"))
    return lines


def _host_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            f"host time of `{row['call']}`, {row['mode']}",
            seconds(row["seconds"]),
            seconds(row["peer_seconds"]),
            _ratio(row),
        )
        for row in _of(rows, "host")
    ]


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "summary": summary_table,
    "step": step_table,
    "conv": conv_table,
    "host": host_table,
    "import": import_table,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check; gives the exit code."""
    parser = argparse.ArgumentParser(description="Write the README's tables from the committed results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    try:
        text = given.readme.read_text(encoding="utf-8")
        fresh = rewritten(text, read_results(given.results))
    except (OSError, TableError) as error:
        print(f"readme_table: {error}", file=sys.stderr)
        return 2
    if fresh == text:
        return 0
    if given.check:
        print(f"{given.readme} is out of date: run `make docs-table`", file=sys.stderr)
        return 1
    given.readme.write_text(fresh, encoding="utf-8")
    print(f"{given.readme}: {', '.join(m[1] for m in MARKED.findall(fresh))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
