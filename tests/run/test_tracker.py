"""Trackers hear of steps and evaluations on rank 0, and cannot end a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from closeranks import Session, Tracker
from closeranks.core.events import Warned
from tests.run.small import counted, dataset, of_kind, train

pytestmark = pytest.mark.usefixtures("alone")


class Heard(Tracker):
    def __init__(self, every: int = 1, fails_in: str = "") -> None:
        super().__init__(every)
        self.calls: list[str] = []
        self.figures: dict[str, float] = {}
        self._fails_in = fails_in

    def _hear(self, what: str) -> None:
        self.calls.append(what)
        if self._fails_in and what.startswith(self._fails_in):
            raise ConnectionError("the tracker's server is gone")

    def start(self, session: Session) -> None:
        self._hear("start")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.figures |= figures
        self._hear(f"log {step}")

    def end(self, session: Session) -> None:
        self._hear(f"end {session.result.reason}")


def test_hears_of_every_nth_step_and_all_evaluations(tmp_path: Path) -> None:
    heard = Heard(every=2)
    keys = {"hooks": [heard], "loss": counted, "metrics": ["accuracy"], "eval_data": dataset(seed=1)}
    train(tmp_path, **keys, train={"steps": 5})
    assert heard.calls == ["start", "log 2", "log 4", "log 5", "end finished"]
    assert {"loss", "lr", "grad_norm", "items_per_s", "accuracy", "eval/loss", "eval/accuracy"} == set(heard.figures)


@pytest.mark.parametrize("place", ["start", "log 2", "end"])
def test_one_that_fails_is_named_once_and_training_goes_on(tmp_path: Path, place: str) -> None:
    heard, other = Heard(fails_in=place), Heard()
    result = train(tmp_path, hooks=[heard, other], train={"steps": 4})
    assert result.reason == "finished"
    assert result.steps == 4
    assert heard.calls[-1].startswith(place), "it is not called again"
    assert other.calls == ["start", "log 1", "log 2", "log 3", "log 4", "end finished"]
    (told,) = [event.what for event in of_kind(tmp_path, Warned) if "tracker" in event.what]
    assert "Heard is disabled for the rest of the run" in told
    assert "the tracker's server is gone" in told
