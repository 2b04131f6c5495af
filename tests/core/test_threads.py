"""Many threads and forked children: every call gets the right answer, and each plan is built once."""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback

import pytest
import torch

from fakes import LINE, Fake
from lucidnn import functional as F
from lucidnn.core import plan as planning
from lucidnn.core import registry
from lucidnn.core.plan import select
from lucidnn.core.problem import Problem
from lucidnn.core.settings import using
from lucidnn.functional import _library


def in_threads(count: int, work) -> None:
    """Run ``work(i)`` in `count` threads that start together; raise what any of them raised."""
    gate, errors = threading.Barrier(count), []

    def body(i: int) -> None:
        try:
            gate.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_one_problem_is_built_once(engines):
    import time

    class Slow(Fake):
        def build(self, problem, config):
            time.sleep(0.05)
            return super().build(problem, config)

    slow = Slow("toy.slow")
    engines(slow)
    plans = []
    in_threads(16, lambda i: plans.append(select(Problem.parse(LINE))))
    assert len(slow.built) == 1 and len(set(map(id, plans))) == 1


def test_the_registry_is_read_once(monkeypatch):
    monkeypatch.setattr(registry, "_engines", None)
    found = []
    in_threads(8, lambda i: found.append(registry.engines()))
    assert len(set(map(id, found))) == 1 and "conv.reference" in found[0]


def test_the_same_and_different_problems_at_once():
    """Eight threads train on one and the same layer, then each on shapes of its own, forward and backward."""
    planning.forget()
    _library._plans.clear()
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8, 8), (1, 3, 9, 7), (3, 3, 5, 12), (2, 3, 16, 16)]
    weight = torch.randn(4, 3, 3, 3, generator=generator)
    inputs = [torch.randn(s, generator=generator) for s in shapes]

    def both(x):
        w = weight.clone().requires_grad_()
        y = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
        y.sum().backward()
        return y.detach(), w.grad

    expected = [both(x) for x in inputs]
    planning.forget()
    _library._plans.clear()

    def work(i: int) -> None:
        order = random.Random(i)
        for n in [0, 0, 0, *order.choices(range(len(inputs)), k=12)]:
            y, dw = both(inputs[n])
            torch.testing.assert_close(y, expected[n][0], rtol=0, atol=0)
            torch.testing.assert_close(dw, expected[n][1], rtol=0, atol=0)

    in_threads(8, work)


def test_each_thread_has_its_own_settings(engines):
    engines(Fake("toy.a", 1.0), Fake("toy.b", 2.0))
    names = {}

    def work(i: int) -> None:
        with using(engine=("toy.a", "toy.b")[i % 2]):
            for _ in range(50):
                names.setdefault(i, set()).add(select(Problem.parse(LINE)).engine.name)

    in_threads(6, work)
    assert names == {i: {("toy.a", "toy.b")[i % 2]} for i in range(6)}


def test_one_plan_runs_in_many_threads():
    """Each engine that takes it: a plan keeps nothing between calls that two of them could share."""
    problem = Problem.parse("conv_fprop x=f32[2,8,12,12] w=f32[8,8,3,3] padding=1 act=relu")
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 8, 12, 12, generator=generator) for _ in range(4)]
    w = torch.randn(8, 8, 3, 3, generator=generator)
    for candidate in planning.candidates(problem):
        if candidate.refusals:
            continue
        with using(engine=candidate.engine.name):
            plan = select(problem)
        expected = [plan(x, w) for x in inputs]

        def work(i, plan=plan, expected=expected):
            for n in range(25):
                k = (i + n) % len(inputs)
                assert torch.equal(plan(inputs[k], w), expected[k]), plan.engine.name

        in_threads(4, work)


def forked(work) -> None:
    """Run `work` in a forked child; one that hangs is ended."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(40)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_too():
    """As data loaders' workers do: plans built before the fork run, and new ones are built.

    On one thread, as there: the framework's own parallel loops do not survive a fork.
    """
    x, w = torch.randn(2, 4, 10, 10), torch.randn(8, 4, 3, 3)
    expected = F.conv2d(x, w)
    other = torch.nn.functional.conv2d(x[:, :, 1:], w, padding=1)

    def child() -> None:
        torch.set_num_threads(1)
        torch.testing.assert_close(F.conv2d(x, w), expected)
        y = F.conv2d(x[:, :, 1:], w, padding=1)
        torch.testing.assert_close(y, other, rtol=1e-4, atol=1e-4)
        assert F.max_pool2d(F.relu(expected), 2).shape == (2, 8, 4, 4)

    forked(child)
    torch.testing.assert_close(F.conv2d(x, w), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_builds(engines):
    """The lock that the other thread holds must not be held for ever in the child."""
    started, go_on = threading.Event(), threading.Event()

    class Waiting(Fake):
        def build(self, problem, config):
            if threading.current_thread().name == "builder":
                started.set()
                go_on.wait(60)
            return super().build(problem, config)

    engines(Waiting("toy.waiting"))
    builder = threading.Thread(target=lambda: select(Problem.parse(LINE)), name="builder")
    builder.start()
    started.wait(60)

    def child() -> None:
        select(Problem.parse(LINE.replace("[4", "[5")))

    try:
        forked(child)
    finally:
        go_on.set()
        builder.join(60)
