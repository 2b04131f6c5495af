"""``lucidnn train``: the small network trained on lucidnn, then on the framework's kernels, and both laid side by side.

Same first weights, same batches, same threads. Afterwards every plan of a training step is timed alone beside the
framework's kernel for it, and the two steps as a whole, interleaved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import click


@click.command(short_help="Train a small network and show what ran.")
@click.option(
    "--data",
    metavar="FOLDER",
    help="CIFAR-10 python batches or MNIST idx files. Left out: the digits shipped with lucidnn.",
)
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option(
    "--dtype", default="float32", show_default=True, metavar="TYPE", help="float32, bfloat16, float16 or float64."
)
@click.option(
    "--lr",
    default=0.03,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="At the start; it falls to 0.",
)
@click.option("--policy", metavar="POLICY", help="How engines are chosen: heuristic, find or error. Left out: as set.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "json_path", metavar="FILE", help="Also write all figures, with the environment, to FILE.")
def command(
    data: str | None,
    device: str,
    epochs: int,
    batch_size: int,
    dtype: str,
    lr: float,
    policy: str | None,
    seed: int,
    json_path: str | None,
) -> None:
    """Train a small convolutional network on handwritten digits, or on FOLDER, and show what ran and how fast."""
    from ..core import settings
    from .terminal import json_place, write_json

    place = json_place(json_path)
    arguments = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    with settings.using(policy=policy or settings.current().policy):
        report = _run(data, device, dtype, arguments)
    if place is not None:
        write_json(place, report)


def _run(folder: str | None, device: str, dtype: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from .problems import device_of
    from .training import Recipe, dtype_of

    recipe = Recipe(device_of(device), dtype_of(dtype), **arguments)
    from .data import load

    data = load(folder, recipe.seed)

    import torch

    from .. import functional
    from ..core import settings
    from .environment import environment
    from .layers import layers, steps
    from .terminal import say
    from .training import Images, Trainer

    images = Images(data, recipe)
    here = environment(recipe.device)
    layout = "channels-last" if recipe.memory_format == torch.channels_last else "channels-first"
    say(f"{data.name}: {len(data.train_y)} images to train on, {len(data.test_y)} held out")
    say(f"{here['device']}, {here['threads']} threads, {recipe.torch_dtype}, {layout}".replace("torch.", ""))
    say(
        f"batch {recipe.batch_size}, {recipe.epochs} epochs, "
        f"learning rate {recipe.lr:g} falling to 0, seed {recipe.seed}"
    )
    say()
    report: dict[str, Any] = {
        "environment": here,
        "data": {"name": data.name, "train": len(data.train_y), "test": len(data.test_y)},
        "recipe": dataclasses.asdict(recipe) | {"device": str(recipe.device), "layout": layout},
        "policy": settings.current().policy,
    }
    ours = Trainer(functional, True, recipe)
    theirs = Trainer(torch.nn.functional, False, recipe)
    with _searching():
        for name, trainer in (("lucidnn", ours), ("framework", theirs)):
            report[name] = _train(name, trainer, images)
        batch = next(images.batches(0))
        report["layers"] = layers(ours, batch)
        report["steps"] = steps(ours, theirs, images)
    _show(report)
    return report


@contextlib.contextmanager
def _searching() -> Iterator[None]:
    """The framework's kernels at their best: cuDNN takes the fastest of a search."""
    import torch

    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _train(name: str, trainer: Any, images: Any) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .main import Failure
    from .terminal import console, say, seconds

    recipe = trainer.recipe
    screen = console(stderr=True)
    piped = not screen.is_terminal
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=piped,
    )
    told: list[Any] = []
    with bar:
        start = "compiling or loading kernels" if name == "lucidnn" else ""
        task = bar.add_task(f"{name:9}", total=recipe.epochs * images.steps, told=start)

        def advance(epoch: Any) -> None:
            if epoch is None:
                bar.advance(task)
                return
            told.append(epoch)
            line = f"epoch {len(told)}/{recipe.epochs}  loss {epoch.loss:.4f}"
            bar.update(task, told=line)
            if piped:
                say(f"{name:9}  {line}  {seconds(epoch.seconds)}")
            if not math.isfinite(epoch.loss):
                hint = "a smaller --lr would help"
                raise Failure(f"{name}: the loss is {epoch.loss} after epoch {len(told)}; {hint}", 1)

        epochs = trainer.train(images, advance)
    accuracy = trainer.accuracy(images)
    spent = sum(epoch.seconds for epoch in epochs)
    say(f"{name:9}  held-out accuracy {accuracy:.2%}, {len(epochs)} epochs in {seconds(spent)}", style="bold")
    return {"accuracy": accuracy, "seconds": spent, "epochs": [dataclasses.asdict(epoch) for epoch in epochs]}


def _show(report: dict[str, Any]) -> None:
    from .terminal import ratio, say, seconds, show_table, size

    say()
    rows = []
    for row in report["layers"]:
        rows.append(
            (
                row["layer"],
                row["what"],
                row["engine"] if not row["fault"] else f"!{row['engine']}: {row['fault']}",
                row["reason"],
                size(row["workspace"]),
                seconds(row["seconds"]),
                seconds(row["peer_seconds"]),
                ratio(row["ratio"]),
                row["peer"] or f"nothing: {row['peer_fault']}",
            )
        )
    timed = [row for row in report["layers"] if row["seconds"] and row["peer_seconds"]]
    ours, theirs = (sum(row[name] for row in timed) for name in ("seconds", "peer_seconds"))
    if timed:
        rows.append(("all", "", "", "", "", seconds(ours), seconds(theirs), ratio(theirs / ours), ""))
    columns = (
        "layer",
        "operation",
        "engine",
        "why",
        ">workspace",
        ">time",
        ">framework",
        ">ratio",
        "framework's kernel",
    )
    title = "One training step, kernel by kernel, each timed alone beside the framework's"
    replayed = any(row["graph"] for row in report["layers"])
    show_table(columns, rows, title=title + (" (replays of a captured graph)" if replayed else ""))
    rows = [
        (
            s["how"],
            seconds(s["seconds"]),
            f"{s['spread']:.0%}",
            seconds(s["peer_seconds"]),
            f"{s['peer_spread']:.0%}",
            ratio(s["ratio"]),
        )
        for s in report["steps"]
    ]
    title = "Whole steps, interleaved: forward, loss, backward, update"
    show_table(("step", ">lucidnn", ">spread", ">framework", ">spread", ">ratio"), rows, title=title)
    accuracies = (f"{report[name]['accuracy']:.2%} on {name}" for name in ("lucidnn", "framework"))
    say("Held-out accuracy: " + ", ".join(accuracies), style="bold")
