import pytest
from pydantic import ValidationError

from closeranks.telemetry.config import TelemetryConfig


def test_defaults_stand() -> None:
    assert TelemetryConfig().model_dump() == {
        "log_every": 10,
        "tensorboard": False,
        "prometheus": {"listen": "", "token_file": ""},
        "otlp": {"endpoint": "", "every_s": 10.0},
        "mlflow": {"experiment": "", "tracking_uri": "", "every": 10},
        "wandb": {"project": "", "entity": "", "mode": "", "every": 10},
        "report": True,
        "profile": "",
        "prices": "",
        "target_loss": None,
        "phases": True,
        "count_flops": False,
        "sample_s": 5.0,
        "nvtx": "auto",
    }


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_resources_cannot_be_sampled_never_or_before_now(seconds: float) -> None:
    with pytest.raises(ValidationError, match="sample_s"):
        TelemetryConfig(sample_s=seconds)


def test_ranges_are_marked_always_never_or_for_a_profiler() -> None:
    assert [TelemetryConfig(nvtx=value).nvtx for value in (True, False, "auto")] == [True, False, "auto"]
    with pytest.raises(ValidationError, match="nvtx"):
        TelemetryConfig.model_validate({"nvtx": "maybe"})


def test_a_window_that_does_not_read_is_found_with_its_fix() -> None:
    with pytest.raises(ValidationError, match='Write "10:13"'):
        TelemetryConfig(profile="ten")


def test_lines_cannot_be_logged_every_zero_steps() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TelemetryConfig(log_every=0)
