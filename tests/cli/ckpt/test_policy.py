"""``closeranks ckpt policy``: what it prints and draws, what it takes from a run, and how it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from closeranks.checkpoint.config import CheckpointConfig
from closeranks.core.events import RunEnded, RunStarted, Saved, StepDone, encode
from closeranks.telemetry.run_log.recorder import to_line
from tests.cli.ckpt.calling import ckpt
from tests.cli.commands import ROOT, closeranks


def said(*words: object) -> str:
    done = ckpt("policy", *words)
    assert done.code == 0, done.err
    return done.out


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def test_it_prints_everything_a_person_decides_by() -> None:
    text = said("--mtbf", "3h")
    for part in (
        "24 h of work on preemptible machines, a failure every 3 h: save every 70 s; 1.5% of the time is lost.",
        "local disk", "store", "redo per failure", "never", "every 15 min, blocking", "every step", "recommended",
        "Many such jobs on one store", "at once: after", "23 to 24 h", "a month at $0.023 per GB",
    ):  # fmt: skip
        assert part in text, part
    rows = [line.split()[0] for line in text.partition("Many such jobs")[2].splitlines()[2:6]]
    assert rows == ["1", "4", "16", "64"]


def test_the_table_can_be_pasted() -> None:
    table = said().partition("Recommended:")[2]
    config = CheckpointConfig.model_validate(tomllib.loads(table)["checkpoint"])
    assert (config.every, config.mtbf) == ("auto", "3h")


def test_options_reach_the_model() -> None:
    found = figures(
        "--mtbf", "8h", "--save-cost", "0.5s", "--durable", "20s", "--restart", "2min", "--step", "0.25s", "--state",
        "512MiB", "--remote-bandwidth", "2GB/s", "--price", 0.1, "--jobs", 5, "--length", "48h", "--machine-loss", 0.5,
        "--drag", 0, "--keep", 7, "--on-demand",
    )["situation"]  # fmt: skip
    assert found == {
        "mtbf_s": 8 * 3600, "length_s": 48 * 3600, "step_s": 0.25, "state_bytes": 512 * 2**20, "stall_s": 0.5,
        "durable_s": 20.0, "restart_s": 120.0, "remote_bytes_per_s": 2e9, "num_jobs": 5, "machine_loss": 0.5,
        "drag": 0.0, "price": 0.1, "keep_last": 7, "is_preemptible": False,
    }  # fmt: skip
    assert figures("--state", "30GB", "--bandwidth", "3GB/s")["situation"]["durable_s"] == pytest.approx(10.0)


def test_ranks_stand_for_a_fleet() -> None:
    assert figures("--ranks", 1024)["situation"]["mtbf_s"] == pytest.approx(7.9 * 3600)
    assert figures("--on-demand")["situation"]["mtbf_s"] == 24 * 3600
    assert figures()["situation"]["mtbf_s"] == 3 * 3600


def test_json_knows_no_infinity() -> None:
    found = figures("--mtbf", "1min")
    assert found["habits"][0]["period_s"] is None
    assert 0 < found["waste"] < 1
    assert found["table"].startswith("[checkpoint]")


def make_run(folder: Path, *events: Any) -> Path:
    (folder / "metrics").mkdir(parents=True)
    lines = [to_line({"at": float(number), "rank": 0, **encode(event)}) for number, event in enumerate(events)]
    (folder / "metrics" / "rank-00000.jsonl").write_bytes(b"".join(lines))
    return folder


def test_a_run_tells_what_it_measured(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        RunStarted(world_size=2048),
        *(StepDone(step=step, seconds=0.4) for step in range(1, 9)),
        Saved(step=2, bytes=4_000_000_000, seconds=5.0, stall_s=0.3),
        Saved(step=4, bytes=4_000_000_000, seconds=4.0, stall_s=0.2),
        Saved(step=4, bytes=4_000_000_000, seconds=12.0, stall_s=0.2, tier="remote"),
        Saved(step=6, bytes=4_000_000_000, seconds=3.0, stall_s=0.1),
        RunEnded(step=8, seconds=3600.0),
    )
    found = figures("--run", run)["situation"]
    assert (found["stall_s"], found["durable_s"], found["step_s"]) == (0.2, 4.0, 0.4)
    assert (found["state_bytes"], found["remote_bytes_per_s"]) == (4e9, 5e8)
    assert found["mtbf_s"] == pytest.approx((7.9 / 2 + 1) * 3600)
    assert "measured in 3 saves" in said("--run", run)
    given = figures("--run", run, "--mtbf", "2h", "--save-cost", "1s", "--durable", "9s", "--remote-bandwidth", "1GB/s")
    assert [given["situation"][name] for name in ("mtbf_s", "stall_s", "durable_s", "remote_bytes_per_s")] == [
        7200.0, 1.0, 9.0, 1e9,
    ]  # fmt: skip


def test_the_page_shows_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "checkpoint-policy.md").read_text()
    told, _, table = said("--mtbf", "3h", "--state", "14GB").partition("Recommended:")
    assert told.strip() in page
    assert table.strip() in page


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "policy.png"
    assert f"picture: {path}" in said("--picture", path).replace("\n", " ")
    assert path.read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "folder.png"
    path.mkdir()
    done = ckpt("policy", "--picture", path)
    assert done.code == 2
    assert f"{path} cannot be written" in done.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--mtbf", "often"], "--mtbf: 'often' is not a duration. Write it like 90s, 10min or 3h."),
        (["--length", "0h"], "--length: '0h' is not a duration"),
        (["--state", "much"], "--state: 'much' is not a number of bytes. Write it like 14GB"),
        (["--state", "0GB"], "--state: '0GB' must be above 0"),
        (["--bandwidth", "0B/s"], "--bandwidth: '0B/s' must be above 0"),
        (["--remote-bandwidth", "-1GB"], "--remote-bandwidth: '-1GB' is not a number of bytes"),
        (["--run", "nowhere"], "nowhere is not a run folder"),
        (["--picture", "nowhere/a.png"], "there is no folder nowhere"),
        (["--picture", "a.pdf"], "a.pdf does not end in .png"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], what: str) -> None:
    done = ckpt("policy", *words)
    assert what in done.err
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_a_run_that_saved_nothing_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RunStarted(), StepDone(step=1))
    done = ckpt("policy", "--run", run)
    assert done.code == 2
    assert "saved nothing yet" in done.err


def test_the_command_itself(tmp_path: Path) -> None:
    """Through the front door: help, an answer without torch, and a refusal that exits 2."""
    done = closeranks("ckpt", "policy", "--help", cwd=tmp_path)
    assert done.code == 0
    assert done.out.count("    closeranks ckpt policy ") >= 4
    blocked = tmp_path / "torch.py"
    blocked.write_text("raise SystemExit('torch was imported')")
    done = closeranks("ckpt", "policy", "--mtbf", "3h", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done.err
    assert 'every = "auto"' in done.out
    done = closeranks("ckpt", "policy", "--mtbf", "never", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("closeranks: --mtbf: 'never' is not a duration")
    assert "Traceback" not in done.err
