"""A small ResNet learns handwritten digits, natively and on lucidnn from the same seed; both loss curves in one plot.

    python -m examples.training_curve --steps 200 --plot docs/images/training_curve.svg

The difference is what float32 leaves open: sums in another order, which each step hands on to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as T

import lucidnn.torch
from examples.models.resnet import Basic, ResNet


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1797 images, (N, 1, 8, 8) from 0 to 1, and their labels."""
    with np.load(Path(lucidnn.torch.__file__).parents[1] / "data" / "digits.npz") as data:
        images = torch.from_numpy(data["images"]).float().unsqueeze(1) / 16
        return images, torch.from_numpy(data["labels"]).long()


def losses(on_lucidnn: bool, steps: int = 200, width: int = 16, batch: int = 64, seed: int = 0) -> list[float]:
    """Loss of each training step."""
    images, labels = digits()
    torch.manual_seed(seed)
    model = ResNet(Basic, (1, 1, 1), classes=10, width=width, channels=1, stem="small")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    chooser = torch.Generator().manual_seed(seed)
    found = []
    with lucidnn.torch.enable() if on_lucidnn else contextlib.nullcontext():
        for _ in range(steps):
            chosen = torch.randint(len(images), (batch,), generator=chooser)
            loss = T.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            found.append(loss.item())
    return found


def plot(native: list[float], ours: list[float], path: Path) -> None:
    """Both curves above, their difference below."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lucidnn"  # the same file from the same figures
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
    steps: Any = range(1, len(native) + 1)
    above.semilogy(steps, native, color="0.7", linewidth=4, label="PyTorch")
    above.semilogy(steps, ours, color="C3", linewidth=1.2, label="PyTorch on lucidnn")
    above.set_ylabel("loss")
    above.legend(frameon=False)
    above.set_title("A small ResNet on handwritten digits: one seed, two sets of kernels")
    below.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(native, ours, strict=True)], color="0.3", linewidth=1)
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run both, print the largest difference, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--plot", type=Path, help="Needs matplotlib (lucidnn[report]).")
    given = parser.parse_args()
    runs = {}
    for name, on in (("native", False), ("lucidnn", True)):
        start = time.perf_counter()
        runs[name] = losses(on, given.steps, given.width)
        spent = time.perf_counter() - start
        print(f"{name:8} loss {runs[name][0]:.4f} to {runs[name][-1]:.4f} in {given.steps} steps, {spent:.1f} s")
    differences = [abs(a - b) for a, b in zip(runs["native"], runs["lucidnn"], strict=True)]
    at = max(range(given.steps), key=differences.__getitem__)
    print(f"largest difference {differences[at]:.2e}, at step {at + 1}, where the loss is {runs['native'][at]:.4f}")
    if given.plot is not None:
        plot(runs["native"], runs["lucidnn"], given.plot)


if __name__ == "__main__":
    main()
