"""One protocol for every time that lucidnn reports or decides by.

Candidates are timed in one run, interleaved: each round gives every candidate one sample, in an order that turns from
round to round, so that a clock or a neighbour that drifts hits all alike. A sample is a batch of calls long enough for
the clock. Buffers rotate through sets that together exceed the cache, so that nobody is measured on warm inputs. The
answer is the median of the samples; the spread is half the distance between the quartiles over the median.

On a GPU a batch is timed by events around it; with ``graph=True`` it is captured once and replayed, which takes the
host's share out. On a CPU the clock is monotonic.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

CACHE_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # what rotation has to exceed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one candidate, in seconds a call.

    Examples
    --------
    >>> t = Timing.of([3.0, 1.0, 2.0, 2.0])
    >>> t.median, t.spread
    (2.0, 0.125)
    """

    median: float
    spread: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        ordered = sorted(samples)
        median = statistics.median(ordered)
        quarter = max(len(ordered) // 4, 1 if len(ordered) > 2 else 0)
        inner = ordered[quarter : len(ordered) - quarter] or ordered
        return cls(median, (inner[-1] - inner[0] + (ordered[-quarter - 1] - ordered[quarter])) / 4 / median if median else 0.0, tuple(samples))


def rotation(nbytes: int, device: Any, most: int = 64) -> int:
    """How many buffer sets of `nbytes` it takes to pass the cache twice over."""
    kind = getattr(device, "type", str(device).partition(":")[0])
    return max(1, min(most, 2 * CACHE_BYTES.get(kind, 64 << 20) // max(nbytes, 1) + 1))


def _batch_timer(device: Any, call: Callable[[int], object], sets: int, graph: bool) -> Callable[[int], float]:
    """A function that runs the call n times and gives the seconds that took."""
    if device.type == "cpu":

        def timed(n: int) -> float:
            start = time.perf_counter()
            for i in range(n):
                call(i % sets)
            return time.perf_counter() - start

        return timed
    import torch

    runs: Callable[[int], object] = call
    per_run = 1
    if graph:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.current_stream(device).wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for i in range(sets):
                call(i)
        per_run = sets

        def runs(_: int) -> object:
            return captured.replay()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed_gpu(n: int) -> float:
        times = -(-n // per_run)
        begin.record()
        for i in range(times):
            runs(i % sets)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 * n / (times * per_run)

    return timed_gpu


def measure(
    candidates: Mapping[str, Callable[[int], object]],
    device: Any,
    *,
    sets: int = 1,
    rounds: int = 9,
    sample_seconds: float = 0.01,
    graph: bool = False,
    most_seconds: float = 2.0,
) -> dict[str, Timing]:
    """Time calls against one another.

    Parameters
    ----------
    candidates : mapping of str to callable
        Each is called with the number of the buffer set to use, below `sets`.
    device : torch.device
        Where they run.
    sets : int
        Buffer sets to rotate through, see `rotation`.
    rounds : int
        Samples of each candidate.
    sample_seconds : float
        Length a sample should have.
    graph : bool
        On a GPU, time replays of a captured graph instead of eager calls.
    most_seconds : float
        Rounds stop early (but not before the third) once a candidate has taken this long.

    Returns
    -------
    dict of str to Timing
        In the order given.
    """
    timers, batch, samples = {}, {}, {name: [] for name in candidates}
    for name, call in candidates.items():
        for i in range(min(sets, 2)):  # first calls compile and fill caches
            call(i)
        timers[name] = _batch_timer(device, call, sets, graph)
        once = max(min(timers[name](1) for _ in range(2)), 1e-7)
        # a second estimate from a batch: the first is mostly overhead for microsecond calls
        trial = max(1, min(int(sample_seconds / once / 4), 1000))
        once = max(timers[name](trial) / trial, 1e-7)
        batch[name] = max(1, min(int(sample_seconds / once), 100_000))
    names = list(candidates)
    spent = dict.fromkeys(names, 0.0)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            if r >= 3 and spent[name] > most_seconds:
                continue
            seconds = timers[name](batch[name])
            spent[name] += seconds
            samples[name].append(seconds / batch[name])
    return {name: Timing.of(values) for name, values in samples.items()}
