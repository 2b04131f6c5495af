"""The switch itself: on, off, nested, in threads and processes; the dispatcher's table comes back as it was."""

from __future__ import annotations

import concurrent.futures
import copy
import pathlib
import pickle
import re
import subprocess
import sys
import time

import pytest
import torch

import lucidnn.torch
from lucidnn import NotSupported, using
from lucidnn.core.errors import InvalidArgument
from lucidnn.torch._override import OVERRIDES, REASONS_KEPT


@pytest.fixture(autouse=True)
def _off_again():
    lucidnn.torch.disable()
    lucidnn.torch.reset_calls()
    yield
    lucidnn.torch.disable()


def _convolve(x=None):
    return torch.conv2d(torch.ones(1, 1, 3, 3) if x is None else x, torch.ones(1, 1, 2, 2))


def _taken(name="convolution"):
    return lucidnn.torch.calls().get(name, {"taken": 0})["taken"]


def _tables():
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in OVERRIDES}


def test_disabling_restores_every_operator():
    x, before = torch.randn(2, 3, 8, 8), _tables()
    native = torch.conv2d(x, torch.ones(4, 3, 3, 3))
    lucidnn.torch.enable()
    changed = _tables()
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    here = [name for name, one in OVERRIDES.items() if "CPU" in one.devices and computed(f"aten::{name}", "CPU")]
    assert {name for name in OVERRIDES if changed[name] != before[name]} >= set(here) >= {"convolution", "relu"}
    lucidnn.torch.disable()
    assert _tables() == before and lucidnn.torch.enabled() == []
    assert torch.equal(torch.conv2d(x, torch.ones(4, 3, 3, 3)), native)


def test_enabling_is_quick():
    best = min(_seconds_to_enable() for _ in range(5))
    assert best < 0.05


def _seconds_to_enable():
    start = time.perf_counter()
    lucidnn.torch.enable()
    seconds = time.perf_counter() - start
    lucidnn.torch.disable()
    return seconds


def test_global_block_and_decorator():
    _convolve()
    assert _taken() == 0
    with lucidnn.torch.enable():
        _convolve()
        assert _taken() == 1
    _convolve()
    assert _taken() == 1

    @lucidnn.torch.enable()
    def step():
        """Its own words."""
        return _convolve()

    _convolve()
    assert _taken() == 1 and step.__doc__ == "Its own words."
    step(), step()
    assert _taken() == 3 and lucidnn.torch.enabled() == []


def test_an_inner_block_leaves_the_outer_one_on():
    with lucidnn.torch.enable("convolution"):
        with lucidnn.torch.enable():
            assert set(lucidnn.torch.enabled()) == set(OVERRIDES)
        assert lucidnn.torch.enabled() == ["convolution"]
    assert lucidnn.torch.enabled() == []


def test_a_block_ends_with_its_error():
    with pytest.raises(KeyError), lucidnn.torch.enable():
        raise KeyError
    assert lucidnn.torch.enabled() == []


def test_unknown_names_are_an_error_that_lists_the_known():
    with pytest.raises(InvalidArgument, match="convoluton.*convolution_backward"):
        lucidnn.torch.enable("convoluton")


def test_what_is_refused_runs_natively_with_its_reason():
    whole = torch.ones(1, 1, 3, 3, dtype=torch.int32)
    with lucidnn.torch.enable():
        assert torch.conv2d(whole, whole).item() == 9
    fallen = lucidnn.torch.calls()["convolution"]["fallen"]
    assert list(fallen.values()) == [1] and "floating-point" in next(iter(fallen))
    assert "1 x" in lucidnn.torch.report()


def test_a_fall_through_is_an_error_where_asked_for():
    whole = torch.ones(1, 1, 3, 3, dtype=torch.int32)
    with using(no_fallback=True), lucidnn.torch.enable(), pytest.raises((NotSupported, InvalidArgument)):
        torch.conv2d(whole, whole)


def test_the_number_of_reasons_is_bounded():
    with lucidnn.torch.enable():
        for n in range(2 * REASONS_KEPT):
            _convolve_whole_numbers(n)
    fallen = lucidnn.torch.calls()["convolution"]["fallen"]
    assert sum(fallen.values()) == 2 * REASONS_KEPT and len(fallen) <= REASONS_KEPT + 1


def _convolve_whole_numbers(n):
    return torch.conv2d(torch.ones(1, 1, 3, 3 + n, dtype=torch.int32), torch.ones(1, 1, 2, 2, dtype=torch.int32))


def test_a_refusal_is_remembered_as_a_plan_is(monkeypatch):
    from lucidnn.core import problem

    made, create = [], problem.Problem.create
    monkeypatch.setattr(problem.Problem, "create", classmethod(lambda cls, *args: made.append(args) or create(*args)))
    whole = torch.ones(1, 1, 5, 3, dtype=torch.int32)
    with lucidnn.torch.enable():
        for _ in range(3):
            torch.conv2d(whole, whole)
    assert sum(lucidnn.torch.calls()["convolution"]["fallen"].values()) == 3 and len(made) == 1


def test_a_weight_changed_before_the_backward_raises_as_natively():
    said = []
    for on in (False, True):
        x, w = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randn(2, 2, 2, 2, requires_grad=True)
        if on:
            lucidnn.torch.enable()
        y = torch.conv2d(x, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError) as error:
            y.sum().backward()
        said.append(str(error.value))
    assert said[0] == said[1] and "modified by an inplace operation" in said[0] and _taken() == 1


def test_inference_mode_autocast_and_transforms():
    x, w = torch.randn(5, 2, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def over_two(x):
        return torch.vmap(lambda one: torch.conv2d(one, w))(x)

    slope = torch.func.grad(lambda w: torch.conv2d(x[0], w).square().sum())

    native = over_two(x)
    with lucidnn.torch.enable():
        with torch.inference_mode():
            assert torch.conv2d(x[0], w).is_inference()
        with torch.autocast("cpu"):
            assert torch.conv2d(x[0], w).dtype == torch.bfloat16
        torch.testing.assert_close(over_two(x), native)
        gradient = slope(w)
    torch.testing.assert_close(gradient, slope(w), rtol=1e-4, atol=1e-3)
    assert _taken() >= 4


def test_hooks_checkpoints_copies_and_pickles():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    net, seen = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(3, 3, 3)), []
    net.register_forward_hook(lambda *args: seen.append("forward"))
    net.register_full_backward_hook(lambda *args: seen.append("backward"))

    def gradient(net):
        x = torch.ones(1, 2, 7, 7, requires_grad=True)
        checkpoint(net, x, use_reentrant=False).square().sum().backward()
        return x.grad

    native, natively_seen = gradient(net), seen.copy()
    seen.clear()
    with lucidnn.torch.enable():
        for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(copy.deepcopy(net[:])))):
            torch.testing.assert_close(gradient(twin), native, rtol=1e-4, atol=1e-4)
    assert seen[: len(natively_seen)] == natively_seen and _taken() >= 6 and _taken("convolution_backward") >= 6


def test_threads_share_it():
    x = torch.randn(4, 3, 8, 8)
    w = torch.randn(8, 3, 3, 3)
    native = torch.conv2d(x, w)
    with lucidnn.torch.enable(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: torch.conv2d(x, w), range(40)):
            torch.testing.assert_close(found, native, rtol=1e-4, atol=1e-4)
    assert _taken() == 40


CHILD = """
import os, torch, lucidnn.torch
lucidnn.torch.enable()
x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
assert torch.conv2d(x, w)[0, 0, 0, 0] == 9
pid = os.fork()
if pid == 0:
    good = torch.conv2d(x, w)[0, 0, 0, 0] == 9 and lucidnn.torch.calls()["convolution"]["taken"] == 2
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("fine")
"""


def test_a_forked_child_goes_on():
    told = subprocess.run([sys.executable, "-c", CHILD], check=False, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == "fine", told.stderr


def test_the_documentation_names_every_operator():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
    table = text.partition("<!-- operators -->")[2].partition("<!-- end -->")[0]
    named = set(re.findall(r"`([\w.]+)`", table))
    for name in OVERRIDES:
        base = re.sub(r"(_backward_data|_backward|_|\.no_stats)$", "", name)
        assert name in named or base in named, f"docs/pytorch.md does not name {name}"
    known = {re.sub(r"(_backward_data|_backward)$", "", name) for name in OVERRIDES} | set(OVERRIDES)
    assert named - {"aten", "_backward", "_backward_data", ".no_stats"} <= known
