"""Scratch memory of a CPU kernel that lives on the stack of the thread that runs it.

``stack(count, like)`` gives a pointer to `count` uninitialised elements, `count` a constant. Unlike an array it costs
nothing to get, needs no reference to keep it alive, and LLVM knows that nothing else points there, so that loops over
it vectorise without a check at run time. It lasts until the kernel returns. Keep it to some tens of kilobytes:
threads have small stacks.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic


@intrinsic(prefer_literal=True)
def stack(typingctx, count, like):
    """A pointer to `count` uninitialised elements of `like`'s type on the stack. Kernels only."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("stack needs a constant number of elements")
    size = count.literal_value
    target = types.CPointer(types.unliteral(like))

    def codegen(context, builder, signature, values):
        element = context.get_value_type(target.dtype)
        with builder.goto_block(builder.function.entry_basic_block):
            memory = builder.alloca(ir.ArrayType(element, size))
            memory.align = 64
        return builder.bitcast(memory, element.as_pointer())

    return target(count, like), codegen
