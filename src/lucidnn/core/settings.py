"""How choices are made: an immutable `Settings`, read from the environment once, changed for a block or for the process.

A `Settings` takes part in the key under which plans are remembered, so a changed setting never meets a plan that was
chosen under another. The block form uses a context variable: it follows `async` tasks and does not leak into other
threads; a backward pass uses the settings of its forward.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import logging
import os
import pathlib
from collections.abc import Iterator

from .errors import InvalidArgument

log = logging.getLogger("lucidnn")

POLICIES = ("heuristic", "find", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_LEVELS = ("debug", "info", "warning", "error")


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
        Use this engine only; a problem it refuses is an error.
    workspace_limit : int or None
        Most bytes of scratch memory a plan may ask for.
    allow_tf32 : bool or None
        Whether float32 may be rounded to TF32 on tensor cores. None follows the framework's own flag.
    disable_engines : tuple of str
        Engine names, or patterns such as ``conv.winograd*``, that take no part.
    exclude_notes : tuple of str
        Engines that carry one of these notes take no part (``fft``, ``reduced_precision``, ...).
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
        if self.policy not in POLICIES:
            raise InvalidArgument("policy", repr(self.policy), ", ".join(POLICIES))
        if self.workspace_limit is not None and self.workspace_limit < 0:
            raise InvalidArgument("workspace_limit", self.workspace_limit, "a number of bytes >= 0, or None")
        if self.log is not None and self.log not in _LEVELS:
            raise InvalidArgument("log", repr(self.log), ", ".join(_LEVELS))
        for name in ("disable_engines", "exclude_notes"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise InvalidArgument(name, repr(value), "a sequence of strings")
            object.__setattr__(self, name, tuple(value))
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
        if self.cache_dir is not None:
            return self.cache_dir
        import platformdirs

        return pathlib.Path(platformdirs.user_cache_dir("lucidnn"))


def from_environment(environ: os._Environ[str] | dict[str, str] | None = None) -> Settings:
    """Read ``LUCIDNN_POLICY _CACHE_DIR _LOG _DISABLE_ENGINES _NO_FALLBACK``.

    Examples
    --------
    >>> from_environment({"LUCIDNN_POLICY": "find", "LUCIDNN_DISABLE_ENGINES": "conv.fft, conv.w*"}).disable_engines
    ('conv.fft', 'conv.w*')
    """
    env = os.environ if environ is None else environ
    values: dict[str, object] = {}
    if policy := env.get("LUCIDNN_POLICY"):
        if policy not in POLICIES:
            raise InvalidArgument("LUCIDNN_POLICY", repr(policy), ", ".join(POLICIES))
        values["policy"] = policy
    if folder := env.get("LUCIDNN_CACHE_DIR"):
        values["cache_dir"] = pathlib.Path(folder)
    if level := env.get("LUCIDNN_LOG"):
        if level.lower() not in _LEVELS:
            raise InvalidArgument("LUCIDNN_LOG", repr(level), ", ".join(_LEVELS))
        values["log"] = level.lower()
    if names := env.get("LUCIDNN_DISABLE_ENGINES"):
        values["disable_engines"] = tuple(part.strip() for part in names.split(",") if part.strip())
    flag = env.get("LUCIDNN_NO_FALLBACK", "").lower()
    if flag not in _TRUE + _FALSE:
        raise InvalidArgument("LUCIDNN_NO_FALLBACK", repr(flag), "0 or 1")
    values["no_fallback"] = flag in _TRUE
    return Settings(**values)  # type: ignore[arg-type]


_override: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("lucidnn_settings", default=None)
_process: Settings | None = None


def current() -> Settings:
    """Settings in force here: the innermost `using` block's, else the process's."""
    return _override.get() or _process or configure()


def _apply_log_level(settings: Settings) -> None:
    if settings.log:
        if not log.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("lucidnn: %(message)s"))
            log.addHandler(handler)
        log.setLevel(settings.log.upper())


def _changed(settings: Settings, changes: dict[str, object]) -> Settings:
    known = {f.name for f in dataclasses.fields(Settings)}
    for name in changes:
        if name not in known:
            raise InvalidArgument("setting", name, ", ".join(sorted(known)))
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def configure(**changes: object) -> Settings:
    """Change settings for the whole process; with no argument, make sure they were read from the environment."""
    global _process
    _process = _changed(_process or from_environment(), changes)
    _apply_log_level(_process)
    return _process


@contextlib.contextmanager
def using(settings: Settings | None = None, **changes: object) -> Iterator[Settings]:
    """Other settings inside a ``with`` block."""
    inner = _changed(settings or current(), changes)
    _apply_log_level(inner)
    token = _override.set(inner)
    try:
        yield inner
    finally:
        _override.reset(token)
