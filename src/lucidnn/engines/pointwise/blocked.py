"""``pointwise.blocked``: every elementwise problem on a CPU, any types, strides and activation, in Numba.

Method: a block of `BLOCK` neighbouring points is read and widened into a buffer in the first-level cache, where the
steps of the formula pass over it one after another: scale, add the other terms, apply the activation, round and
store. Each step is a short loop of its own for each type or activation, chosen by number once a block. So one
kernel for float32 and one for float64 (taken where a tensor has that type) serve every mix of types, and as a block
is read before it is written, y may be x or z.

Axes are merged first (``_loops.py``), so dense tensors of one layout are a single long loop. Cost: the memory
traffic and, for the activations with an exponential, the arithmetic. No limits beside the four types.
"""

import numpy as np
from numba.core import types
from numba.extending import overload, register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .. import _numba as nb
from .._numba import vector as nv
from .._numba import vector_math as vm
from .._numba.stack import stack
from ._loops import OUTPUT, code_of, merged

TYPES = {"f64": 0, "f32": 1, "f16": 2, "bf16": 3}
BLOCK = 256
GRAIN = 16384  # points that are worth a thread
PARTS = 64
# A kernel's four tensors; forward may lack the middle two, backward the third.
SLOTS = {"pointwise_fwd": ("x", "z", "bias", "y"), "pointwise_bwd": ("x", "dy", "", "dx")}

# What the table of 64-bit integers holds, and where. The last loop is cut into chunks of `BLOCK`; the outer loops
# follow at `LOOPS`, five numbers each: the size, and the step of every slot.
OUTER, UNITS, CHUNKS, LANES, TYPE, STEP, CODE, LOOPS = 0, 1, 2, 3, 4, 8, 12, 13


@register_jitable
def _load(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i), v[0])
    else:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i * step), v[0])


@register_jitable
def _load_add(p, at, step, count, v, factor):
    if step == 1:
        for i in range(count):
            v[i] += factor * nb.cast(nb.load(p, at + i), v[0])
    else:
        for i in range(count):
            v[i] += factor * nb.cast(nb.load(p, at + i * step), v[0])


@register_jitable
def _store(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            nb.store(p, at + i, v[i])
    else:
        for i in range(count):
            nb.store(p, at + i * step, v[i])


@nb.kernel
def _read(kind, address, at, step, count, v):
    """v[i] = tensor[at + i * step]; the type by number."""
    if kind == 0:
        _load(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _load(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _load(nb.pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _load(nb.pointer(address, np.int16(0)), at, step, count, v)


@nb.kernel
def _read_add(kind, address, at, step, count, v, factor):
    """v[i] += factor * tensor[at + i * step]."""
    if kind == 0:
        _load_add(nb.pointer(address, np.float64(0)), at, step, count, v, factor)
    elif kind == 1:
        _load_add(nb.pointer(address, np.float32(0)), at, step, count, v, factor)
    elif kind == 2:
        _load_add(nb.pointer(address, np.uint16(0)), at, step, count, v, factor)
    else:
        _load_add(nb.pointer(address, np.int16(0)), at, step, count, v, factor)


@nb.kernel
def _write(kind, address, at, step, count, v):
    """tensor[at + i * step] = v[i], rounded."""
    if kind == 0:
        _store(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _store(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _store(nb.pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _store(nb.pointer(address, np.int16(0)), at, step, count, v)


@register_jitable
def _map(code, p, count, v):
    for i in range(count):
        v[i] = nb.activate(code, p, v[i])


@register_jitable
def _map_grad(code, p, count, v, dy):
    for i in range(count):
        v[i] = nb.activate_grad(code, p, v[i], dy[i])


def _map_any(code, p, count, v):
    """Activations with an exponential: on vectors where there are such, else one value at a time."""
    raise NotImplementedError("works inside a kernel only")


def _map_any_grad(code, p, count, v, dy):
    """Their gradients."""
    raise NotImplementedError("works inside a kernel only")


@overload(_map_any)
def _map_any_impl(code, p, count, v):
    if v.dtype != types.float32:
        return _map

    def impl(code, p, count, v):
        for i in range(0, count, nv.LANES):  # what lies past `count` in the block is never looked at
            nv.write(v, i, 1, vm.activate(code, p, nv.read_all(v, i)), nv.LANES)

    return impl


@overload(_map_any_grad)
def _map_any_grad_impl(code, p, count, v, dy):
    if v.dtype != types.float32:
        return _map_grad

    def impl(code, p, count, v, dy):
        for i in range(0, count, nv.LANES):
            slope = vm.activate_grad(code, p, nv.read_all(v, i), nv.read_all(dy, i))
            nv.write(v, i, 1, slope, nv.LANES)

    return impl


@nb.exact_kernel
def _activate(code, p, count, v):
    """The activation of a block. A loop for each, so that the choice is made outside."""
    if code == 1:
        _map(1, p, count, v)
    elif code == 2:
        _map(2, p, count, v)
    elif code == 3:
        _map(3, p, count, v)
    elif code == 11:
        _map(11, p, count, v)
    elif code == 12:
        _map(12, p, count, v)
    elif code != 0:
        _map_any(code, p, count, v)


@nb.exact_kernel
def _activate_grad(code, p, count, v, dy):
    """The gradient of a block: v holds the activation's input, then dx."""
    if code == 1:
        _map_grad(1, p, count, v, dy)
    elif code == 2:
        _map_grad(2, p, count, v, dy)
    elif code == 3:
        _map_grad(3, p, count, v, dy)
    elif code == 11:
        _map_grad(11, p, count, v, dy)
    elif code == 12:
        _map_grad(12, p, count, v, dy)
    elif code == 0:
        _map_grad(0, p, count, v, dy)
    elif code == OUTPUT + 4:  # elu, and v holds its output
        for i in range(count):
            v[i] = dy[i] if v[i] > 0 else dy[i] * (v[i] + nb.cast(p, v[i]))
    elif code == OUTPUT + 5:  # sigmoid
        for i in range(count):
            v[i] = dy[i] * (v[i] * (nb.cast(1, v[i]) - v[i]))
    elif code == OUTPUT + 6:  # tanh
        for i in range(count):
            v[i] = dy[i] * (nb.cast(1, v[i]) - v[i] * v[i])
    else:
        _map_any_grad(code, p, count, v, dy)


@nb.kernel
def _part(part, parts, a, b, c, out, table, numbers, grad, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    alpha, beta, parameter = numbers[0], numbers[1], numbers[2]
    v, dy = stack(BLOCK, like), stack(BLOCK, like)
    place, at = stack(64, np.int64(0)), stack(4, np.int64(0))
    begin, end = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    chunk, rest = begin % t[CHUNKS], begin // t[CHUNKS]
    for slot in range(4):
        at[slot] = 0
    for loop in range(t[OUTER] - 1, -1, -1):
        row = LOOPS + 5 * loop
        place[loop], rest = rest % t[row], rest // t[row]
        for slot in range(4):
            at[slot] += place[loop] * t[row + 1 + slot]
    for _ in range(begin, end):
        lane = chunk * BLOCK
        count = min(t[LANES] - lane, BLOCK)
        _read(t[TYPE], a, at[0] + lane * t[STEP], t[STEP], count, v)
        if grad:
            _read(t[TYPE + 1], b, at[1] + lane * t[STEP + 1], t[STEP + 1], count, dy)
            _activate_grad(t[CODE], parameter, count, v, dy)
            if alpha != 1:
                for i in range(count):
                    v[i] *= alpha
        else:
            if alpha != 1:
                for i in range(count):
                    v[i] *= alpha
            if b != 0:
                _read_add(t[TYPE + 1], b, at[1] + lane * t[STEP + 1], t[STEP + 1], count, v, beta)
            if c != 0:
                one = nb.cast(1, like)
                _read_add(t[TYPE + 2], c, at[2] + lane * t[STEP + 2], t[STEP + 2], count, v, one)
            _activate(t[CODE], parameter, count, v)
        _write(t[TYPE + 3], out, at[3] + lane * t[STEP + 3], t[STEP + 3], count, v)
        chunk += 1
        if chunk == t[CHUNKS]:
            chunk = 0
            for loop in range(t[OUTER] - 1, -1, -1):
                row = LOOPS + 5 * loop
                place[loop] += 1
                for slot in range(4):
                    at[slot] += t[row + 1 + slot]
                if place[loop] < t[row]:
                    break
                place[loop] = 0
                for slot in range(4):
                    at[slot] -= t[row] * t[row + 1 + slot]


@nb.kernel
def _run(parts, threads, a, b, c, out, table, numbers, grad, like):
    nb.launch(_part, parts, threads, (a, b, c, out, table, numbers, grad, like))


class Blocked(Engine):
    name = "pointwise.blocked"
    operations = ("pointwise_fwd", "pointwise_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        axes = len(merged(problem).sizes)
        r.require(axes <= 64, "at most 64 axes after merging", axes)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        loops = merged(problem)
        simple = ("identity", "relu", "clipped_relu", "leaky_relu", "hardswish", "hardsigmoid")
        arithmetic = 0.2e-9 if problem.epilogue.activation in simple else 0.8e-9
        blocks = loops.rows * -(-loops.sizes[-1] // BLOCK)
        seconds = problem.items[0][1].numel * arithmetic + blocks * 20e-9  # measured
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        e = problem.epilogue
        loops = merged(problem)
        slots = SLOTS[problem.op.name]
        tensors = problem.tensors
        activation = ACTIVATIONS[e.activation]
        lanes = loops.sizes[-1]
        chunks = -(-lanes // BLOCK)
        units = loops.rows * chunks
        strides = [loops.strides.get(slot, (0,) * len(loops.sizes)) for slot in slots]
        kinds = [TYPES[tensors[slot].dtype] if slot in tensors else -1 for slot in slots]
        outer = [n for i, size in enumerate(loops.sizes[:-1]) for n in (size, *(s[i] for s in strides))]
        head = (len(loops.sizes) - 1, units, chunks, lanes, *kinds, *(s[-1] for s in strides), code_of(problem))
        table = np.array([*head, *outer], dtype=np.int64)
        wide = any(t.dtype == "f64" for t in tensors.values())
        like = nb.token("f64" if wide else "f32")
        parameter = 1.0 if activation.parameter is None else e.parameter
        numbers = np.array([e.alpha, e.beta, parameter], dtype=like.dtype)
        address, numbers_address = table.ctypes.data, numbers.ctypes.data
        grad = problem.op.name == "pointwise_bwd"
        parts = max(1, min(units, problem.items[0][1].numel // GRAIN, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        _run(0, 1, 0, 0, 0, 0, address, numbers_address, grad, like)  # compiles, or loads from disk
        order = [tuple(tensors).index(slot) if slot in tensors else None for slot in slots]

        def run(tensors, workspace, _keep=(table, numbers)):
            a, b, c, out = [0 if i is None else tensors[i].data_ptr() for i in order]
            _run(parts, threads(), a, b, c, out, address, numbers_address, grad, like)

        return run
