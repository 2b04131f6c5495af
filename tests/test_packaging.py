"""What a user installs and a contributor relies on: lazy import, layers, pins, the wheel, make."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lucidnn

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lucidnn"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "triton", "numba", "jax", "tensorflow")


def python(code: str) -> str:
    """Output of a fresh interpreter that sees the same packages."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python_files(*folders: str) -> list[Path]:
    return [f for folder in folders for f in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in f.parts]


# ---- the public face ---------------------------------------------------------------------------------------


def test_importing_lucidnn_takes_under_30_ms_and_loads_no_framework():
    code = (
        "import sys, time; t = time.perf_counter(); import lucidnn; t = time.perf_counter() - t;"
        f"print(t, [m for m in {HEAVY} if m in sys.modules])"
    )
    seconds, loaded = zip(*(python(code).split(" ", 1) for _ in range(5)), strict=True)
    assert set(loaded) == {"[]"}
    assert min(map(float, seconds)) < 0.030, f"the fastest of five imports took {min(map(float, seconds)):.3f} s"


@pytest.mark.parametrize("layer", ["core", "ops"])
def test_importing_every_module_of_a_lower_layer_loads_no_framework(layer):
    names = [f"lucidnn.{layer}.{f.stem}" for f in sorted((SOURCE / layer).glob("*.py")) if f.stem != "__init__"]
    assert len(names) > 3
    loads = "; ".join(f"import {name}" for name in [f"lucidnn.{layer}", *names])
    assert python(f"import sys; {loads}; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_every_public_name_is_there_and_listed():
    for name in lucidnn.__all__:
        assert getattr(lucidnn, name) is not None
    assert set(lucidnn.__all__) <= set(dir(lucidnn))
    assert len(set(lucidnn.__all__)) == len(lucidnn.__all__)


def test_type_checkers_see_the_same_public_names():
    """`__all__` is written out for them; it must be the lazy table and the version, no more and no less."""
    assert lucidnn.__all__ == ["__version__", *sorted(lucidnn._PUBLIC)]
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    homes = {
        alias.asname or alias.name: (f"lucidnn.{node.module}" if node.module else None)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == lucidnn._PUBLIC


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known():
    with pytest.raises(AttributeError, match=r"module 'lucidnn' has no attribute 'functionl'.*functional"):
        lucidnn.functionl  # noqa: B018


def test_the_version_is_the_installed_one():
    assert metadata.version("lucidnn") == lucidnn.__version__


# ---- the house rules ---------------------------------------------------------------------------------------


def imports(path: Path) -> set[str]:
    """Absolute names of the modules a file imports anywhere, type-checking blocks included."""
    package = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from lucidnn import ops` imports a module, `from lucidnn.ops.pooling import x` a name in one.
            whole = module.count(".") >= 2 and node.module is not None  # `from . import _x` imports a module, too
            found.update(module if whole else f"{module}.{alias.name}" for alias in node.names)
    return found


def engine_files() -> list[Path]:
    return [f for f in python_files("src/lucidnn/engines") if not any(p.startswith("_") for p in f.parts[-2:])]


def test_an_engine_imports_the_machine_the_operations_and_its_helpers_only():
    files = engine_files()
    assert files
    for path in files:
        family = "lucidnn.engines." + path.parent.name
        for name in imports(path):
            if name.split(".")[0] == "lucidnn":
                allowed = ("lucidnn.core", "lucidnn.ops", "lucidnn.engines._", f"{family}._")
                assert name.startswith(allowed), f"{path.relative_to(ROOT)} imports {name}: an engine stands alone"


def test_shared_device_functions_know_no_engine():
    for path in python_files("src/lucidnn/engines/_triton", "src/lucidnn/engines/_numba"):
        for name in imports(path):
            if name.startswith("lucidnn.engines."):
                assert name.startswith("lucidnn.engines._"), f"{path.name}: {name}"


def test_no_engine_calls_a_kernel_of_the_framework():
    """An engine may use the framework's matrix product; its convolution and pooling are the peers."""
    peers = re.compile(
        r"_?(conv|convolution|cudnn|miopen|mkldnn|thnn|slow_conv|(adaptive_)?(max|avg|lp)_pool|un?fold|im2col|col2im)"
        r"(_?[a-z0-9_]*)"
    )
    for path in engine_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                where = f"{path.relative_to(ROOT)}:{node.lineno} calls {called}"
                parts = called.split(".")
                assert not called.startswith("torch.ops") and "aten" not in parts, where
                if parts[0] in ("torch", "nn", "functional", "F"):
                    assert not peers.fullmatch(parts[-1].lower()), where


def test_files_stay_readable():
    for path in python_files("src", "tests", "benchmarks"):
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines; split it"
    core = sum(len(path.read_text().splitlines()) for path in python_files("src/lucidnn/core"))
    assert core <= 1500, f"core has {core} lines; it is to be read in an hour"


def test_every_source_file_opens_with_a_docstring():
    for path in python_files("src", "tests", "benchmarks"):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has none"


# ---- pins and the wheel ------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), [pair for pair in pairs if len(pair) != 2]
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(set(names)) == len(names)
    return dict(zip(names, [version for _, version in pairs], strict=True))


def requirements() -> list[Requirement]:
    """What `make demo`, `make test` and `make lint` install directly."""
    groups = PROJECT["dependency-groups"]
    lines = [
        *PROJECT["project"]["dependencies"],
        *groups["test"],
        *groups["lint"],
        *PROJECT["build-system"]["requires"],
    ]
    return [Requirement(line) for line in lines]


def test_torch_is_pinned_where_the_makefile_looks():
    assert pins()["torch"] == "2.13.0"


def test_every_pin_lies_in_the_range_the_project_declares():
    fixed = pins()
    extras = [Requirement(r) for key in ("cuda", "report") for r in PROJECT["project"]["optional-dependencies"][key]]
    for requirement in [*requirements(), *extras]:
        name = canonicalize_name(requirement.name)
        assert name in fixed, f"{name} has no pin"
        assert requirement.specifier.contains(fixed[name]), f"{name}=={fixed[name]} is outside {requirement.specifier}"


def test_everything_that_gets_installed_is_pinned():
    """Follow what the installed packages ask for: one without a pin would change under the tests' feet."""
    fixed, seen, queue = pins(), set(), requirements()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = tuple(sorted(requirement.extras)) or ("",)
        if (name, extras) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add((name, extras))
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # the lint tools in a test-only environment
        if not name.startswith(("nvidia-", "cuda-")):  # fixed to the version by torch itself
            assert name in fixed, f"{name} is installed, without a pin"
        for line in asked:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                queue.append(needed)


def test_the_wheel_holds_all_that_a_user_needs(tmp_path):
    wheel_builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder
    (artifact,) = wheel_builder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(artifact) as wheel:
        names = set(wheel.namelist())
        shipped = {f"lucidnn/{f.relative_to(SOURCE).as_posix()}" for f in python_files("src/lucidnn")}
        assert shipped <= names
        assert {"lucidnn/py.typed", "lucidnn/data/digits.npz", "lucidnn/data/README.md"} <= names
        info = f"lucidnn-{lucidnn.__version__}.dist-info"
        assert f"{info}/licenses/LICENSE" in names
        assert "lucidnn = lucidnn.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
        assert not [n for n in names if not n.startswith(("lucidnn/", info)) or n.endswith(".pyc")]
    assert Path(artifact).stat().st_size < 3_000_000


# ---- make --------------------------------------------------------------------------------------------------


def make(*words: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "NO_VENV")}
    return subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *words],
        capture_output=True,
        text=True,
        env=clean,
        check=False,
    )


@pytest.mark.parametrize("version", ["Python 3.9.2", "Python 3.12.1"])
def test_a_python_that_will_not_do_is_named_in_one_line(tmp_path, version):
    """Too old, or without the venv module: both show as a failing check."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit 0\nexit 1\n')
    fake.chmod(0o755)
    done = make("demo", f"PYTHON={fake}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1 and "needs Python 3.11 or newer" in said[0] and version in said[0], done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path):
    done = make("demo", f"PYTHON={tmp_path}/none", f"VENV={tmp_path}/venv")
    assert done.returncode != 0 and "needs Python 3.11 or newer" in done.stderr and f"{tmp_path}/none" in done.stderr


def test_without_a_venv_nothing_is_installed():
    done = make("--dry-run", "gpu", "NO_VENV=1", "PYTHON=python3")
    assert done.returncode == 0 and "pip" not in done.stdout
    assert "PYTHONPATH=src" in done.stdout and "pytest -m gpu" in done.stdout


def test_help_names_every_target():
    said = make("help").stdout
    for target in ("demo", "test", "lint", "gpu", "bench", "docs-table"):
        assert f"make {target}" in said


def test_ci_runs_what_people_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.findall(r"^make (\w+)", script.read_text(), re.M) == ["lint", "test"]
