"""The errors a user can meet. Each names what was wrong, what was found and what would be right.

All derive from `LucidnnError`, which is a `RuntimeError` (frameworks report bad tensors so); errors about an
argument's value are a `ValueError` as well, so both habits of catching them work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class LucidnnError(RuntimeError):
    """Base of every error that lucidnn raises on purpose."""

    def __reduce__(self):  # made again from its fields, not by its constructor, to cross process borders
        return RuntimeError.__new__, (type(self), *self.args), vars(self)


class InvalidArgument(LucidnnError, ValueError):
    """An argument's value is not acceptable: its name, the value found, and what would have been accepted.

    >>> print(InvalidArgument("groups", 3, "a divisor of x's 32 channels"))
    groups: found 3; accepted: a divisor of x's 32 channels
    """

    def __init__(self, argument: str, found: object, accepted: str):
        super().__init__(f"{argument}: found {found}; accepted: {accepted}")
        self.argument, self.found, self.accepted = argument, str(found), accepted


class ProblemSyntaxError(LucidnnError, ValueError):
    """A problem line does not parse or is ill-formed; the message points at the token.

    >>> print(ProblemSyntaxError("conv_fprop x=bf17[1]", 11, "unknown data type 'bf17'"))
    unknown data type 'bf17'
      conv_fprop x=bf17[1]
                 ^
    """

    def __init__(self, text: str, position: int, message: str):
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")
        self.text, self.position, self.message = text, position, message


class UnknownEngine(LucidnnError, LookupError):
    """The engine named by the caller does not exist; the message lists near names."""


class NotSupported(LucidnnError):
    """No engine, or not the engine that was named, takes the problem; `refusals` maps engine names to reasons."""

    def __init__(self, message: str, refusals: Mapping[str, Sequence[str]] | None = None):
        self.refusals = {name: tuple(reasons) for name, reasons in (refusals or {}).items()}
        lines = [f"  {name}: {reason}" for name, reasons in self.refusals.items() for reason in reasons]
        super().__init__("\n".join([message, *lines]))


class DeviceUnavailable(LucidnnError):
    """The device asked for is not present or its software is missing; the message says which would work."""


class EngineFailure(LucidnnError):
    """An engine accepted a problem and then failed to build or run it: a defect of the engine."""
