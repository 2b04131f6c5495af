"""Threads for CPU kernels: the parts of a kernel run on the OpenMP pool that torch already keeps.

Two pools on the same cores cost more than they bring: after a parallel region the threads of an OpenMP pool
spin for a while, and a second pool then fights them for the cores. So this file asks for no pool of its own.
It finds the OpenMP library that torch has loaded and calls its entry point ``GOMP_parallel`` (which both
GNU's and LLVM's libraries have on Linux) straight from compiled code. A parallel region then costs 1 to 2
µs. Where there is no such entry point (macOS, Windows), a few Python threads that have released the
interpreter lock do the same, at some 50 µs.

``launch(body, parts, threads, args)`` calls ``body(part, parts, *args)`` once for every part. Threads draw
the parts from a counter, in order: more parts than threads balance a load, and which thread runs a part never
shows in a result as long as a part writes only what belongs to its number.

Several Python threads may launch at once. A process made by ``fork`` has no OpenMP threads and the library
cannot start new ones there, so in such a child everything runs on the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import llvmlite.binding
import torch
from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .jit import call_separately

GRAIN = 250_000  # operations that outweigh waking another thread

# The name compiled kernels refer to; cached machine code is linked to it anew in each process.
_SYMBOL = "lucidnn_parallel"


def _openmp_libraries() -> list[str]:
    """OpenMP libraries to ask for an entry point: first those already in this process, torch's own before others'."""
    found = []
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if any(name in os.path.basename(path) for name in ("libgomp", "libomp", "libiomp5")):
                found.append(path)
    except OSError:
        pass
    directory = Path(torch.__file__).parent / "lib"
    found.sort(key=lambda path: not path.startswith(str(directory.parent)))
    return [*dict.fromkeys(found), *(str(path) for path in sorted(directory.glob("lib*omp*")))]


def _openmp_entry() -> int | None:
    """The address of ``GOMP_parallel(function, data, threads, flags)``, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    for path in _openmp_libraries():
        try:
            address = ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if address:
            return address
    return None


_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_executor: ThreadPoolExecutor | None = None
_executor_lock = threading.Lock()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _python_parallel(function, data, count, flags):
    """GOMP_parallel's contract on Python threads: `function(data)` on `count` threads."""
    global _executor
    task = _TASK(function)
    with _executor_lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(os.cpu_count() or 1, "lucidnn")
    # The task draws parts until none is left, so it may run later than the rest, or find nothing to do.
    others = [_executor.submit(task, data) for _ in range(count - 1)]
    task(data)
    wait(others)


_entry = _openmp_entry()
llvmlite.binding.add_symbol(_SYMBOL, _entry or ctypes.cast(_python_parallel, ctypes.c_void_p).value)

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """How many threads a kernel may use now: torch's setting, or 1 in a forked child."""
    return 1 if _forked else torch.get_num_threads()


def worthwhile(operations: float, limit: int) -> int:
    """Threads, at most `limit`, for work of so many operations: each should have some 10 µs of it."""
    return max(1, min(limit, int(operations // GRAIN)))


def pool_name() -> str:
    """Which pool runs the parts, for ``lucidnn info``."""
    return "torch's OpenMP pool" if _entry else "Python threads"


def _launcher(documentation: str, with_slot: bool):
    """The intrinsic behind `launch` and `launch_tasks`; they differ in the second argument of the body."""

    def typing(typingctx, body, parts, threads, args):
        if not isinstance(body, types.Dispatcher):
            raise TypingError(f"launch needs a kernel as its first argument, found {body}")
        if not isinstance(args, types.BaseTuple):
            raise TypingError(f"launch needs a tuple of arguments, found {args}")
        wanted = body.get_call_type(typingctx, (types.intp, types.intp, *args.types), {}).args
        signature = types.void(body, types.intp, types.intp, args)

        def codegen(context, builder, signature, values):
            _emit_launch(context, builder, body.dispatcher, wanted, args.types, values, with_slot)
            return context.get_dummy_value()

        return signature, codegen

    typing.__doc__ = documentation
    return intrinsic(typing)


def _emit_launch(context, builder, body, taken_types, given_types, values, with_slot: bool) -> None:
    _, parts, threads, args = values
    word, unsigned = ir.IntType(64), ir.IntType(32)
    opaque = ir.IntType(8).as_pointer()
    arguments = [
        context.cast(builder, builder.extract_value(args, i), given, taken)
        for i, (given, taken) in enumerate(zip(given_types, taken_types[2:], strict=True))
    ]

    # The frame, which every thread reads: the next part, the next slot, the number of parts, the arguments.
    frame_type = ir.LiteralStructType([word, word, word, *(value.type for value in arguments)])
    with builder.goto_block(builder.function.entry_basic_block):
        frame = builder.alloca(frame_type)

    def field(b, pointer, index):
        return b.gep(pointer, [ir.Constant(unsigned, 0), ir.Constant(unsigned, index)], inbounds=True)

    for i, value in enumerate([ir.Constant(word, 0), ir.Constant(word, 0), parts, *arguments]):
        builder.store(value, field(builder, frame, i))

    # task(frame), on every thread: take a slot, then draw parts from the counter and run them until none is left.
    name = builder.module.get_unique_name(builder.function.name + ".task")
    task = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [opaque]), name)
    task.linkage = "internal"
    start, loop, work, done = (task.append_basic_block(n) for n in ("start", "loop", "work", "done"))
    b = ir.IRBuilder(start)
    shared = b.bitcast(task.args[0], frame_type.as_pointer())
    one = ir.Constant(word, 1)
    slot = b.atomic_rmw("add", field(b, shared, 1), one, "monotonic")
    count = b.load(field(b, shared, 2))
    loaded = [b.load(field(b, shared, i + 3)) for i in range(len(arguments))]
    b.branch(loop)
    b.position_at_end(loop)
    part = b.atomic_rmw("add", field(b, shared, 0), one, "monotonic")
    b.cbranch(b.icmp_signed("<", part, count), work, done)
    b.position_at_end(work)
    second = slot if with_slot else count
    call_separately(context, b, body, taken_types, [part, second, *loaded])
    b.branch(loop)
    b.position_at_end(done)
    b.ret_void()

    data = builder.bitcast(frame, opaque)
    team = builder.select(builder.icmp_signed("<", parts, threads), parts, threads)
    with builder.if_else(builder.icmp_signed(">", team, one)) as (several, single):
        with several:
            runner_type = ir.FunctionType(ir.VoidType(), [task.type, opaque, unsigned, unsigned])
            runner = builder.module.globals.get(_SYMBOL) or ir.Function(builder.module, runner_type, _SYMBOL)
            builder.call(runner, [task, data, builder.trunc(team, unsigned), ir.Constant(unsigned, 0)])
        with single:
            builder.call(task, [data])


launch = _launcher(
    "Call ``body(part, parts, *args)`` for every part on at most `threads` threads, and wait.", with_slot=False
)
launch_tasks = _launcher(
    """Call ``body(task, slot, *args)`` for every task on at most `threads` threads, and wait.

    `slot` is less than `threads` and different for threads that run at the same time: it picks a thread's own scratch
    memory. Which slot a task gets differs from call to call, so that memory may carry nothing from task to task.
    """,
    with_slot=True,
)
