"""Where measured choices are kept: one SQLite file in the cache directory, and JSON to carry rows between machines.

A row says: on this environment (device, processors, versions), for this problem (batch bucketed), this engine with this
configuration took this long, or failed for this reason. Rows are never updated by another environment, and an engine's
row is stale once its source changed. A store that cannot be read or written is a miss and a log line, never an error:
a user without a writable home gets slower choices, not a broken program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .settings import log

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    problem TEXT NOT NULL, environment TEXT NOT NULL, engine TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL,
    seconds REAL, workspace INTEGER, status TEXT NOT NULL, reason TEXT NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (problem, environment, engine, source, config)) WITHOUT ROWID
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes
    ----------
    problem : str
        `Problem.tuning_key`.
    environment : str
        Device, processors and versions, see `lucidnn.core.plan.environment`.
    engine, source : str
        Engine name and the hash of its file.
    config : dict
        Its knobs.
    seconds : float or None
        Median time; None where it failed.
    workspace : int
        Bytes.
    status : {'ok', 'failed', 'wrong'}
        ``wrong``: it ran but disagreed with the reference.
    reason : str
        Of a failure.
    """

    problem: str
    environment: str
    engine: str
    source: str
    config: dict[str, Any]
    seconds: float | None
    workspace: int
    status: str = "ok"
    reason: str = ""
    time: float = dataclasses.field(default_factory=time.time)


class Store:
    """Measured rows in one file.

    Parameters
    ----------
    directory : pathlib.Path
        Made when the first row is written.

    Examples
    --------
    >>> import tempfile
    >>> store = Store(Path(tempfile.mkdtemp()))
    >>> store.put([Row("p", "here", "conv.direct", "ab12", {"tile": 4}, 1e-3, 0)])
    >>> store.rows("p", "here")[0].config
    {'tile': 4}
    """

    def __init__(self, directory: Path):
        self.path = directory / f"tuned-{FORMAT}.sqlite"
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _open(self, write: bool) -> Iterator[sqlite3.Connection]:
        """A connection of one use: nothing stays open over a fork, and other processes never wait long."""
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=10)
        else:
            db = sqlite3.connect(f"file:{self.path.as_posix()}?mode=ro", uri=True, timeout=10)
        try:
            if write:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(_SCHEMA)
            yield db
            if write:
                db.commit()
        finally:
            db.close()

    def rows(self, problem: str | None = None, environment: str | None = None) -> list[Row]:
        """Rows of a problem and environment (all where left out), fastest first, failures last."""
        if not self.path.exists():
            return []
        query = "SELECT * FROM rows WHERE (?1 IS NULL OR problem = ?1) AND (?2 IS NULL OR environment = ?2) ORDER BY seconds IS NULL, seconds"
        try:
            with self._lock, self._open(write=False) as db:
                return [_row(values) for values in db.execute(query, (problem, environment))]
        except (sqlite3.Error, OSError, ValueError) as error:
            log.warning("tuned rows in %s cannot be read (%s); choosing without them", self.path, error)
            return []

    def put(self, rows: Iterable[Row]) -> None:
        """Write rows; a row of the same key is replaced."""
        values = [
            (r.problem, r.environment, r.engine, r.source, json.dumps(r.config, sort_keys=True), r.seconds, r.workspace, r.status, r.reason, r.time)
            for r in rows
        ]
        try:
            with self._lock, self._open(write=True) as db:
                db.executemany("INSERT OR REPLACE INTO rows VALUES (?,?,?,?,?,?,?,?,?,?)", values)
        except (sqlite3.Error, OSError) as error:
            log.warning("tuned rows cannot be written to %s (%s); they last for this process only", self.path, error)

    def clear(self) -> int:
        """Delete all rows; gives their number."""
        count = len(self.rows())
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        return count


def _row(values: tuple[Any, ...]) -> Row:
    problem, environment, engine, source, config, seconds, workspace, status, reason, when = values
    return Row(problem, environment, engine, source, json.loads(config), seconds, workspace, status, reason, when)


def export_json(rows: Iterable[Row]) -> str:
    """Rows as readable JSON, one a line, sorted so that a diff shows what changed."""
    lines = sorted(json.dumps(dataclasses.asdict(row), sort_keys=True) for row in rows)
    return json.dumps({"format": FORMAT}) + "\n" + "\n".join(lines) + "\n"


def import_json(text: str) -> list[Row]:
    """Read what `export_json` wrote.

    Raises
    ------
    ValueError
        Not such a file, or of another format; says which line.
    """
    head, *lines = text.splitlines() or [""]
    try:
        if json.loads(head)["format"] != FORMAT:
            raise ValueError(f"line 1: format {json.loads(head)['format']} of tuned rows; this version reads {FORMAT}")
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError('line 1: not a file of tuned rows; it should start with {"format": 1}') from None
    rows = []
    for number, line in enumerate(lines, 2):
        if line.strip():
            try:
                rows.append(Row(**json.loads(line)))
            except (TypeError, json.JSONDecodeError) as error:
                raise ValueError(f"line {number}: not a tuned row ({error})") from None
    return rows
