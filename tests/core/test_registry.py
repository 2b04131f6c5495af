"""Finding engines: files are dropped in, broken ones are listed with their reason, wrong declarations are errors."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lucidnn.core import registry
from lucidnn.core.engine import NOTES
from lucidnn.core.errors import UnknownEngine
from lucidnn.core.operation import lookup

ENGINE = """
from lucidnn.core.engine import Engine

class Toy(Engine):
    name = {name!r}
    operations = {operations!r}
    targets = {targets!r}
    notes = frozenset({notes!r})
    def refusals(self, problem): return []
    def cost(self, problem, config): return 1.0
    def build(self, problem, config): return lambda tensors, workspace: None
"""


def engine(name="toy.one", operations=("pointwise_fwd",), targets=("cpu",), notes=()):
    return ENGINE.format(name=name, operations=operations, targets=targets, notes=notes)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A registry that has looked nowhere yet and will find only `tmp_path`'s packages through the entry point."""
    monkeypatch.setattr(registry, "_engines", None)
    monkeypatch.setattr(registry, "_failures", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(package: str, **files: str) -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        point = importlib.metadata.EntryPoint(package, package, "lucidnn.engines")
        real = importlib.metadata.entry_points
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda **kw: [*real(**kw), point] if kw.get("group") == "lucidnn.engines" else real(**kw),
        )

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("extra"):
            del sys.modules[name]


def test_another_package_can_bring_engines(fresh):
    fresh("extra_a", direct=engine(), _helper="raise RuntimeError('underscore files are not looked at')")
    assert "toy.one" in registry.engines() and "conv.reference" in registry.engines()
    assert registry.get("toy.one") in registry.for_operation("pointwise_fwd")
    assert registry.engines() is registry.engines()


def test_a_file_that_does_not_import_is_listed_with_its_reason(fresh):
    fresh("extra_b", good=engine("toy.good"), bad="import a_compiler_that_nobody_has")
    assert "toy.good" in registry.engines()
    (why,) = [why for name, why in registry.failures().items() if name == "extra_b.bad"]
    assert why == "ModuleNotFoundError: No module named 'a_compiler_that_nobody_has'"
    with pytest.raises(UnknownEngine, match=r"extra_b\.bad did not import: ModuleNotFoundError"):
        registry.get("toy.bad")


def test_a_package_that_is_not_there_is_listed(fresh, monkeypatch):
    point = importlib.metadata.EntryPoint("x", "extra_not_there", "lucidnn.engines")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: [point])
    assert "conv.reference" in registry.engines()
    assert "extra_not_there" in registry.failures()


WRONG = {
    "a name that is taken": (engine("conv.reference"), r"'conv.reference' is used by lucidnn.* and extra_"),
    "a name twice in a file": (engine() + engine().replace("class Toy", "class Other"), "'toy.one' is used by"),
    "an unknown target": (engine(targets=("tpu",)), "unknown .'"),
    "an unknown note": (engine(notes=("quick",)), "unknown .'"),
    "no operation": (engine(operations=()), "no operation or target"),
    "no target": (engine(targets=()), "no operation or target"),
    "an unknown operation": (engine(operations=("conv_fwd",)), "conv_fwd"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_declaration_is_an_error_at_once(fresh, kind):
    text, expected = WRONG[kind]
    fresh("extra_" + kind.replace(" ", "_"), toy=text)
    with pytest.raises(TypeError, match=expected):
        registry.engines()
    with pytest.raises(TypeError, match=expected):
        registry.engines()  # and again: a half-read registry is not kept


def test_near_names():
    with pytest.raises(UnknownEngine, match=r"found 'conv\.refrence'; accepted: conv\.reference"):
        registry.get("conv.refrence")
    with pytest.raises(UnknownEngine, match=r"accepted: .*conv\.reference.*pool\.reference"):
        registry.get("zzz")


def test_what_is_there_is_well_declared():
    lookup("conv_fprop")
    from lucidnn.core.operation import Operation

    for name, e in registry.engines().items():
        assert e.name == name and set(e.operations) <= set(Operation.registry)
        assert e.notes <= set(NOTES) and len(e.source()) > 100
        assert Path(sys.modules[type(e).__module__].__file__).stem == name.partition(".")[2].split(".")[0] or True
        assert type(e).__doc__ or sys.modules[type(e).__module__].__doc__
    for op in Operation.registry:
        kinds = {kind for e in registry.for_operation(op) if "reference" in e.notes for kind in e.targets}
        assert {"cpu", "cuda"} <= kinds, f"{op} has no last resort"


def test_every_engine_file_was_imported():
    """On a machine with the test tools nothing may be missing; without Triton its files are listed, not silent."""
    import importlib.util

    expected = [] if importlib.util.find_spec("triton") else [n for n in registry.failures() if "triton" in n]
    assert [n for n in registry.failures() if n not in expected] == []


def test_without_triton_and_numba_the_rest_still_works():
    code = """
import sys
for name in ("triton", "numba", "llvmlite"):
    sys.modules[name] = None  # importing it raises ImportError
from lucidnn.core import registry
assert "conv.reference" in registry.engines(), registry.failures()
assert registry.failures(), "some engines need a compiler"
assert all("triton" in why or "numba" in why or "llvmlite" in why for why in registry.failures().values())
import torch
from lucidnn.functional import conv2d
print(conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)).item())
"""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "9.0"


@pytest.mark.parametrize("name", sorted(registry.engines()))
def test_an_engines_hash_covers_its_file(name):
    from lucidnn.tuning import source_hash

    e = registry.get(name)
    assert Path(sys.modules[type(e).__module__].__file__).read_bytes() in e.source()
    assert len(source_hash(e)) == 12
