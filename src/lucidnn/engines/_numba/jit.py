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
import importlib
import inspect
import os
import pickle
import stat
import tempfile
from pathlib import Path

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator
from numba.extending import intrinsic, register_jitable

from ...core import settings

FASTMATH = {"contract", "reassoc", "nsz"}
_OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "boundscheck": False}


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
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return [settings.current().directory() / "numba", Path(tempfile.gettempdir()) / f"lucidnn-{user}" / "numba"]


@functools.cache
def cache_directory() -> Path | None:
    """The directory that holds compiled kernels, or None where nothing can be written."""
    return next((place for place in _candidates() if _usable(place)), None)


@functools.cache
def _shared_digest() -> bytes:
    """A hash of every file beside this one, and of the tables above: they become part of other files' kernels."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), here.parent / "_winograd.py"]):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _digest(path: str) -> str:
    """Of a kernel's own file, of its family's helpers, whose names start with an underscore, and of what all share."""
    try:
        own = [Path(path), *sorted(Path(path).parent.glob("_[a-z]*.py"))]
        text = b"".join(file.read_bytes() for file in own)
    except OSError:
        text = path.encode()
    return hashlib.sha256(text + _shared_digest()).hexdigest()


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

    def reduce(self, cres):
        return sorted(_needs(cres.library), key=repr), super().reduce(cres)

    def rebuild(self, target_context, payload):
        # The machine code names the separately compiled kernels that it calls: they must be there before it is linked.
        needed, code = payload
        for module, function, argument_types, name in needed:
            callee = getattr(importlib.import_module(module), function)
            if _provide(getattr(callee, "dispatcher", callee), argument_types) != name:
                raise LookupError(f"{name} has changed since")
        return super().rebuild(target_context, code)


class _Cache(FunctionCache):
    _impl_class = _CacheFiles

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged or foreign file: compile anew and overwrite it
            return None

    def save_overload(self, sig, data):
        with contextlib.suppress(OSError):  # a full or vanished disk costs the next process a compilation
            try:
                super().save_overload(sig, data)
            except (pickle.PickleError, EOFError, AttributeError, ValueError, IndexError):
                self.flush()  # the index is damaged: start a new one
                super().save_overload(sig, data)


def kernel(function):
    """Compile `function` for the CPU on its first call, or load it from disk.

    Called from another kernel it is linked into that one and compiled again with it, which lets it be inlined; see
    `separate` for the alternative.

    Parameters
    ----------
    function : callable
        A function in Numba's nopython subset that cannot raise.

    Returns
    -------
    numba.core.registry.CPUDispatcher
        The compiled function; call it from Python or from another kernel.
    """
    return _dispatcher(function, _OPTIONS)


def exact_kernel(function):
    """Like `kernel`, for formulas that depend on the order of their operations: nothing is reassociated."""
    return _dispatcher(function, _OPTIONS | {"fastmath": FASTMATH - {"reassoc"}})


def _dispatcher(function, options):
    dispatcher = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = NullCache() if cache_directory() is None else _Cache(function)
    return dispatcher


def jitable(function):
    """Let kernels call `function`: it is compiled as part of each kernel that does, and cached with it."""
    return register_jitable(**_OPTIONS)(function)


def _provide(dispatcher, argument_types) -> str:
    """Compile or load a kernel for these types and make its address known to the linker; gives the name."""
    key = (dispatcher, argument_types)
    name = _provided.get(key)
    if name is None:
        dispatcher.compile(argument_types)
        compiled = dispatcher.overloads[argument_types]
        function = dispatcher.py_func
        stamp = hashlib.sha256(f"{_digest(inspect.getfile(function))}{argument_types}".encode()).hexdigest()[:16]
        name = f"lucidnn.{function.__module__}.{function.__qualname__}.{stamp}"
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        llvmlite.binding.add_symbol(name, address)
        _provided[key] = name
    return name


_provided: dict[tuple, str] = {}


def _needs(library) -> set[tuple]:
    """What `call_separately` noted on a library and on those linked into it."""
    found: set[tuple] = set(getattr(library, "_lucidnn_needs", ()))
    for linked in library._linking_libraries:
        found |= _needs(linked)
    return found


def call_separately(context, builder, dispatcher, argument_types, values):
    """Emit a call of a kernel's own machine code, by name, instead of linking the kernel into the caller."""
    name = _provide(dispatcher, argument_types)
    function = dispatcher.py_func
    library = context.active_code_library
    noted = getattr(library, "_lucidnn_needs", set())
    library._lucidnn_needs = noted | {(function.__module__, function.__name__, argument_types, name)}
    result = dispatcher.overloads[argument_types].signature.return_type
    convention = context.call_conv
    kind = convention.get_function_type(result, argument_types)
    callee = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    _, value = convention.call_function(builder, callee, result, argument_types, values)
    return value


def separate(function, exact: bool = False):
    """Like `kernel` or `exact_kernel` for large functions: kernels call its code, compiled once, never inlined.

    Without this every kernel on a chain of calls compiles all those below it again. Called from kernels only; the
    module must keep the result under the function's own name.
    """
    dispatcher = exact_kernel(function) if exact else kernel(function)

    def typing(typingctx, *arguments):
        given = tuple(types.unliteral(argument) for argument in arguments)
        chosen = types.Dispatcher(dispatcher).get_call_type(typingctx, given, {})

        def codegen(context, builder, signature, values):
            cast = [
                context.cast(builder, value, have, want)
                for value, have, want in zip(values, signature.args, chosen.args, strict=True)
            ]
            return call_separately(context, builder, dispatcher, chosen.args, cast)

        return chosen.return_type(*arguments), codegen

    typing.__doc__ = function.__doc__
    names = ["typingctx", *inspect.signature(function).parameters]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typing.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore
    result = intrinsic(typing)
    result.dispatcher = dispatcher
    return result
