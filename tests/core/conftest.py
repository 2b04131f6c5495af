"""Fixtures for tests of the machine."""

from __future__ import annotations

import pytest

from fakes import reference
from lucidnn.core import plan, registry
from lucidnn.core.engine import Engine


@pytest.fixture
def engines(monkeypatch):
    """A function that makes the given engines, and a reference, the only ones there are."""
    plan.forget()

    def only(*given: Engine) -> None:
        everyone = [*given, reference()]
        monkeypatch.setattr(registry, "_engines", {e.name: e for e in everyone})
        plan.forget()

    yield only
    monkeypatch.undo()
    plan.forget()
