"""What the CPU kernels share: compilation with an on-disk cache, threads, memory access and activations.

A CPU kernel of this package is a plain function ``body(part, parts, *args)`` that does one part of the work
and holds no lock; an entry function hands the parts to the threads::

    from lucidnn.engines import _numba as nb

    @nb.kernel
    def _scale_part(part, parts, src, dst, n, like):
        x, y = nb.pointer(src, like), nb.pointer(dst, like)
        for i in range(n * part // parts, n * (part + 1) // parts):
            nb.store(y, i, nb.load(x, i) * nb.cast(2, nb.load(x, i)))

    @nb.kernel
    def scale(parts, threads, src, dst, n, like):
        nb.launch(_scale_part, parts, threads, (src, dst, n, like))

    scale(8, nb.threads(), x.data_ptr(), y.data_ptr(), x.numel(), nb.token("f32"))

* ``kernel`` compiles without the interpreter lock, without bounds checks, with IEEE NaN and infinity, and
  keeps the machine code on disk (`jit`).
* ``separate`` makes a kernel that other kernels call by name instead of compiling it again.
* ``launch`` runs the parts on the OpenMP pool that torch itself uses (`pool`); ``threads()`` is how many to
  ask for, ``worthwhile`` how many pay. ``launch_tasks`` gives each thread a slot of scratch memory.
* ``pointer``, ``load``, ``store``, ``cast`` and ``token`` hide the 16-bit types (`memory`).
* ``activate`` and ``activate_grad`` are the activations by code (`epilogue`).

Addresses go in as plain integers: that keeps the host time of a call near 2 µs, where an array argument costs
about a microsecond each. Many small integers are best packed into one int64 parameter array built once.
"""

from .epilogue import ACTIVATIONS, activate, activate_grad
from .jit import cache_directory, exact_kernel, jitable, kernel, separate
from .memory import accumulator, cast, load, pointer, store, token
from .pool import launch, launch_tasks, threads, worthwhile

__all__ = [
    "ACTIVATIONS",
    "accumulator",
    "activate",
    "activate_grad",
    "cache_directory",
    "cast",
    "exact_kernel",
    "jitable",
    "kernel",
    "launch",
    "launch_tasks",
    "load",
    "pointer",
    "separate",
    "store",
    "threads",
    "token",
    "worthwhile",
]
