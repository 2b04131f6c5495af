"""One protocol for every time that lucidnn reports or decides by.

Candidates are timed in one run, interleaved: each round gives every candidate one sample, in an order that turns from
round to round, so that a clock or a neighbour that drifts hits all alike. A sample is a batch of calls long enough for
the clock. Buffers rotate through sets that together exceed the cache, so that nobody is measured on warm inputs. The
answer is the median of the samples; the spread is the distance between their quartiles over the median.

On a GPU a batch is timed by events around it; with ``graph=True`` it is captured once and replayed, which takes the
host's share out. On a CPU the clock is monotonic.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[int], object]
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # what rotation has to exceed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one candidate, in seconds a call.

    Examples
    --------
    >>> t = Timing.of([3.0, 1.0, 2.0, 2.0, 2.0])
    >>> t.median, t.spread
    (2.0, 0.0)
    """

    median: float
    spread: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        low, median, high = (
            statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        )
        return cls(median, (high - low) / median if median else 0.0, tuple(samples))


def rotation(nbytes: int, device: Any, most: int = 64) -> int:
    """How many buffer sets of `nbytes` it takes to pass the cache twice over."""
    return max(
        1, min(most, 2 * CACHE_BYTES.get(getattr(device, "type", device), 64 << 20) // max(nbytes, 1) + 1)
    )


def _timer(device: Any, call: Call, sets: int, graph: bool) -> Callable[[int], float]:
    """A function that runs the call n times, rotating, and gives the seconds that took."""
    if device.type == "cpu":

        def timed(n: int) -> float:
            start = time.perf_counter()
            for i in range(n):
                call(i % sets)
            return time.perf_counter() - start

        return timed
    import torch

    replay: Call = call
    if graph:
        torch.cuda.synchronize(device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for i in range(sets):
                call(i)

        def replay(_: int) -> object:
            return captured.replay()

    per_run = sets if graph else 1
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed_gpu(n: int) -> float:
        runs = -(-n // per_run)
        begin.record()
        for i in range(runs):
            replay(i % sets)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 * n / (runs * per_run)

    return timed_gpu


def measure(
    candidates: Mapping[str, Call],
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
        Each is called with the number of the buffer set to use, below `sets` (see `rotation`).
    device : torch.device
        Where they run.
    rounds : int
        Samples of each candidate, each about `sample_seconds` long.
    graph : bool
        On a GPU, time replays of a captured graph instead of eager calls.
    most_seconds : float
        Rounds stop early (but not before the third) once a candidate has taken this long.

    Returns
    -------
    dict of str to Timing
        In the order given.
    """
    timers, batch = {}, {}
    for name, call in candidates.items():
        for i in range(min(sets, 2)):  # first calls compile and fill caches
            call(i)
        timers[name] = _timer(device, call, sets, graph)
        once = max(min(timers[name](1) for _ in range(2)), 1e-7)
        trial = max(
            1, min(int(sample_seconds / once / 4), 1000)
        )  # one call alone is mostly the clock's overhead
        batch[name] = max(1, min(int(sample_seconds / max(timers[name](trial) / trial, 1e-7)), 100_000))
    names, samples = list(candidates), {name: [] for name in candidates}
    spent = dict.fromkeys(names, 0.0)
    for r in range(rounds):
        turn = r % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            if r < 3 or spent[name] <= most_seconds:
                seconds = timers[name](batch[name])
                spent[name] += seconds
                samples[name].append(seconds / batch[name])
    return {name: Timing.of(values) for name, values in samples.items()}
