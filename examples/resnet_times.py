"""ResNet-18 on a CPU: inference and a training step natively, under `enable`, and fused; interleaved, same threads.

python -m examples.resnet_times --batch 8 --seconds 60
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as T

import lucidnn.torch
from examples.models import resnet18


def cases(batch: int, size: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name: first what is done, then by whom."""
    torch.manual_seed(0)
    x, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))

    def infer(model: torch.nn.Module) -> object:
        with torch.no_grad():
            return model(x)

    def train(model: torch.nn.Module) -> object:
        model.zero_grad()
        return T.cross_entropy(model(x), labels).backward()

    found: dict[str, Callable[[], object]] = {}
    for name, call, model in (("inference", infer, resnet18().eval()), ("training", train, resnet18())):
        fused = lucidnn.torch.fuse(model)
        found[f"{name} native"] = lambda call=call, model=model: call(model)
        found[f"{name} enable"] = lambda call=call, model=model: _on(call, model)
        found[f"{name} fuse"] = lambda call=call, fused=fused: call(fused)
        found[f"{name} fuse+enable"] = lambda call=call, fused=fused: _on(call, fused)
    return found


def _on(call: Callable[[torch.nn.Module], object], model: torch.nn.Module) -> object:
    with lucidnn.torch.enable():
        return call(model)


def main() -> None:
    """Time all of them in turns and print medians beside the native one, then where the time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    calls = cases(given.batch, given.size)
    for call in calls.values():  # compiles
        call()
    lucidnn.torch.reset_calls()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    for name, spent in times.items():
        middle, native = (statistics.median(s) for s in (spent, times[f"{name.split()[0]} native"]))
        print(f"{name:22} {middle * 1e3:8.1f} ms  {native / middle:5.2f}x  of {len(spent)} runs")
    print(lucidnn.torch.report())


if __name__ == "__main__":
    main()
