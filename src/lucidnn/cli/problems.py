"""From the words of a command line to problems and the devices to run them on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..core.errors import DeviceUnavailable, InvalidArgument, UnknownEngine
from ..core.problem import Problem
from ..core.target import Target
from ..testing import read_problems


def problem_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what several commands take: a problem line, or a file of them."""
    function = click.option("--file", metavar="FILE", help="Take the problems of this file, one a line.")(function)
    return click.argument("line", nargs=-1, metavar="[PROBLEM]")(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device`` to a command that runs problems."""
    text = "cpu, cuda or cuda:N. Left out: what the line's on= says, else the GPU if there is one."
    return click.option("--device", metavar="DEVICE", help=text)(function)


def device_of(text: str) -> Any:
    """The device that a user named: ``auto`` is the GPU where there is one.

    Raises
    ------
    InvalidArgument, DeviceUnavailable
        No such device, or not here.

    Examples
    --------
    >>> device_of("cpu")
    device(type='cpu')
    """
    import torch

    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InvalidArgument("device", repr(text), "auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", repr(text), "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise DeviceUnavailable(
            f"device '{text}': this torch ({torch.__version__}) is built for CPUs only; use device 'cpu'"
        )
    Target.of(device)
    return device


def default_target() -> Target:
    """What a line without ``on=`` is for: this machine's GPU, or its CPU where there is none."""
    return Target.of(device_of("auto"))


def problems_of(line: Sequence[str], file: str | None, target: Target) -> list[Problem]:
    """Problems of a line or a file; `target` serves those that name none.

    Raises
    ------
    InvalidArgument
        Neither line nor file, both, or a file that cannot be read.
    ProblemSyntaxError
        Points at the token.
    """
    text = " ".join(line).strip()
    if bool(text) == (file is not None):
        raise InvalidArgument("problem", "a line and a file" if text else "nothing", "a problem line, or --file FILE")
    if file is None:
        return [Problem.parse(text, target)]
    try:
        return read_problems(file, target)
    except OSError as error:
        raise InvalidArgument("file", f"{file} ({error.strerror})", "a file of problem lines") from None
    except UnicodeDecodeError:
        raise InvalidArgument("file", f"{file}, which is not text", "a file of problem lines") from None


def problems_here(line: Sequence[str], file: str | None, device: str | None) -> list[tuple[Problem, Any]]:
    """Problems with the device that each is to run on; a problem's target becomes that device's."""
    named = device_of(device) if device else None
    default = named or device_of("auto")
    found = []
    for problem in problems_of(line, file, Target.of(default)):
        place = named or (device_of("cpu") if problem.target.kind == "cpu" else device_of("cuda"))
        found.append((dataclasses.replace(problem, target=Target.of(place)), place))
    return found


def checked_engines(names: Sequence[str], problems: Sequence[Problem]) -> None:
    """Every named engine exists and takes part in one of the operations.

    Raises
    ------
    UnknownEngine
        With near names.
    """
    from ..core import registry

    operations = {problem.op.name for problem in problems}
    for name in names:
        engine = registry.get(name)
        if not operations & set(engine.operations):
            raise UnknownEngine(
                f"engine: found {name}, which takes part in {', '.join(engine.operations)}; "
                f"accepted: an engine of {', '.join(sorted(operations))}"
            )
