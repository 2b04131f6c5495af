"""Fixtures for tests of the command line: a runner, made-up engines, small data, a quick clock."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fakes import reference
from lucidnn.core import plan, registry, timing
from lucidnn.core.engine import Engine


@pytest.fixture
def cli(tmp_path, monkeypatch) -> Callable[..., Result]:
    """A function that runs ``lucidnn`` on words, with tuned rows of its own."""
    from lucidnn.cli.main import commands
    from lucidnn.core import settings

    def run(*words: object, **changes) -> Result:
        changes = {"cache_dir": tmp_path / "rows", **changes}
        plan.forget()
        with settings.using(**changes):
            result = CliRunner().invoke(commands, [str(word) for word in words], prog_name="lucidnn")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def engines(monkeypatch):
    """A function that makes the given engines, and a reference, the only ones there are."""

    def only(*given: Engine) -> None:
        everyone = [*given, reference()]
        monkeypatch.setattr(registry, "_engines", {e.name: e for e in everyone})
        plan.forget()

    yield only
    monkeypatch.undo()
    plan.forget()


@pytest.fixture
def quick(monkeypatch):
    """Times are measured as ever, only much too briefly."""
    measure = timing.measure

    def brief(candidates, device, **given):
        return measure(
            candidates, device, **{**given, "rounds": 3, "sample_seconds": 1e-4, "sets": given.get("sets", 1)}
        )

    monkeypatch.setattr(timing, "measure", brief)


@pytest.fixture
def mnist(tmp_path) -> Path:
    """A folder of MNIST files with few images: each class is a bright square in its own place."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for stem, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[row * 8 : row * 8 + 6, column * 7 : column * 7 + 6] = 255
        for name, array in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
            header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            with gzip.open(folder / f"{name}.gz", "wb") as file:
                file.write(header + array.tobytes())
    return folder
