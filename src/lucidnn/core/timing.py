"""One protocol for every time that lucidnn reports or decides by.

Candidates are timed in one run, interleaved: each round samples every one, in an order that turns, so that a clock or a
neighbour that drifts hits all alike. A sample is a batch of calls long enough for the clock (events on a GPU). Buffers
rotate through sets that exceed the cache: nobody is measured on warm inputs. The answer is the median of the samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any, TypeVar

Call = Callable[[int], object]
Name = TypeVar("Name")
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # what rotation has to exceed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a call of one candidate; the spread is the distance between the quartiles over the median.

    >>> Timing.of([3.0, 1.0, 2.0, 2.0, 2.0])
    Timing(median=2.0, spread=0.0, samples=(3.0, 1.0, 2.0, 2.0, 2.0))
    """

    median: float
    spread: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Median and spread of samples."""
        low, median, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median, (high - low) / median if median else 0.0, tuple(samples))


def rotation(nbytes: int, device: Any, most: int = 64) -> int:
    """How many buffer sets of `nbytes` it takes to pass the cache twice over."""
    cache = CACHE_BYTES.get(getattr(device, "type", device), 64 << 20)
    return max(1, min(most, 2 * cache // max(nbytes, 1) + 1))


def measure(
    candidates: Mapping[Name, Call],
    device: Any,
    *,
    sets: int = 1,
    rounds: int = 9,
    sample_seconds: float = 0.01,
    graph: bool = False,
    most_seconds: float = 2.0,
) -> dict[Name, Timing]:
    """Time calls against one another; each is called with the number of the buffer set to use (see `rotation`).

    Each is sampled once a round, for about `sample_seconds`; rounds stop early (but not before the third) for one that
    has taken `most_seconds`. With `graph` a GPU replays a captured graph of the calls: without the host's share.
    """
    timers, batch = {}, {}
    for name, call in candidates.items():
        for i in range(min(sets, 2)):  # first calls compile and fill caches
            call(i)
        timer = timers[name] = _timer(device, call, sets, graph)
        once = max(min(timer(1), timer(1)), 1e-7)  # mostly the clock's overhead: a trial batch tells more
        trial = max(timer(max(1, min(int(sample_seconds / once / 4), 1000))), 1e-7)
        batch[name] = max(1, min(int(sample_seconds / trial), 100_000))
    names, samples = list(candidates), {name: [] for name in candidates}
    spent = dict.fromkeys(names, 0.0)
    for r in range(rounds):
        turn = r % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            if r < 3 or spent[name] <= most_seconds:
                samples[name].append(timers[name](batch[name]))
                spent[name] += samples[name][-1] * batch[name]
    return {name: Timing.of(values) for name, values in samples.items()}


def _timer(device: Any, call: Call, sets: int, graph: bool) -> Callable[[int], float]:
    """A function that runs the call n times (or a little more), rotating, and gives the seconds a call."""
    launch, each = call, 1  # what is started, and the calls that it makes
    if device.type == "cpu":
        mark, elapsed = time.perf_counter, lambda start: time.perf_counter() - start
    else:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        mark = begin.record

        def elapsed(start: Any) -> float:
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3

        if graph:
            torch.cuda.synchronize(device)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                for i in range(sets):
                    call(i)
            launch, each = lambda _: captured.replay(), sets

    def timed(n: int) -> float:
        launches = -(-n // each)
        start = mark()
        for i in range(launches):
            launch(i % sets)
        return elapsed(start) / (launches * each)

    return timed
