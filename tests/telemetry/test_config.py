import pytest
from pydantic import ValidationError

from closeranks.telemetry.config import TelemetryConfig


def test_defaults_stand() -> None:
    assert TelemetryConfig().model_dump() == {"log_every": 10, "tensorboard": False, "report": True, "profile": ""}


def test_a_window_that_does_not_read_is_found_with_its_fix() -> None:
    with pytest.raises(ValidationError, match='Write "10:13"'):
        TelemetryConfig(profile="ten")


def test_lines_cannot_be_logged_every_zero_steps() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TelemetryConfig(log_every=0)
