"""What all tests share: no setting or tuned row of the user's steers them, and folders give their tests a mark.

Compiled CPU kernels are kept in ``.cache/tests`` from run to run; timings found by an earlier run are not. Triton reads
TRITON_INTERPRET when it is imported, so the kernels' interpreter tests are collected in a run of their own, as
``make test`` does: ``TRITON_INTERPRET=1 pytest tests/interpreter``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "tests"

for name in [name for name in os.environ if name.startswith("LUCIDNN_")]:
    del os.environ[name]
os.environ["LUCIDNN_CACHE_DIR"] = str(CACHE)
# Thousands of tiny parallel loops: threads that spin at their end cost 15 times the work on a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else ["interpreter"]

# A first call compiles, so there is no deadline; under CI the same examples every time, so that a red run is about the
# change and not about luck. Elsewhere each run looks at new ones.
hypothesis.settings.register_profile("lucidnn", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("lucidnn")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, not in every xdist worker
        for rows in CACHE.glob("tuned-*"):
            rows.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A kernel that faults breaks its process's GPU for good: end the worker there, or all its later tests fail too."""
    report = yield
    if report.failed and item.get_closest_marker("gpu"):
        import torch  # not above: it must see the environment set there

        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            found = f"\n{item.nodeid} left the GPU unusable: {error}\n{report.longreprtext}"
            print(found, file=sys.__stderr__, flush=True)
            if hasattr(item.config, "workerinput"):
                os._exit(3)  # pytest-xdist names this test and starts another worker
            pytest.exit("the GPU is unusable in this process")
    return report


def pytest_report_header() -> str:
    return f"triton kernels: {'interpreted' if INTERPRETED else 'compiled'}; cache: {CACHE}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder in ("gpu", "interpreter"):
            if (HERE / folder) in item.path.parents:
                item.add_marker(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The framework's own testing tools, once imported by a test, forbid the setting of its flags to the process."""
    if torch := sys.modules.get("torch"):
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
