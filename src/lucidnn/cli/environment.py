"""What a measurement depends on beside the program: machine, versions, threads, commit, date."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.target import Target
from ..tuning import device_name

PACKAGES = ("torch", "triton", "numba", "numpy")


def version(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: Any, commit: str | None = None) -> dict[str, Any]:
    """Everything a reader needs to judge a time.

    Parameters
    ----------
    device : torch.device
        Where the work ran.
    commit : str, optional
        Commit of the sources; asked of git if left out.

    Returns
    -------
    dict
        Plain values, ready for JSON; entries that do not apply are left out.

    Examples
    --------
    >>> import torch
    >>> here = environment(torch.device("cpu"))
    >>> here["target"].startswith("cpu:"), here["threads"] >= 1
    (True, True)
    """
    import torch

    target = Target.of(device)
    found: dict[str, Any] = {
        "device": device_name(target.kind, None if device.type == "cpu" else device),
        "target": str(target),
        "threads": torch.get_num_threads(),
        "lucidnn": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit or source_commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if target.kind != "cpu":
        found["cpu"] = device_name("cpu")
        found["driver"] = driver()
        found["cuda"] = torch.version.cuda or torch.version.hip
        found["cudnn"] = torch.backends.cudnn.version()
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def driver() -> str | None:
    """Version of the NVIDIA driver; None where it cannot be told."""
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@functools.cache
def source_commit() -> str | None:
    """Commit of the checkout that the package runs from, with ``+`` where files differ from it; None elsewhere."""
    here = str(Path(__file__).resolve().parent)
    commit = _said("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    # Another project's repository may lie around an installed package: the file must be one that git knows.
    if commit is None or not _said("git", "-C", here, "ls-files", "environment.py"):
        return None
    return commit + ("+" if _said("git", "-C", here, "status", "--porcelain", "-uno", "--", ":/src") else "")


def _said(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
