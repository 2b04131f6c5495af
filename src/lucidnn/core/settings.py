"""How choices are made: an immutable `Settings`, read from the environment once, changed for a block or the process.

A `Settings` is part of the key under which plans are remembered, so a changed setting never meets a plan chosen under
another. The block form uses a context variable: it follows `async` tasks and does not leak into other threads; a
backward pass uses the settings of its forward.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import InvalidArgument

log = logging.getLogger("lucidnn")

_CHOICES = {"policy": ("heuristic", "find", "error"), "log": (None, "debug", "info", "warning", "error")}
_FLAGS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """Everything that steers a choice.

    Parameters
    ----------
    policy : {'heuristic', 'find', 'error'}
        What to do when no tuned row exists: trust the cost model, time the best candidates now, or raise.
    deterministic : bool
        Keep nondeterministic engines out, and do not time (a timing decides differently from run to run).
    engine : str or None
        Use this engine for the operations it takes part in; a problem it refuses is an error.
    workspace_limit : int or None
        Most bytes of scratch memory a plan may ask for.
    allow_tf32 : bool or None
        Whether float32 may be rounded to TF32 on tensor cores. None follows the framework's own flag.
    disable_engines, exclude_notes : tuple of str
        Engine names (or patterns, ``conv.winograd*``) and notes (``fft``, ...) that take no part.
    no_fallback : bool
        Make the use of a reference engine, the last resort, an error.
    cache_dir : pathlib.Path or None
        Where tuned rows and compiled kernels are kept. None is the platform's cache directory.
    log : str or None
        Level of the ``lucidnn`` logger: every choice is a line at ``info``.

    Examples
    --------
    >>> with using(policy="heuristic", disable_engines=("conv.fft*",)) as s:
    ...     s.allows("conv.fft_tiled"), s.allows("conv.direct")
    (False, True)
    """

    policy: str = "heuristic"
    deterministic: bool = False
    engine: str | None = None
    workspace_limit: int | None = None
    allow_tf32: bool | None = None
    disable_engines: tuple[str, ...] = ()
    exclude_notes: tuple[str, ...] = ()
    no_fallback: bool = False
    cache_dir: pathlib.Path | None = None
    log: str | None = None

    def __post_init__(self):
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise InvalidArgument(name, repr(getattr(self, name)), ", ".join(map(str, accepted)))
        if self.workspace_limit is not None and self.workspace_limit < 0:
            raise InvalidArgument("workspace_limit", self.workspace_limit, "a number of bytes >= 0, or None")
        for name in ("disable_engines", "exclude_notes"):
            if isinstance(getattr(self, name), str):
                raise InvalidArgument(name, repr(getattr(self, name)), "a sequence of strings")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", pathlib.Path(self.cache_dir))
        # The hash is taken on every call (it is part of the plan key), so it is computed once.
        values = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Settings) and self._values == other._values)  # type: ignore[attr-defined]

    def allows(self, engine: str) -> bool:
        """Whether the engine of this name may take part."""
        return not any(fnmatch.fnmatchcase(engine, pattern) for pattern in self.disable_engines)

    def directory(self) -> pathlib.Path:
        """Cache directory (not created here)."""
        import platformdirs

        return self.cache_dir or pathlib.Path(platformdirs.user_cache_dir("lucidnn"))


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read ``LUCIDNN_POLICY _CACHE_DIR _LOG _DISABLE_ENGINES _NO_FALLBACK``; an empty variable counts as unset.

    Examples
    --------
    >>> from_environment({"LUCIDNN_POLICY": "find", "LUCIDNN_DISABLE_ENGINES": "conv.fft, conv.w*"}).disable_engines
    ('conv.fft', 'conv.w*')
    """
    env = os.environ if environ is None else environ
    given = {name: env.get(f"LUCIDNN_{name.upper()}", "") for name in ("policy", "cache_dir", "log")}
    given["log"] = given["log"].lower()
    values: dict[str, Any] = {name: value for name, value in given.items() if value}
    names = env.get("LUCIDNN_DISABLE_ENGINES", "").split(",")
    values["disable_engines"] = tuple(name.strip() for name in names if name.strip())
    flag = env.get("LUCIDNN_NO_FALLBACK", "").lower()
    if flag not in _FLAGS:
        raise InvalidArgument("LUCIDNN_NO_FALLBACK", repr(flag), "0 or 1")
    try:
        return Settings(**values, no_fallback=_FLAGS[flag])
    except InvalidArgument as error:
        raise InvalidArgument(f"LUCIDNN_{error.argument.upper()}", error.found, error.accepted) from None


_override: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("lucidnn_settings", default=None)
_process: Settings | None = None


def current() -> Settings:
    """Settings in force here: the innermost `using` block's, else the process's."""
    return _override.get() or _process or configure()


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    known = {f.name for f in dataclasses.fields(Settings)}
    if unknown := changes.keys() - known:
        raise InvalidArgument("setting", ", ".join(sorted(unknown)), ", ".join(sorted(known)))
    settings = dataclasses.replace(settings, **changes) if changes else settings
    if settings.log:
        if not log.handlers and not logging.getLogger().handlers:
            log.addHandler(logging.StreamHandler())
            log.handlers[0].setFormatter(logging.Formatter("lucidnn: %(message)s"))
        log.setLevel(settings.log.upper())
    return settings


def configure(**changes: Any) -> Settings:
    """Change settings for the whole process; with no argument, make sure they were read from the environment."""
    global _process
    _process = _changed(_process or from_environment(), changes)
    return _process


@contextlib.contextmanager
def using(settings: Settings | None = None, **changes: Any) -> Iterator[Settings]:
    """Other settings inside a ``with`` block."""
    token = _override.set(_changed(settings or current(), changes))
    try:
        yield _override.get()  # type: ignore[misc]
    finally:
        _override.reset(token)
