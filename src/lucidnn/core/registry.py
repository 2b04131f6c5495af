"""Finds the engines: every module under ``lucidnn.engines`` that does not start with an underscore.

A file that fails to import (a missing compiler, say) is listed with its reason and takes no part; it never breaks the
others. Other packages can add a folder of engines through the entry-point group ``lucidnn.engines`` (a package name).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
import threading

from .engine import NOTES, Engine
from .errors import UnknownEngine
from .operation import Operation
from .target import KINDS

_lock = threading.RLock()
_engines: dict[str, Engine] | None = None
_failures: dict[str, str] = {}


def _modules() -> list[str]:
    names: list[str] = []
    for root in ["lucidnn.engines", *(e.value for e in importlib.metadata.entry_points(group="lucidnn.engines"))]:
        try:
            package = importlib.import_module(root)
        except ImportError as error:
            _failures[root] = str(error)
            continue
        for info in pkgutil.walk_packages(package.__path__, root + "."):
            if not info.ispkg and not any(part.startswith("_") for part in info.name.split(".")):
                names.append(info.name)
    return sorted(names)


def _declared(module: object, name: str, found: dict[str, Engine]) -> dict[str, Engine]:
    """Engine classes defined in a module. A wrong declaration is said at once, not when a user happens upon it."""
    fresh: dict[str, Engine] = {}
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, Engine) and cls.__module__ == name and "name" in vars(cls)):
            continue
        if other := found.get(cls.name) or fresh.get(cls.name):
            raise TypeError(f"engine name {cls.name!r} is used by {type(other).__module__} and {name}")
        declared = {*cls.operations, *cls.targets, *cls.notes}
        unknown = declared - {*KINDS, *NOTES, *Operation.registry}
        if unknown or not cls.operations or not cls.targets:
            raise TypeError(f"engine {cls.name!r}: unknown {sorted(unknown)}, or no operation or target")
        fresh[cls.name] = cls()
    return fresh


def engines() -> dict[str, Engine]:
    """All engines by name; imported on the first call."""
    global _engines
    if _engines is not None:
        return _engines
    with _lock:
        importlib.import_module("lucidnn.ops")
        found: dict[str, Engine] = {}
        for name in _modules() if _engines is None else ():
            try:
                found |= _declared(importlib.import_module(name), name, found)
            except ImportError as error:
                _failures[name] = f"{type(error).__name__}: {error}"
        _engines = _engines or found
    return _engines


def failures() -> dict[str, str]:
    """Engine modules that could not be imported, with the reason."""
    engines()
    return dict(_failures)


def for_operation(operation: str) -> list[Engine]:
    """Engines that take part in an operation, on any target."""
    return [e for e in engines().values() if operation in e.operations]


def get(name: str) -> Engine:
    """The engine of this name, or `UnknownEngine` with near names and the files that failed to import."""
    found = engines()
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=3, cutoff=0.4) or sorted(found)
    failed = "".join(f"; {module} did not import: {why}" for module, why in _failures.items())
    raise UnknownEngine(f"engine: found {name!r}; accepted: {', '.join(near)}{failed}")
