"""Compiles CPU kernels and keeps their machine code on disk.

``kernel`` is ``numba.njit`` with this package's settings: the interpreter lock released, division that
follows IEEE (no Python exception inside a loop), and only those floating-point liberties that keep NaN and
infinity (contraction to fused multiply-add, reassociation of sums, no signed zeros).

Compiling takes 0.1 to several seconds a kernel, loading from disk milliseconds. Numba's own cache has three
traits that do not fit here, hence the small subclass below: it looks at one source file only, so that a
kernel that inlines a function of another file goes stale unseen (here: the file and all shared device code
are hashed); it raises where no directory can be written (here: then there is no cache); and a damaged file is
an error (here: a miss).

The directory is ``$LUCIDNN_CACHE_DIR/numba``, or ``numba`` in the platform's cache directory for lucidnn, or,
where that cannot be written, a directory of the user's own below the temporary directory.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import inspect
import os
import stat
import tempfile
from pathlib import Path

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator
from platformdirs import user_cache_dir

FASTMATH = {"contract", "reassoc", "nsz"}


def _usable(directory: Path) -> bool:
    """Whether `directory` exists or can be made, belongs to this user alone, and takes a file."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid"):
            # Loading a cache entry runs it: a directory that others may write to is no place for one.
            status = directory.stat()
            if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
                return False
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _candidates() -> list[Path]:
    named = os.environ.get("LUCIDNN_CACHE_DIR")
    places = [Path(named)] if named else [Path(user_cache_dir("lucidnn", appauthor=False))]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return [*(place / "numba" for place in places), Path(tempfile.gettempdir()) / f"lucidnn-{user}" / "numba"]


@functools.cache
def cache_directory() -> Path | None:
    """The directory that holds compiled kernels, or None where nothing can be written."""
    return next((place for place in _candidates() if _usable(place)), None)


@functools.cache
def _shared_digest() -> bytes:
    """A hash of every file beside this one: their functions are inlined into other files' kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _digest(path: str) -> str:
    try:
        own = Path(path).read_bytes()
    except OSError:
        own = path.encode()
    return hashlib.sha256(own + _shared_digest()).hexdigest()


class _Locator(_CacheLocator):
    def __init__(self, function, path):
        self._py_file = path
        self._function = function

    def get_cache_path(self):
        return str(cache_directory())

    def get_source_stamp(self):
        return _digest(self._py_file)

    def get_disambiguator(self):
        # The stamp in the name lets two versions of the sources live side by side.
        return f"{self._function.__code__.co_firstlineno}-{self.get_source_stamp()[:12]}"

    @classmethod
    def from_function(cls, py_func, py_file):
        return cls(py_func, py_file)


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes = [_Locator]

    def __init__(self, function):
        # Not through the base class: it lets an environment variable replace the locator.
        self._lineno = function.__code__.co_firstlineno
        path = inspect.getfile(function)
        self._locator = _Locator(function, path)
        self._filename_base = self.get_filename_base(f"{Path(path).stem}.{function.__qualname__}", "")


class _Cache(FunctionCache):
    _impl_class = _CacheFiles

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged or foreign file: compile anew and overwrite it
            return None

    def save_overload(self, sig, data):
        with contextlib.suppress(OSError):  # a full or vanished disk costs the next process a compilation
            super().save_overload(sig, data)


def kernel(function):
    """Compile `function` for the CPU on its first call, or load it from disk.

    Parameters
    ----------
    function : callable
        A function in Numba's nopython subset that cannot raise.

    Returns
    -------
    numba.core.registry.CPUDispatcher
        The compiled function; call it from Python or from another kernel.
    """
    dispatcher = numba.njit(nogil=True, fastmath=FASTMATH, error_model="numpy", boundscheck=False)(function)
    dispatcher._cache = NullCache() if cache_directory() is None else _Cache(function)
    return dispatcher
