"""A whole training step of the small network at batch 64: lucidnn and the framework interleaved, and held together.

On a CPU in float32; on a GPU in float32 and in bfloat16, eager and as replays of a captured graph. In the same run,
gradients of the first step are compared with the framework's own in float64: lucidnn's error may not be more than
twice the framework's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.compile import compile_ahead
from benchmarks.context import Context
from lucidnn import functional
from lucidnn.cli.data import load
from lucidnn.cli.layers import steps
from lucidnn.cli.training import Images, Recipe, Trainer
from lucidnn.core import plan, settings
from lucidnn.testing import relative_error

FLOOR = 1e-5  # a relative error that nobody need justify


def results(context: Context) -> Iterator[dict[str, Any]]:
    kinds = ("f32", "bf16") if context.device.type == "cuda" else ("f32",)
    data = load()
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        for dtype in kinds:
            for policy in context.policies:
                with settings.using(policy=policy):
                    yield from _rows(
                        Recipe(context.device, dtype, batch_size=context.batch_size), data, policy, context
                    )
    finally:
        torch.backends.cudnn.benchmark = before


def _rows(recipe: Recipe, data: Any, policy: str, context: Context) -> Iterator[dict[str, Any]]:
    images = Images(data, recipe)
    batch = next(images.batches(0))
    if policy == "find":
        compile_ahead(_launched(recipe, batch), [policy])
    ours, theirs = Trainer(functional, True, recipe), Trainer(torch.nn.functional, False, recipe)
    error, peer_error = gradient_errors(ours, theirs, data)
    fault = "" if error <= max(2 * peer_error, FLOOR) else f"gradients are off by {error:.1e}"
    layout = "nhwc" if recipe.memory_format == torch.channels_last else "nchw"
    for row in steps(ours, theirs, images, rounds=context.rounds):
        yield {
            "name": f"training step, batch {recipe.batch_size}, {recipe.dtype} {layout}, {row['how']}, {policy}",
            "batch": recipe.batch_size,
            "dtype": recipe.dtype,
            "layout": layout,
            "policy": policy,
            "error": error,
            "peer_error": peer_error,
            "fault": fault,
            **row,
        }


def _launched(recipe: Recipe, batch: Any) -> list[Any]:
    """Problems of a step, seen on plans that were chosen without a search."""
    with settings.using(policy="heuristic"), plan.observe() as seen:
        Trainer(functional, True, recipe).step(*batch)
    return [one.problem for one in seen]


def gradient_errors(ours: Trainer, theirs: Trainer, data: Any) -> tuple[float, float]:
    """Largest relative error of a parameter's gradient, of both, against the framework in float64."""
    exact = Trainer(torch.nn.functional, False, dataclasses.replace(theirs.recipe, dtype="f64"))
    batch = next(Images(data, exact.recipe).batches(0))
    for trainer, (x, y) in (
        (exact, batch),
        (ours, next(Images(data, ours.recipe).batches(0))),
        (theirs, next(Images(data, theirs.recipe).batches(0))),
    ):
        trainer.network.zero_grad(set_to_none=True)
        (trainer.loss(x, y) * trainer.scale).backward()
    found = []
    for trainer in (ours, theirs):
        pairs = zip(trainer.network.parameters(), exact.network.parameters(), strict=True)
        found.append(max(relative_error(p.grad / trainer.scale, q.grad) for p, q in pairs))  # type: ignore[operator]
    return found[0], found[1]
