"""Engines that solve a problem through another engine on a plainer one: settings and notes reach the inside."""

from __future__ import annotations

import pytest

from lucidnn.core import plan
from lucidnn.core.problem import Problem
from lucidnn.core.settings import Settings

LINES = {
    "conv.rewritten": "conv_fprop x=f32[4,64,28,28] w=f32[64,64,3,3] padding=1 padding_mode=reflect on=cpu",
    "conv.dilated_phases": "conv_fprop x=f32[2,64,28,28] w=f32[64,64,3,3] padding=2 dilation=2 on=cpu",
}


@pytest.mark.parametrize("name", LINES)
def test_settings_given_by_hand_reach_the_engine_inside(name):
    problem = Problem.parse(LINES[name])
    free = plan.choose(problem, Settings(engine=name)).candidate
    assert free.config["engine"] == "conv.winograd", "what is kept out below would be taken"
    for settings in (
        Settings(engine=name, exclude_notes=("spreads",)),
        Settings(engine=name, disable_engines=("conv.winograd*",)),
        Settings(engine=name, workspace_limit=free.workspace_size - 1),
    ):
        kept = plan.choose(problem, settings).candidate
        assert kept.config != free.config
        assert settings.workspace_limit is not None or kept.config["engine"] != "conv.winograd"


@pytest.mark.parametrize("name", LINES)
def test_where_nothing_is_left_inside_the_engine_refuses(name):
    problem = Problem.parse(LINES[name])
    settings = Settings(disable_engines=("conv.[!rd]*", "conv.direct*", "conv.depthwise*"))
    (found,) = (c for c in plan.candidates(problem, settings) if c.engine.name == name)
    assert found.refusals and "an engine that takes conv_fprop" in found.refusals[0]
