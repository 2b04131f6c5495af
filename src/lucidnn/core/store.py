"""Where measured choices are kept: one SQLite file in the cache directory.

A row says: on this environment (device, processors, versions), for this problem (batch bucketed), this engine with this
configuration took this long, or failed for this reason. A store that cannot be read or written is a miss and a log
line, never an error: a user without a writable home gets slower choices, not a broken program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .settings import log

FORMAT = 1
_KEY = ("problem", "environment", "engine", "source", "config")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement."""

    problem: str  # a tuning key
    environment: str
    engine: str
    source: str  # hash of the engine's file: an edit makes its rows stale
    config: dict[str, Any]
    seconds: float | None  # the median; None unless the status is ok
    workspace: int
    status: str = "ok"  # or failed, or wrong: it ran but disagreed with the reference
    reason: str = ""
    time: float = dataclasses.field(default_factory=time.time)


class Store:
    """Measured rows in one file under `directory`, which is made when the first row is written.

    >>> import tempfile
    >>> store = Store(Path(tempfile.mkdtemp()))
    >>> store.put([Row("p", "here", "conv.direct", "ab12", {"tile": 4}, 1e-3, 0)])
    True
    >>> store.rows("p", "here")[0].config
    {'tile': 4}
    """

    def __init__(self, directory: Path):
        self.path = directory / f"tuned-{FORMAT}.sqlite"

    @contextlib.contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        """A connection of one use: nothing stays open over a fork, and others never wait long."""
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as db:
            yield db
            db.commit()

    def rows(self, problem: str | None = None, environment: str | None = None) -> list[Row]:
        """Rows of a problem and environment (all where left out), fastest first, failures last."""
        wanted = {"p": problem, "e": environment}
        query = "SELECT row FROM rows WHERE (:p IS NULL OR problem = :p) AND (:e IS NULL OR environment = :e)"
        found, trouble = [], None
        for mode in ("ro", "ro&immutable=1"):  # the second works in a folder where no lock can be made
            try:
                if self.path.exists():
                    with self._open(mode) as db:
                        found = [Row(**json.loads(text)) for (text,) in db.execute(query, wanted)]
                break
            except (sqlite3.Error, OSError, ValueError, TypeError) as error:
                trouble = trouble or error
        else:
            log.warning("tuned rows in %s cannot be read (%s); choosing without them", self.path, trouble)
        return sorted(found, key=lambda row: (row.seconds is None, row.seconds or 0.0))

    def put(self, rows: Iterable[Row]) -> bool:
        """Write rows, replacing those of the same problem, environment, engine, source, config; whether it worked."""
        values = []
        for row in map(dataclasses.asdict, rows):
            key = row | {"config": json.dumps(row["config"], sort_keys=True)}
            values.append((*(key[name] for name in _KEY), json.dumps(row, sort_keys=True)))
        columns, names = ", ".join(f"{name} TEXT" for name in _KEY), ", ".join(_KEY)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open("rwc") as db:
                for _ in range(200):  # this one statement does not wait for another process by itself
                    with contextlib.suppress(sqlite3.OperationalError):
                        db.execute("PRAGMA journal_mode=WAL")
                        break
                    time.sleep(0.01)
                db.execute("BEGIN IMMEDIATE")  # reading first and writing later could not wait either
                db.execute(f"CREATE TABLE IF NOT EXISTS rows ({columns}, row TEXT, PRIMARY KEY ({names}))")
                db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", values)
        except (sqlite3.Error, OSError) as error:
            log.warning("tuned rows cannot be written to %s (%s); they last for this process only", self.path, error)
            return False
        return True

    def clear(self) -> int:
        """Delete all rows; gives their number."""
        count = len(self.rows())
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        return count
