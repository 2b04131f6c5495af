"""The switches: each follows the framework's flag until it is set here, and steers what is chosen."""

from __future__ import annotations

import pytest
import torch

import lucidnn
from lucidnn import backends, tuning
from lucidnn.core.errors import InvalidArgument


@pytest.fixture(autouse=True)
def _as_it_was():
    with backends.flags(), torch.backends.cudnn.flags(True, False, 10, False, True):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["enabled", "benchmark", "deterministic"])
def test_a_flag_follows_cudnns_until_it_is_set(name):
    for value in (True, False, True):
        with torch.backends.cudnn.flags(**{"enabled": True, name: value}):
            assert getattr(backends, name) is value
    with torch.backends.cudnn.flags(**{"enabled": True, name: False}):
        setattr(backends, name, True)
        assert getattr(backends, name) is True
        setattr(backends, name, None)
        assert getattr(backends, name) is False


def test_cudnns_flags_are_for_gpus_and_deterministic_algorithms_for_all():
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        assert backends.effective(cuda=True).policy == "find" and backends.effective(cuda=False).policy == "heuristic"
    with torch.backends.cudnn.flags(enabled=False, deterministic=True):
        assert backends.effective(cuda=True).deterministic and not backends.effective(cuda=False).deterministic
        assert not backends.is_enabled(cuda=True) and backends.is_enabled(cuda=False)
    torch.use_deterministic_algorithms(True)
    assert backends.effective(cuda=True).deterministic and backends.effective(cuda=False).deterministic


def test_a_value_set_here_holds_for_the_cpu_too_and_ends_with_its_block():
    with backends.flags(benchmark=True, deterministic=True, enabled=False):
        assert backends.effective(cuda=False).policy == "find" and not backends.is_enabled(cuda=False)
        assert not backends.is_acceptable(torch.ones(1))
    assert backends.effective(cuda=False) is lucidnn.core.settings.current() and backends.is_acceptable(torch.ones(1))


def test_a_policy_that_the_user_named_is_kept():
    with lucidnn.using(policy="error"), backends.flags(benchmark=True):
        assert backends.effective(cuda=True).policy == "error"


def test_precision_of_float32():
    for value, words in ((True, "tf32"), (False, "ieee")):
        backends.allow_tf32 = value
        assert backends.allow_tf32 is value and backends.fp32_precision == words
        backends.fp32_precision = "none"
        backends.fp32_precision = words
        assert backends.allow_tf32 is value
    backends.allow_tf32 = None
    for value in (True, False):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=value):
            assert backends.allow_tf32 is value


def test_the_limit_bounds_what_a_search_times(tmp_path):
    problem = lucidnn.Problem.parse("conv_fprop x=f32[1,4,6,6] w=f32[4,4,3,3]")
    with lucidnn.using(cache_dir=tmp_path), backends.flags(benchmark_limit=2):
        assert len(tuning.search(problem, lucidnn.core.settings.current())) == 2


@pytest.mark.parametrize(
    "name, value",
    [
        ("enabled", 1),
        ("benchmark", "yes"),
        ("benchmark_limit", -1),
        ("benchmark_limit", True),
        ("fp32_precision", "f32"),
    ],
)
def test_what_is_no_value_is_an_error_that_names_the_values(name, value):
    with pytest.raises(InvalidArgument, match=name):
        setattr(backends, name, value)


def test_an_unknown_flag_is_an_error():
    with pytest.raises(InvalidArgument, match="benchmrk"), backends.flags(benchmrk=True):
        pass


def test_version_and_availability():
    assert backends.version() == sum(
        int(part) * weight for part, weight in zip(lucidnn.__version__.split("."), (10_000, 100, 1), strict=True)
    )
    assert backends.is_available() and backends.is_available("cuda") is torch.cuda.is_available()
    assert not backends.is_acceptable(torch.ones(2).to_sparse()) and not backends.is_acceptable(torch.ones(2).int())


def test_the_functions_follow_too():
    x, w = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    chosen = []
    for fixed in (False, True):
        with backends.flags(deterministic=fixed), lucidnn.observe() as plans:
            lucidnn.functional.conv2d(x, w)
        chosen.append(plans[0])
    assert chosen[0].problem == chosen[1].problem and "nondeterministic" not in chosen[1].engine.notes
    with backends.flags(deterministic=True), lucidnn.using(exclude_notes=("deterministic",)):
        assert backends.effective(cuda=False).exclude_notes == ("deterministic",)


def test_nothing_to_compute_is_no_fall_back():
    with lucidnn.using(no_fallback=True):
        assert lucidnn.functional.softmax(torch.ones(5, 0, 3), 2).shape == (5, 0, 3)
