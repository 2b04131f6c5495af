"""The choice and its reasons, with made-up engines: who is taken, why, who is left out, and what is remembered."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from fakes import LINE, Fake
from lucidnn import tuning
from lucidnn.core import plan as planning
from lucidnn.core.errors import EngineFailure, InvalidArgument, NotSupported
from lucidnn.core.plan import candidates, choose, explain, find, select
from lucidnn.core.problem import Problem
from lucidnn.core.settings import using
from lucidnn.core.store import Row, Store

PROBLEM = Problem.parse(LINE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with using(cache_dir=tmp_path):
        yield tmp_path


def chosen(**settings) -> tuple[str, str]:
    with using(**settings):
        choice = choose(PROBLEM)
    return choice.candidate.engine.name, choice.reason


# ---- by estimate -------------------------------------------------------------------------------------------


def test_the_cheapest_is_taken_and_the_reason_says_so(engines):
    engines(Fake("toy.slow", 2.0), Fake("toy.fast", 1.0), Fake("toy.picky", 0.1, refuses=("needs a, found b",)))
    assert chosen() == ("toy.fast", "cheapest of 3 by estimate (1.00e+00 s)")
    assert [c.engine.name for c in candidates(PROBLEM)] == ["toy.fast", "toy.slow", "toy.reference", "toy.picky"]


def test_the_only_one_that_accepts(engines):
    engines()
    assert chosen() == ("toy.reference", "the only engine that takes it")


def test_a_reference_is_last_whatever_its_estimate(engines):
    engines(Fake("toy.slow", 1e9))
    assert chosen()[0] == "toy.slow"


def test_the_cheapest_configuration_is_taken(engines):
    engines(Fake("toy.a", configs=[{"cost": 3.0}, {"cost": 1.0}, {"cost": 2.0}]))
    plan = select(PROBLEM)
    assert plan.config == {"cost": 1.0} and plan.cost == 1.0
    engines(Fake("toy.a", configs=[{"tile": 1}, {"tile": 2}]))
    assert select(PROBLEM).config == {"tile": 1}, "of equals, the engine's own first guess"


def test_engines_of_another_target_say_so(engines):
    other = Fake("toy.gpu", 0.1)
    other.targets = ("cuda", "hip")
    engines(other)
    refused = candidates(PROBLEM)[-1]
    assert refused.refusals == (f"needs a target of kind cuda or hip, found {PROBLEM.target}",)


# ---- by name and by filter ---------------------------------------------------------------------------------


def test_a_named_engine_is_taken_even_where_it_is_dear(engines):
    engines(Fake("toy.slow", 2.0), Fake("toy.fast", 1.0))
    assert chosen(engine="toy.slow") == ("toy.slow", "named by the caller")
    assert chosen(engine="toy.reference") == ("toy.reference", "named by the caller")


def test_a_named_engine_that_refuses_is_an_error_with_its_reasons(engines):
    engines(Fake("toy.picky", refuses=("needs a, found b", "needs c, found d")))
    with pytest.raises(NotSupported) as caught:
        chosen(engine="toy.picky")
    assert caught.value.refusals == {"toy.picky": ("needs a, found b", "needs c, found d")}


def test_naming_an_engine_of_another_operation_leaves_this_one_free(engines):
    other = Fake("toy.other")
    other.operations = ("conv_fprop",)
    engines(other, Fake("toy.fast"))
    assert chosen(engine="toy.other")[0] == "toy.fast"


def test_disabled_engines_take_no_part(engines):
    engines(Fake("toy.fast", 1.0), Fake("toy.slow", 2.0))
    assert chosen(disable_engines=("toy.fast",))[0] == "toy.slow"
    assert chosen(disable_engines=("toy.[fs]*",))[0] == "toy.reference"
    with using(disable_engines=("toy.fast",)):
        assert candidates(PROBLEM)[-1].refusals == ("disabled by the setting disable_engines",)
    with pytest.raises(NotSupported):
        chosen(engine="toy.fast", disable_engines=("toy.fast",))


def test_notes_can_be_excluded_and_deterministic_excludes_one(engines):
    engines(Fake("toy.fft", 1.0, notes=("fft",)), Fake("toy.atomic", 2.0, notes=("nondeterministic",)))
    assert chosen()[0] == "toy.fft"
    assert chosen(exclude_notes=("fft",))[0] == "toy.atomic"
    assert chosen(exclude_notes=("fft",), deterministic=True)[0] == "toy.reference"
    with using(deterministic=True):
        assert candidates(PROBLEM)[-1].refusals == ("has the excluded note nondeterministic",)


def test_no_fallback_makes_the_last_resort_an_error(engines):
    engines(Fake("toy.picky", refuses=("needs a, found b",)))
    assert chosen()[0] == "toy.reference"
    with pytest.raises(NotSupported, match="no engine takes") as caught:
        chosen(no_fallback=True)
    assert caught.value.refusals == {"toy.picky": ("needs a, found b",)}


def test_no_engine_at_all(engines):
    engines(Fake("toy.picky", refuses=("needs a, found b",)))
    with pytest.raises(NotSupported, match=r"toy\.reference: disabled"):
        chosen(disable_engines=("toy.reference",))


def test_the_workspace_limit_picks_a_smaller_configuration_or_another_engine(engines):
    sizes = [{"cost": 1.0, "size": 1000}, {"cost": 2.0, "size": 100}]
    engines(Fake("toy.big", configs=sizes, workspace=lambda c: c["size"]), Fake("toy.small", 3.0))
    with using(workspace_limit=None):
        assert select(PROBLEM).workspace_size == 1000
    with using(workspace_limit=100):
        assert (select(PROBLEM).engine.name, select(PROBLEM).workspace_size) == ("toy.big", 100)
    with using(workspace_limit=99):
        assert select(PROBLEM).engine.name == "toy.small"
        assert candidates(PROBLEM)[-1].refusals == ("needs a workspace of 100 bytes, found a limit of 99",)
    with using(workspace_limit=99, engine="toy.big"), pytest.raises(NotSupported, match="a limit of 99"):
        select(PROBLEM)


# ---- by timing ---------------------------------------------------------------------------------------------


def test_find_takes_the_fastest_and_keeps_a_row(engines, own_cache):
    a = Fake("toy.lying", 1.0, seconds=0.02)
    b = Fake("toy.honest", 2.0, configs=[{"seconds": 0.01}, {"seconds": 0.0}])
    engines(a, b)
    name, reason = chosen(policy="find")
    assert name == "toy.honest" and reason.startswith("fastest of the user's timings (")
    rows = Store(own_cache).rows()
    assert [r.engine for r in rows] == ["toy.honest", "toy.honest", "toy.lying"]
    assert rows[0].config == {"seconds": 0.0} and {r.status for r in rows} == {"ok"}
    assert all(0.019 < r.seconds < 0.2 for r in rows if r.engine == "toy.lying")
    # and it is used without timing again, by the other policies too
    runs = a.runs + b.runs
    assert chosen(policy="error")[0] == chosen(policy="heuristic")[0] == chosen(policy="find")[0] == "toy.honest"
    assert a.runs + b.runs == runs


def test_find_records_failures_and_wrong_results(engines, own_cache):
    engines(
        Fake("toy.wrong", 0.1, factor=2.001),
        Fake("toy.unbuilt", 0.2, build_error=MemoryError("too big")),
        Fake("toy.broken", 0.3, run_error=ZeroDivisionError("oops")),
        Fake("toy.right", 9.0, seconds=0.002),
    )
    rows = {r.engine: r for r in find(PROBLEM)}
    assert rows["toy.right"].status == "ok"
    assert rows["toy.wrong"].status == "wrong" and "is over the bound" in rows["toy.wrong"].reason
    assert rows["toy.unbuilt"].status == "failed" and "MemoryError: too big" in rows["toy.unbuilt"].reason
    assert rows["toy.broken"].status == "failed" and rows["toy.broken"].reason == "ZeroDivisionError: oops"
    assert [r.seconds for r in rows.values() if r.engine != "toy.right"] == [None] * 3
    assert {r.engine: r.status for r in Store(own_cache).rows()} == {e: r.status for e, r in rows.items()}
    assert chosen()[0] == "toy.right"


def test_an_engine_found_wrong_is_not_taken_by_estimate(engines):
    """Where nothing passed, the next best guess is not one of those that just failed."""
    engines(Fake("toy.wrong", 0.1, factor=3.0), Fake("toy.broken", 0.2, run_error=ZeroDivisionError()))
    assert chosen(policy="find")[0] == "toy.reference"
    assert chosen(policy="heuristic")[0] == "toy.reference"


def test_deterministic_does_not_time(engines):
    a = Fake("toy.a", 1.0, seconds=0.01)
    engines(a, Fake("toy.b", 2.0))
    assert chosen(policy="find", deterministic=True)[0] == "toy.a"
    assert a.runs == 0


def test_policy_error_without_a_row(engines):
    engines(Fake("toy.a"))
    with pytest.raises(NotSupported, match="policy 'error' and no tuned row for pointwise_fwd x=f32"):
        chosen(policy="error")
    assert chosen(policy="error", engine="toy.a")[0] == "toy.a"


def row(taken, **changes) -> Row:
    fields = {
        "problem": PROBLEM.tuning_key,
        "environment": tuning.environment(PROBLEM),
        "engine": taken.name,
        "source": tuning.source_hash(taken),
        "config": {},
        "seconds": 1e-3,
        "workspace": 0,
    }
    return Row(**(fields | changes))


STALE = {
    "source": "0123456789ab",
    "environment": "another machine",
    "problem": "another problem",
    "config": {"knob": "gone"},
    "status": "wrong",
    "engine": "toy.gone",
}


@pytest.mark.parametrize("field", STALE)
def test_rows_that_no_longer_hold_are_passed_over(engines, own_cache, field):
    slow = Fake("toy.slow", 2.0)
    engines(Fake("toy.fast", 1.0), slow)
    Store(own_cache).put([row(slow)])
    assert chosen()[0] == "toy.slow"
    Store(own_cache).clear()
    Store(own_cache).put([row(slow, **{field: STALE[field]})])
    assert chosen()[0] == "toy.fast"


def test_a_row_over_the_workspace_limit_is_passed_over(engines, own_cache):
    big = Fake("toy.big", 5.0, workspace=100)
    engines(big, Fake("toy.small", 9.0))
    Store(own_cache).put([row(big)])
    assert chosen(workspace_limit=100)[0] == "toy.big"
    assert chosen(workspace_limit=99)[0] == "toy.small"


def test_near_batches_share_a_row(engines, own_cache):
    slow = Fake("toy.slow", 2.0)
    engines(Fake("toy.fast", 1.0), slow)
    five, eight, nine = (Problem.parse(LINE.replace("[4", f"[{n}")) for n in (5, 8, 9))
    Store(own_cache).put([dataclasses.replace(row(slow), problem=eight.tuning_key)])
    names = [choose(p).candidate.engine.name for p in (five, eight, nine)]
    assert names == ["toy.slow", "toy.slow", "toy.fast"]


def test_find_survives_a_directory_it_cannot_write(engines, own_cache, caplog):
    blocked = own_cache / "file"
    blocked.write_text("not a directory")
    a = Fake("toy.slow", 1.0, seconds=0.005)
    b = Fake("toy.fast", 2.0)
    engines(a, b)
    with caplog.at_level(logging.WARNING, "lucidnn"):
        assert chosen(policy="find", cache_dir=blocked)[0] == "toy.fast"
    assert "they last for this process only" in caplog.text
    runs = a.runs + b.runs
    assert chosen(policy="find", cache_dir=blocked)[0] == "toy.fast"
    assert a.runs + b.runs == runs, "timed twice in one process"


# ---- plans -------------------------------------------------------------------------------------------------


def test_explain_says_what_select_does(engines):
    engines(Fake("toy.fast", 1.0), Fake("toy.picky", 0.1, refuses=("needs a, found b",)))
    for settings in ({}, {"engine": "toy.reference"}, {"disable_engines": ("toy.fast",)}, {"workspace_limit": 0}):
        with using(**settings):
            told, did = explain(PROBLEM), select(PROBLEM)
            assert told.choice is not None and told.failure == ""
            assert (told.choice.candidate.engine, told.choice.reason) == (did.engine, did.reason)
            assert told.choice.candidate.config == did.config
            assert {c.engine.name for c in told.candidates} == {"toy.fast", "toy.picky", "toy.reference"}
    with using(engine="toy.picky"):
        told = explain(PROBLEM)
        assert told.choice is None and "needs a, found b" in told.failure


def test_explain_builds_and_runs_nothing(engines):
    a = Fake("toy.a", 1.0)
    engines(a, Fake("toy.b", 2.0))
    for policy in ("heuristic", "error"):
        with using(policy=policy):
            explain(PROBLEM)
    assert a.built == [] and a.runs == 0


def test_a_plan_is_built_once_for_a_problem_and_its_settings(engines):
    a = Fake("toy.a")
    engines(a)
    plan = select(PROBLEM)
    assert select(Problem.parse(LINE)) is plan and len(a.built) == 1
    with using(workspace_limit=10):
        assert select(PROBLEM) is not plan
    planning.forget()
    assert select(PROBLEM) is not plan and len(a.built) == 3


def test_the_memo_is_bounded(engines, monkeypatch):
    engines(Fake("toy.a"))
    monkeypatch.setattr(planning, "MEMO_LIMIT", 5)
    for n in range(1, 40):
        select(Problem.parse(LINE.replace("[4", f"[{n}")))
        assert len(planning._plans) <= 5
    memo: dict[int, int] = {}
    for n in range(23):
        planning.remember(memo, n, n)
        assert len(memo) <= 5 and memo[n] == n


def test_every_choice_is_a_log_line_and_a_last_resort_warns_once(engines, caplog):
    engines()
    with caplog.at_level(logging.INFO, "lucidnn"):
        planning._warned.discard(PROBLEM.text)
        select(PROBLEM)
        planning.forget()
        select(PROBLEM)
    texts = [(r.levelname, r.getMessage()) for r in caplog.records]
    line = f"{PROBLEM} -> toy.reference (the only engine that takes it)"
    assert texts.count(("INFO", line)) == 2
    assert [text for level, text in texts if level == "WARNING"] == [
        f"toy.reference is slow and was the last resort for {PROBLEM}"
    ]


def test_a_build_that_fails_is_the_engines_fault(engines):
    engines(Fake("toy.a", build_error=KeyError("BLOCK_M")))
    with pytest.raises(EngineFailure, match=r"toy\.a accepted pointwise_fwd .* KeyError: 'BLOCK_M'"):
        select(PROBLEM)
    assert (PROBLEM, None) not in planning._plans and not planning._plans


def test_calling_and_executing_a_plan(engines):
    engines(Fake("toy.a", workspace=64))
    plan = select(PROBLEM)
    x = torch.randn(4, 3)
    assert torch.equal(plan(x), 2 * x)
    y = torch.empty(4, 3)
    plan.execute({"x": x, "y": y})
    assert torch.equal(y, 2 * x)
    plan.execute({"y": y.zero_(), "x": x}, workspace=torch.empty(16, dtype=torch.float32))
    assert torch.equal(y, 2 * x)
    with pytest.raises(InvalidArgument, match="y: found a tensor on meta; accepted: cpu, as the others"):
        plan.execute({"x": x, "y": y.to("meta")})
    bad = {
        "x": ({"y": y}, "x: found nothing; accepted: f32"),
        "y": ({"x": x, "y": torch.empty(3, 4).T}, "y: found f32[4,3]@(1,4)"),
        "type": ({"x": x.double(), "y": y}, "x: found f64[4,3]"),
        "shape": ({"x": x[:3], "y": y}, "x: found f32[3,3]"),
        "alignment": ({"x": torch.zeros(13)[1:].view(4, 3), "y": y}, "x: found f32[4,3]@nc%4"),
    }
    for pack, expected in bad.values():
        with pytest.raises(InvalidArgument) as caught:
            plan.execute(pack)
        assert str(caught.value).startswith(expected)
    with pytest.raises(InvalidArgument, match="workspace: found 63 bytes; accepted: 64 bytes"):
        plan.execute({"x": x, "y": y}, workspace=torch.empty(63, dtype=torch.uint8))


def test_nothing_is_launched_where_all_outputs_are_empty(engines):
    a = Fake("toy.a")
    engines(a)
    plan = select(Problem.parse("pointwise_fwd x=f32[0,3] alpha=2.0"))
    assert plan(torch.empty(0, 3)).shape == (0, 3) and a.runs == 0


def test_observing_plans(engines):
    engines(Fake("toy.a"))
    x = torch.ones(4, 3)
    with planning.observe() as outer:
        select(PROBLEM)(x)
        with planning.observe() as inner:
            select(PROBLEM)(x)
        select(PROBLEM)(x)
    select(PROBLEM)(x)
    assert (len(outer), len(inner)) == (3, 1) and outer[0].engine.name == "toy.a"
    assert planning._observers == []
    with pytest.raises(ZeroDivisionError), planning.observe():
        raise ZeroDivisionError
    assert planning._observers == []
