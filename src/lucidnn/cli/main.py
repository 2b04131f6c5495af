"""The ``lucidnn`` command: a group whose commands are the files beside this one, imported when they are needed.

A command file defines ``command``. Whatever goes wrong on purpose ends in one line on standard error, ``lucidnn: what
is wrong and what would be right`` (a problem line that does not parse is shown with a caret), and an exit code:
0 done, 1 the answer is bad (an engine disagrees with the definition, nothing takes the problem), 2 the question is
bad, 130 interrupted.

Start-up is the import of click, about 20 ms; torch, numba and triton are loaded by the commands that compute.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from ..core.errors import LucidnnError

COMMANDS = ("bench", "cache", "explain", "find", "info", "train", "verify")


# \b keeps a paragraph's lines as they are.
HELP = """Ask what lucidnn would do, time it, check it, and train a network on it.

A problem is one line, for instance:

\b
  conv_fprop x=bf16[64,256,56,56]@nhwc w=bf16[256,256,3,3]@nhwc padding=1 on=cuda:sm_90

Outputs, attributes at their defaults and the target may be left out.
"""


class Failure(click.ClickException):
    """One line on standard error and an exit code."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue]  (click reads it of the instance)

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"lucidnn: {self.format_message()}", file=file, err=file is None)


class Commands(click.Group):
    """Looks its commands up by file, and puts errors into one form."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names for the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's file."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"lucidnn.cli.{cmd_name}").command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command that the words name, or say which there are."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise Failure(f"command: found {args[0]!r}; accepted: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before a command's name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _usage(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors made on purpose become one line and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Failure("interrupted; nothing was left half-written", 130) from None
        except click.UsageError as error:
            raise _usage(error) from None
        except LucidnnError as error:
            raise Failure(str(error)) from error


def _usage(error: click.UsageError) -> Failure:
    """A misused option or argument, in one line."""
    said = error.format_message().rstrip(".")
    return Failure(f"{said[:1].lower()}{said[1:]} (see {error.ctx.command_path if error.ctx else 'lucidnn'} --help)")


@click.group(
    cls=Commands, help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name=None, message="%(version)s", version=importlib.import_module("lucidnn").__version__)
def commands() -> None:
    """Hold the commands together."""


def main() -> None:
    """Run the command line."""
    commands(prog_name="lucidnn")
