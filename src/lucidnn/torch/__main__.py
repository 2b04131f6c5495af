"""Run a program of yours on lucidnn without a change to it: ``python -m lucidnn.torch script.py args...``."""

from __future__ import annotations

import atexit
import os
import runpy
import sys

import click

from . import enable, report


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="The program is a module's name, as for python -m.")
@click.option("--operators", default="", help="Names or patterns of the framework's operators, comma-separated.")
@click.option("--report", "told", is_flag=True, help="At the end, tell on stderr which calls ran on lucidnn.")
@click.option("--time-device", is_flag=True, help="With --report: also time the calls on the GPU.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(module: bool, operators: str, told: bool, time_device: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run PROGRAM with its ARGUMENTS, PyTorch's operators on lucidnn."""
    if not module and not os.path.exists(program):
        raise click.BadParameter(f"there is no file {program}", param_hint="PROGRAM")
    enable(*(name.strip() for name in operators.split(",") if name.strip()), time_device=time_device)
    if told:
        atexit.register(lambda: print(report(), file=sys.stderr))
    sys.argv = [program, *arguments]
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
