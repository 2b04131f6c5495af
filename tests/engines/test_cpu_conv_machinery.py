"""What stands under the CPU kernels: the cache of machine code, threads, forks, 16-bit types, activations."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.engines import _numba as nb
from lucidnn.engines import _reference
from lucidnn.engines._numba import memory, pool
from lucidnn.ops.activation import ACTIVATIONS

PLAIN = ("conv.bias_grad", "conv_bgrad dy=f32[8,40,30,30]")  # little to compile
CONVOLUTION = ("conv.direct", "conv_fprop x=f32[3,16,40,40] w=f32[32,16,3,3] bias=f32[32] padding=1 act=relu")

# Run in a process of its own: prints the largest difference to float64 and how many kernels were compiled.
SCRIPT = """
import numba.core.event as event
count = []
class Count(event.Listener):
    def on_start(self, e): count.append(e)
    def on_end(self, e): pass
event.register("numba:compile", Count())
import torch
{before}
from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.testing import buffers, reference
problem, engine = Problem.parse("{line}"), registry.get("{engine}")
device = torch.device("cpu")
*inputs, out = buffers(problem, device).values()
(exact,) = reference(problem, dict(zip(problem.inputs, inputs)), device).values()
run = engine.build(problem, {{}})
space = torch.empty(engine.workspace_size(problem, {{}}), dtype=torch.uint8)
def call():
    run((*inputs, out.fill_(float("nan"))), space)
    return float((out - exact).abs().max())
worst = call()
{after}
print(worst, len(count))
"""


def separate_process(environment=None, before="", after="", what=PLAIN):
    script = SCRIPT.format(before=before, after=textwrap.dedent(after), engine=what[0], line=what[1])
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, check=False, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    error, compiled = result.stdout.split()[-2:]
    assert float(error) < 1e-3
    return int(compiled)


def test_second_process_compiles_nothing(tmp_path):
    where = {"LUCIDNN_CACHE_DIR": str(tmp_path)}
    assert separate_process(where, what=CONVOLUTION) > 0
    assert separate_process(where, what=CONVOLUTION) == 0


def test_damaged_cache_is_a_miss(tmp_path):
    where = {"LUCIDNN_CACHE_DIR": str(tmp_path)}
    separate_process(where)
    for number, path in enumerate(sorted((tmp_path / "numba").iterdir())):
        path.write_bytes(b"" if number % 2 else path.read_bytes()[: path.stat().st_size // 2])
    assert separate_process(where) > 0
    assert separate_process(where) == 0


def test_directory_that_cannot_be_made(tmp_path):
    """Then the temporary directory serves; where that cannot be used either, nothing is kept and nothing fails."""
    (tmp_path / "file").write_text("")
    blocked = {"LUCIDNN_CACHE_DIR": str(tmp_path / "file" / "cache")}
    other = blocked | {"TMPDIR": str(tmp_path)}
    separate_process(other)
    assert separate_process(other) == 0
    nowhere = "import tempfile; tempfile.tempdir = '/dev/null/nothing'"
    assert separate_process(blocked, before=nowhere) > 0


def test_edit_of_a_kernel_reaches_those_that_call_it(tmp_path):
    """The caller's machine code names the callee's: when that changes it is compiled anew, not linked to nothing."""
    (tmp_path / "caller.py").write_text(
        "import callee\nfrom lucidnn.engines import _numba as nb\n\n\n"
        "@nb.kernel\ndef twice(value):\n    return 2 * callee.change(value)\n"
    )
    where = os.environ | {"LUCIDNN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    for step in (1, 1, 5):
        (tmp_path / "callee.py").write_text(
            "from lucidnn.engines import _numba as nb\n\n\n"
            f"@nb.separate\ndef change(value):\n    return value + {step}\n"
        )
        command = [sys.executable, "-B", "-c", "import caller; print(caller.twice(10))"]
        result = subprocess.run(command, check=False, env=where, capture_output=True, text=True, timeout=600)
        assert result.stdout.strip() == str(2 * (10 + step)), result.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_child_computes():
    """After a parallel call in the parent: the child has no OpenMP threads and must not wait for them.

    The framework's own parallel loops do wait there, so the child looks at its result with numpy.
    """
    after = """
    import os, signal
    from lucidnn.engines import _numba
    assert _numba.threads() == torch.get_num_threads() == 2
    out.fill_(float("nan"))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        run((*inputs, out), space)
        same = abs(out.numpy() - exact.numpy()).max() < 1e-3
        os._exit(0 if same and _numba.threads() == 1 else 3)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    """
    separate_process(before="torch.set_num_threads(2)", after=after, what=CONVOLUTION)


def test_without_openmp_python_threads_run_the_parts():
    before = """
import sys, numba
torch.set_num_threads(3)
here, sys.platform = sys.platform, "elsewhere"
from lucidnn.engines._numba import pool
sys.platform = here
assert pool.pool_name() == "Python threads"
"""
    separate_process(before=before, after="worst = max([worst] + [call() for _ in range(20)])", what=CONVOLUTION)


@nb.kernel
def _note_part(part, parts, seen):
    nb.pointer(seen, 0)[part] += part + parts


@nb.kernel
def _note(parts, threads, seen):
    nb.launch(_note_part, parts, threads, (seen,))


@nb.kernel
def _slot_task(task, slot, busy, wrong):
    b, w = nb.pointer(busy, 0), nb.pointer(wrong, 0)
    if b[slot * 8] != 0:
        w[0] += 1
    b[slot * 8] = task + 1
    value = 0.0
    for i in range(20000):
        value += 1.0 / (i + task + 1)
    if b[slot * 8] != task + 1 or value < 0:
        w[0] += 1
    b[slot * 8] = 0


@nb.kernel
def _slots(tasks, threads, busy, wrong):
    nb.launch_tasks(_slot_task, tasks, threads, (busy, wrong))


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 17, 1000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_part_runs_once(parts, threads):
    seen = torch.zeros(parts + 1, dtype=torch.int64)
    _note(parts, threads, seen.data_ptr())
    assert seen[:parts].tolist() == [part + parts for part in range(parts)]
    assert seen[parts] == 0


def test_no_two_tasks_share_a_slot():
    busy, wrong = torch.zeros(4 * 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    _slots(200, 4, busy.data_ptr(), wrong.data_ptr())
    assert wrong.item() == 0


def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert nb.threads() == count
    finally:
        torch.set_num_threads(before)


def test_worthwhile():
    assert pool.worthwhile(1, 8) == 1
    assert pool.worthwhile(3 * pool.GRAIN, 8) == 3
    assert pool.worthwhile(1e12, 8) == 8


@pytest.mark.parametrize(
    "name, line",
    [
        ("conv.direct", "conv_fprop x=f32[4,16,24,24] w=f32[48,16,3,3] padding=1"),
        ("conv.direct", "conv_dgrad dy=f32[4,48,24,24] w=f32[48,16,3,3] padding=1"),
        ("conv.direct_wgrad", "conv_wgrad x=f32[4,16,24,24] dy=f32[4,48,24,24] padding=1"),
        ("conv.im2col_gemm", "conv_fprop x=f32[4,16,24,24] w=f32[48,16,3,3] padding=1"),
        ("conv.bias_grad", "conv_bgrad dy=f32[16,48,24,24]"),
    ],
)
def test_called_from_several_python_threads(name, line):
    """One built function, many callers, each with tensors and workspace of its own: all get the same bits."""
    problem, engine = Problem.parse(line), registry.get(name)
    run = engine.build(problem, {})
    inputs = [torch.randn(problem[role].shape) for role in problem.inputs]

    def call(_):
        out = torch.full(problem[problem.outputs[0]].shape, float("nan"))
        run((*inputs, out), torch.empty(engine.workspace_size(problem, {}), dtype=torch.uint8))
        return out

    first = call(0)
    with concurrent.futures.ThreadPoolExecutor(6) as workers:
        for out in workers.map(call, range(60)):
            assert torch.equal(out, first)


@nb.kernel
def _convert(source, target, count, like, out):
    p, q = nb.pointer(source, like), nb.pointer(target, out)
    for i in range(count):
        nb.store(q, i, nb.load(p, i))


@nb.kernel
def _convert_by_bits(halves, widened, floats, narrowed, counts, half, single):
    p, q = nb.pointer(halves, half), nb.pointer(widened, single)
    for i in range(counts[0]):
        q[i] = memory._half_to_float_by_bits(p[i])
    r, s = nb.pointer(floats, single), nb.pointer(narrowed, half)
    for i in range(counts[1]):
        s[i] = memory._float_to_half_by_bits(r[i])


@pytest.mark.parametrize("way", ["f16", "bf16", "f16 by bits"])
def test_sixteen_bit_conversions(way):
    """All 65,536 values widened, and floats near every rounding boundary narrowed, as torch does it."""
    half, _, by_bits = way.partition(" ")
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}[half]
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(kind)
    floats = torch.cat(
        [every.float() * factor for factor in (1.0, 1 + 2**-11, 1 - 2**-11, 1 + 2**-9, 1 + 2**-12)]
        + [torch.tensor([65519.996, 65520.0, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001, 3e38, -0.0])]
    )
    wide, narrow = torch.empty(65536), torch.empty(floats.shape, dtype=kind)
    places = [t.data_ptr() for t in (every, wide, floats, narrow)]
    if by_bits:
        _convert_by_bits(*places, (65536, floats.numel()), nb.token(half), nb.token("f32"))
    else:
        _convert(*places[:2], 65536, nb.token(half), nb.token("f32"))
        _convert(*places[2:], floats.numel(), nb.token("f32"), nb.token(half))
    _same(wide, every.float())
    _same(narrow, floats.to(kind))


def _same(found, expected):
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan], expected[~nan])
    assert torch.equal(torch.signbit(found)[~nan], torch.signbit(expected)[~nan])


@nb.kernel
def _apply(code, parameter, x, dy, y, dx, count, like):
    p, g, q, r = nb.pointer(x, like), nb.pointer(dy, like), nb.pointer(y, like), nb.pointer(dx, like)
    for i in range(count):
        q[i] = nb.activate(code, parameter, p[i])
        r[i] = nb.activate_grad(code, parameter, p[i], g[i])


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes(name, dtype):
    kind = {"f32": torch.float32, "f64": torch.float64}[dtype]
    row = ACTIVATIONS[name]
    parameter = 0.0 if row.parameter is None else row.parameter
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.randn(500), torch.tensor([1e4, -1e4, 1e30])]).to(kind)
    dy = torch.randn(x.shape, dtype=kind)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    _apply(row.code, parameter, x.data_ptr(), dy.data_ptr(), y.data_ptr(), dx.data_ptr(), x.numel(), nb.token(dtype))
    value = _reference.activate(name, parameter, x.double())
    slope = _reference.activate_grad(name, parameter, x.double(), dy.double())
    unit = torch.finfo(kind).eps
    for found, expected in ((y, value), (dx, slope)):
        finite = expected.isfinite()
        error = (found.double() - expected)[finite].abs() / (1 + expected[finite].abs() + dy.double()[finite].abs())
        assert error.max() < 16 * unit
    lone = torch.tensor([float("nan")], dtype=kind)
    _apply(row.code, parameter, lone.data_ptr(), dy.data_ptr(), y.data_ptr(), dx.data_ptr(), 1, nb.token(dtype))
    assert y[0].isnan()
