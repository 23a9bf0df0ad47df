"""Whole jobs on two workers, as a person starts them: what they reach and everything they write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from closeranks.core.events import Evaluated, RunStarted, Saved, StepDone
from tests.cli.commands import ROOT, Done, closeranks
from tests.run.small import of_kind

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def digits(folder: Path) -> Done:
    """Half of the example's eight epochs, watched by everything that can watch."""
    options = ["run.folder=digits", "train.epochs=4", "telemetry.tensorboard=true", "--profile", "3:5"]
    return closeranks("train", ROOT / "examples" / "digits.toml", "-n", 2, *options, cwd=folder)


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Done:
    options = ["run.folder=pairs", "train.eval_every=10", "telemetry.report=false"]
    return closeranks("train", ROOT / "examples" / "pairs.toml", "-n", 2, *options, cwd=folder)


def test_digits_are_learned(digits: Done, folder: Path) -> None:
    assert digits.code == 0, digits.err
    evaluations = of_kind(folder / "digits", Evaluated)
    assert evaluations[-1].metrics["accuracy"] > 0.95
    assert evaluations[-1].weight == 359, "a fifth of the images, each once"
    assert not digits.left_behind


def test_both_ranks_tell_the_same_story(digits: Done, folder: Path) -> None:
    first, second = (
        [(e.step, e.loss, e.metrics) for e in of_kind(folder / "digits", StepDone, rank)] for rank in (0, 1)
    )
    assert first == second
    assert [started.world_size for rank in (0, 1) for started in of_kind(folder / "digits", RunStarted, rank)] == [2, 2]
    assert of_kind(folder / "digits", Saved)[-1].step == 90  # a slow machine saves on the way as well
    assert of_kind(folder / "digits", Saved, 1) == [], "rank 0 writes"


def test_tensorboard_shows_what_the_metrics_say(digits: Done, folder: Path) -> None:
    assert list((folder / "digits" / "tensorboard").glob("events.out.tfevents.*"))
    board = EventAccumulator(str(folder / "digits" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    done, evaluations = of_kind(folder / "digits", StepDone), of_kind(folder / "digits", Evaluated)
    shown = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert [step for step, _ in shown["train/loss"]] == [event.step for event in done]
    assert [value for _, value in shown["train/loss"]] == pytest.approx([event.loss for event in done], rel=1e-6)
    assert [value for _, value in shown["train/lr"]] == pytest.approx([event.lr for event in done], rel=1e-6)
    assert [step for step, _ in shown["eval/accuracy"]] == [event.step for event in evaluations]
    assert [value for _, value in shown["eval/accuracy"]] == pytest.approx(
        [event.metrics["accuracy"] for event in evaluations], rel=1e-6
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_profile_holds_the_steps_it_was_asked_for_and_no_others(digits: Done, folder: Path, rank: int) -> None:
    with gzip.open(folder / "digits" / "traces" / f"rank-{rank:05d}.json.gz") as file:
        trace: dict[str, Any] = json.load(file)
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
    assert any("convolution" in name for name in names), "what the steps did is in it"


def test_the_run_has_its_page_and_its_picture(digits: Done, folder: Path) -> None:
    assert "report: digits/report.md" in digits.out
    page = (folder / "digits" / "report.md").read_text()
    assert "accuracy" in page
    assert (folder / "digits" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_pairs_report_both_losses(pairs: Done, folder: Path) -> None:
    assert pairs.code == 0, pairs.err
    for done in (*of_kind(folder / "pairs", StepDone), *of_kind(folder / "pairs", Evaluated)):
        assert set(done.metrics) == {"click_loss", "rating_loss"}
        both = done.metrics["click_loss"] + 0.5 * done.metrics["rating_loss"]
        assert done.loss == pytest.approx(both, rel=1e-5), "the example weighs the rating by a half"
    first, *_, last = of_kind(folder / "pairs", Evaluated)
    assert last.metrics["click_loss"] < first.metrics["click_loss"]
    assert last.metrics["rating_loss"] < first.metrics["rating_loss"]
    assert "click loss" in pairs.out.replace("_", " ")
    assert "rating loss" in pairs.out.replace("_", " ")
