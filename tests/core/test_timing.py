"""The timing protocol on a clock that the test turns: medians, spreads, interleaving, batches, rotation, early end."""

from __future__ import annotations

import pytest
import torch

from lucidnn.core import timing
from lucidnn.core.timing import Timing, measure, rotation

CPU = torch.device("cpu")


class Clock:
    """Stands for ``time.perf_counter``; calls move it."""

    def __init__(self):
        self.now = 0.0
        self.order: list[str] = []
        self.sets: list[int] = []

    def call(self, name: str, seconds):
        def run(i: int) -> None:
            self.now += seconds() if callable(seconds) else seconds
            self.order.append(name)
            self.sets.append(i)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    "samples, median, spread",
    [
        ([2.0], 2.0, 0.0),
        ([1.0, 3.0], 2.0, 0.5),
        ([1.0, 2.0, 3.0], 2.0, 0.5),
        ([5.0, 5.0, 5.0, 5.0, 500.0], 5.0, 0.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2 / 3),
        ([0.0, 0.0], 0.0, 0.0),
    ],
)
def test_median_and_spread(samples, median, spread):
    for order in (samples, samples[::-1]):
        t = Timing.of(order)
        assert t.median == median and t.spread == pytest.approx(spread) and t.samples == tuple(order)


def test_what_is_measured_is_what_was_spent(clock):
    times = measure({"a": clock.call("a", 1e-3), "b": clock.call("b", 5e-3)}, CPU)
    assert list(times) == ["a", "b"]
    assert times["a"].median == pytest.approx(1e-3) and times["b"].median == pytest.approx(5e-3)
    assert times["a"].spread == pytest.approx(0.0, abs=1e-9) and len(times["a"].samples) == 9


def test_rounds_are_interleaved_and_turn(clock):
    """In every round each has one sample; who is first changes."""
    names = ["a", "b", "c"]
    measure({n: clock.call(n, 0.02) for n in names}, CPU, rounds=6)
    tail = clock.order[-18:]  # a call is longer than a sample, so a batch is one call
    rounds = [tail[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(r) == names for r in rounds)
    assert [r[0] for r in rounds] == names * 2


def test_a_drifting_clock_hits_all_alike(clock):
    """The machine slows to half its speed during the run: the ratio of two candidates does not see it."""
    drift = lambda base: lambda: base * (1 + min(clock.now, 4.0) / 4.0)  # noqa: E731
    times = measure({"a": clock.call("a", drift(0.02)), "b": clock.call("b", drift(0.03))}, CPU, rounds=40)
    assert times["b"].median / times["a"].median == pytest.approx(1.5, rel=0.05)


def test_short_calls_are_batched(clock):
    measure({"a": clock.call("a", 1e-5)}, CPU, rounds=4, sample_seconds=0.01)
    assert 4 * 900 <= len(clock.order) <= 4 * 1100 + 400
    clock.order.clear()
    measure({"a": clock.call("a", 0.0)}, CPU, rounds=1)  # a clock that stands still is no division by zero
    assert len(clock.order) <= 110_000


def test_buffers_rotate(clock):
    measure({"a": clock.call("a", 1e-4)}, CPU, sets=3, rounds=2)
    batch = clock.sets[-90:]
    assert batch == [0, 1, 2] * 30 or sorted(set(batch)) == [0, 1, 2]
    assert max(clock.sets) == 2


def test_a_slow_candidate_ends_early_but_not_before_the_third_round(clock):
    times = measure(
        {"slow": clock.call("slow", 1.5), "fast": clock.call("fast", 1e-3)}, CPU, rounds=9, most_seconds=2.0
    )
    assert len(times["slow"].samples) == 3 and len(times["fast"].samples) == 9


def test_no_candidates():
    assert measure({}, CPU) == {}


def test_an_error_of_a_candidate_is_its_callers():
    with pytest.raises(ZeroDivisionError):
        measure({"a": lambda i: 1 // 0}, CPU)


def test_rotation_passes_the_cache_twice():
    for device in (CPU, "cpu"):
        assert rotation(timing.CACHE_BYTES["cpu"], device) == 3
    assert rotation(1, CPU) == 64 and rotation(1, CPU, most=16) == 16 and rotation(10**12, CPU) == 1
    assert rotation(0, CPU) == 64
    assert rotation(timing.CACHE_BYTES["cuda"] // 2, torch.device("cuda")) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu(graph):
    """Two products of which one is eight times the work."""
    device = torch.device("cuda")
    small, large = (torch.randn(n, n, device=device) for n in (2048, 4096))
    calls = {"small": lambda i: small @ small, "large": lambda i: large @ large}
    times = measure(calls, device, rounds=7, graph=graph)
    assert 3 < times["large"].median / times["small"].median < 20  # others may use the device at the same time
    assert 1e-6 < times["small"].median < 1e-1
