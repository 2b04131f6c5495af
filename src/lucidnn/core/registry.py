"""Finds the engines: every module under ``lucidnn.engines`` that does not start with an underscore.

A file that fails to import (a missing compiler, say) is listed with its reason and takes no part; it never breaks the
others. Other packages can add a folder of engines through the entry-point group ``lucidnn.engines`` (a package name).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import pkgutil
import threading
from typing import Any

from .engine import NOTES, Engine
from .errors import UnknownEngine
from .operation import Operation
from .target import KINDS

lock = threading.RLock()  # one import, build or timing of engines at a time: compilers and devices are shared
if hasattr(os, "register_at_fork"):  # a forked child has none of the threads that may hold it
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
_engines: dict[str, Engine] | None = None
_failures: dict[str, str] = {}


def engines() -> dict[str, Engine]:
    """All engines by name; imported on the first call."""
    global _engines
    if _engines is None:
        with lock:
            _engines = _engines or _load()
    return _engines


def _load() -> dict[str, Engine]:  # a wrong declaration is said at once, not when a user happens upon it
    found: dict[str, Engine] = {}
    importlib.import_module("lucidnn.ops")  # by name: it stands above
    for root in ["lucidnn.engines", *(p.value for p in importlib.metadata.entry_points(group="lucidnn.engines"))]:
        files = pkgutil.walk_packages(_names(root).get("__path__", ()), root + ".", onerror=_names)
        modules = sorted(f.name for f in files if not f.ispkg and "._" not in f.name)
        for cls in [cls for module in modules for cls in _declared(module)]:
            if other := found.get(cls.name):
                raise TypeError(f"engine name {cls.name!r} is used by {type(other).__module__} and {cls.__module__}")
            unknown = {*cls.operations, *cls.targets, *cls.notes} - {*Operation.registry, *KINDS, *NOTES}
            if unknown or not cls.operations or not cls.targets:
                raise TypeError(f"engine {cls.name!r}: unknown {sorted(unknown)}, or no operation or target")
            found[cls.name] = cls()
    return found


def _declared(module: str) -> list[type[Engine]]:
    classes = [cls for cls in _names(module).values() if isinstance(cls, type) and issubclass(cls, Engine)]
    return [cls for cls in classes if cls.__module__ == module and "name" in vars(cls)]


def _names(module: str) -> dict[str, Any]:
    """The names in a module. Whatever goes wrong in importing a file is that file's, and listed."""
    try:
        return vars(importlib.import_module(module))
    except Exception as error:
        _failures[module] = f"{type(error).__name__}: {error}"
        return {}


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
