"""How choices are made: an immutable `Settings`, read from the environment once, changed for a block or the process.

It is part of the key under which plans are remembered, so that a changed setting never meets a plan chosen under
another. The block form follows `async` tasks and does not leak into other threads; a backward uses its forward's.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import importlib
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import InvalidArgument

log = logging.getLogger("lucidnn")
_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_CHOICES = {
    "policy": ("heuristic", "find", "error"),
    "no_fallback": (False, True),
    "log": (None, "debug", "info", "warning", "error"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that steers a choice.

    >>> with using(disable_engines=("conv.fft*",)) as s:
    ...     s.allows("conv.fft_tiled"), s.allows("conv.direct")
    (False, True)
    """

    policy: str = "heuristic"  # without a tuned row: trust the cost model, 'find' (time the best now) or 'error'
    deterministic: bool = False  # keep nondeterministic engines out, and do not time: timings differ between runs
    engine: str | None = None  # use it for the operations it takes part in; a problem it refuses is an error
    workspace_limit: int | None = None  # most bytes of scratch memory that a plan may ask for
    allow_tf32: bool | None = None  # whether float32 may be rounded to TF32; None follows the framework's own flag
    disable_engines: tuple[str, ...] = ()  # names, or patterns such as conv.winograd*, that take no part
    exclude_notes: tuple[str, ...] = ()  # engines with one of these notes take no part
    no_fallback: bool = False  # make the use of a reference engine, the last resort, an error
    cache_dir: pathlib.Path | None = None  # for tuned rows and compiled kernels; None is the platform's cache directory
    log: str | None = None  # level of the logger `lucidnn`: every choice is a line at 'info'

    def __post_init__(self):
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise InvalidArgument(name, repr(getattr(self, name)), ", ".join(map(str, accepted)))
        for name in ("disable_engines", "exclude_notes"):
            if isinstance(getattr(self, name), str):
                raise InvalidArgument(name, repr(getattr(self, name)), "a sequence of strings")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.workspace_limit is not None and self.workspace_limit < 0:
            raise InvalidArgument("workspace_limit", self.workspace_limit, "a number of bytes >= 0, or None")
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", pathlib.Path(self.cache_dir))
        # The hash is taken on every call (it is part of the plan key), so it is computed once.
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def allows(self, engine: str) -> bool:
        """Whether the engine of this name may take part."""
        return not any(fnmatch.fnmatchcase(engine, pattern) for pattern in self.disable_engines)

    def directory(self) -> pathlib.Path:
        """Cache directory (not created here)."""
        return self.cache_dir or pathlib.Path(importlib.import_module("platformdirs").user_cache_dir("lucidnn"))


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read ``LUCIDNN_POLICY _CACHE_DIR _LOG _DISABLE_ENGINES _NO_FALLBACK``; an empty variable counts as unset.

    >>> from_environment({"LUCIDNN_POLICY": "find", "LUCIDNN_DISABLE_ENGINES": "conv.fft, conv.w*"}).disable_engines
    ('conv.fft', 'conv.w*')
    """
    env = os.environ if environ is None else environ
    names = ("policy", "cache_dir", "log", "disable_engines", "no_fallback")
    given: dict[str, Any] = {name: env.get(f"LUCIDNN_{name.upper()}", "") for name in names}
    given["log"] = given["log"].lower()
    given["disable_engines"] = tuple(name.strip() for name in given["disable_engines"].split(",") if name.strip())
    given["no_fallback"] = _FLAGS.get(given["no_fallback"].lower(), given["no_fallback"])
    try:
        return Settings(**{name: value for name, value in given.items() if value})
    except InvalidArgument as error:
        raise InvalidArgument(f"LUCIDNN_{error.argument.upper()}", error.found, error.accepted) from None


_override: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("lucidnn_settings", default=None)
_process: Settings | None = None


def current() -> Settings:
    """Settings in force here: the innermost `using` block's, else the process's."""
    return _override.get() or _process or configure()


def configure(**changes: Any) -> Settings:
    """Change settings for the whole process; with no argument, make sure they were read from the environment."""
    global _process
    _process = _changed(_process or from_environment(), changes)
    return _process


@contextlib.contextmanager
def using(settings: Settings | None = None, **changes: Any) -> Iterator[Settings]:
    """Other settings inside a ``with`` block."""
    chosen = _changed(settings or current(), changes)
    token = _override.set(chosen)
    try:
        yield chosen
    finally:
        _override.reset(token)


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    known = sorted(field.name for field in dataclasses.fields(Settings))
    if unknown := sorted(changes.keys() - known):
        raise InvalidArgument("setting", ", ".join(unknown), ", ".join(known))
    settings = dataclasses.replace(settings, **changes) if changes else settings
    if settings.log:
        if not log.handlers and not logging.getLogger().handlers:
            log.addHandler(logging.StreamHandler())
            log.handlers[0].setFormatter(logging.Formatter("lucidnn: %(message)s"))
        log.setLevel(settings.log.upper())
    return settings
