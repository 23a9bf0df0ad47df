"""The agent's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from closeranks.agent.config import AgentConfig
from closeranks.agent.launch_plan import LaunchPlan
from closeranks.core.errors import SetupError


def test_the_defaults_stay_on_this_host() -> None:
    assert AgentConfig() == AgentConfig(grace_s=30.0, interrupt_s=1.5, port=0, host="127.0.0.1")


@pytest.mark.parametrize("change", [{"port": -1}, {"port": 70000}, {"grace_s": -1}, {"grce_s": 3}])
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        AgentConfig.model_validate(change)


def test_a_plan_without_workers_is_refused() -> None:
    with pytest.raises(SetupError, match="0 workers cannot be started"):
        LaunchPlan(0, "a:b", Path("logs"), {}, AgentConfig())
