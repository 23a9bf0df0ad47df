import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import (
    FlopsCounted,
    HostChanged,
    NoiseSeen,
    RankLost,
    RanksClosed,
    Restored,
    Saved,
    SlowRank,
    Snapshotting,
    Warned,
)
from closeranks.telemetry.reports.report import write_report
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder
from tests.telemetry.conftest import CPU, step


def add(folder: Path, *events: object, rank: int = 0) -> None:
    recorder = EventRecorder(folder, rank)
    for event in events:
        recorder.emit(event)  # type: ignore[arg-type]
    recorder.close()


def test_the_verdict_comes_first(make_run: Callable[..., Path]) -> None:
    path = write_report(make_run())
    assert path.name == "report.md"
    assert path.read_text().splitlines()[:3] == [
        "# demo",
        "",
        "Trained 40 steps on 2 workers in 31 s; loss 5.12 -> 1.57; eval 1.60, accuracy 0.961.",
    ]


def test_the_figures_are_those_that_were_recorded(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run()).read_text()
    for row in (
        "| model | llama, 1.20M parameters |",
        "| workers | 2 × Intel Xeon Processor, float32 |",
        "| steps | 1 to 40, 40.0k tokens |",
        "| throughput | 10.0k tok/s on average, without first steps, evaluation and saving |",
        "| share of peak | 3.0% of the measured matmul peak (no datasheet for this device, so no MFU) |",
        "| memory | 1.0 GiB resident in rank 0's process |",
        "| waiting for data | 1.0% of the steps' time |",
        "| checkpoint | `step-00000040`, 5 B |",
    ):
        assert row in text
    assert "torch 2.13.0, python 3.11.7" in text
    assert "![" not in text, "no picture was drawn, so none is shown"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "llama", "preset": "tiny", "dim": None}, "llama tiny, 1.20M parameters"),
        (
            {"name": "llama", "preset": "tiny", "dim": 64, "num_layers": 2},
            "llama with dim 64, num_layers 2, the rest as in tiny, 1.20M parameters",
        ),
        ({"name": "own:model"}, "own:model, 1.20M parameters"),
    ],
)
def test_a_preset_with_another_shape_is_not_called_by_its_name(
    make_run: Callable[..., Path], model: dict[str, object], said: str
) -> None:
    folder = make_run()
    (folder / "config.json").write_text(json.dumps({"model": model}))
    assert f"| model | {said} |" in write_report(folder).read_text()


def test_the_batch_is_told_with_its_micro_batches(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(replace(CPU, global_batch=32, micro_batch=4))).read_text()
    assert "| batch | 32 = 8 micro-batches of 4 samples" in text


def test_the_scaled_rate_and_the_last_noise_scale_are_told(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    assert "| noise" not in write_report(folder).read_text()
    add(folder, replace(CPU, first_step=40, rate="learning rate 1.6 = 0.1 x 16"), NoiseSeen(41, 100.0, 8))
    add(folder, NoiseSeen(42, 480.0, 8), NoiseSeen(43, None, 8))
    text = write_report(folder).read_text()
    assert "| learning rate | 1.6 = 0.1 x 16 |" in text
    assert "| noise | noise scale about 480 samples; a step now has 8: a larger batch still helps |" in text


def test_a_picture_that_was_drawn_is_shown(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "curve.png").touch()
    assert "](curve.png)" in write_report(folder).read_text()


def test_going_on_repeats_what_was_typed_with_more_steps(make_run: Callable[..., Path]) -> None:
    folder = make_run(name="my run")
    overrides = ("train.steps=40", "optim.lr=0.01", "checkpoint.resume=old")
    text = write_report(folder, job_file="job.toml", overrides=overrides).read_text()
    assert f"closeranks train job.toml -n 2 optim.lr=0.01 train.steps=80 'checkpoint.resume={folder}'\n" in text
    assert f"closeranks sample '{folder}' 'import '\n" in text


def test_a_run_by_epochs_goes_on_by_epochs(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "config.json").write_text(json.dumps({"train": {"steps": None, "epochs": 1.5}}))
    text = write_report(folder, job_file="job.toml", overrides=("~train.steps", "train.epochs=1.5")).read_text()
    assert f"closeranks train job.toml -n 2 '~train.steps' train.epochs=3 checkpoint.resume={folder}\n" in text
    in_python = write_report(folder, is_script=True).read_text()
    assert f'train={{"epochs": 3, ...}}, checkpoint={{"resume": "{folder}"}}' in in_python


def test_only_token_models_are_sampled(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(replace(CPU, item="sample"))).read_text()
    assert "closeranks sample" not in text
    assert "10.0k samples/s" in text


def test_mfu_stands_where_a_datasheet_is_known(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(replace(CPU, device="NVIDIA H200", datasheet_flops=2.5e12))).read_text()
    assert "| MFU | 1.5% (3.0% of the measured matmul peak) |" in text
    assert "at its peak on rank 0's device" in text


def test_counted_flops_make_mfu_and_others_are_explained(make_run: Callable[..., Path]) -> None:
    own = replace(CPU, device="NVIDIA H200", datasheet_flops=2.5e12, flops_per_item=0.0)
    folder = make_run(own)
    add(folder, FlopsCounted(7.5e6, 7.5e6))
    assert "| MFU | 1.5% (3.0% of the measured matmul peak) |" in write_report(folder).read_text()
    add(folder, FlopsCounted(why="its code reads a | b"))
    said = "| MFU | not shown, as FLOPs could not be counted: its code reads a / b |"
    assert said in write_report(folder).read_text()


def test_a_drained_run_goes_on_to_its_own_end(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(num_steps=25, reason="drained")
    (tmp_path / "state").write_bytes(b"x")
    add(folder, Saved(step=25, path=str(tmp_path / "state"), bytes=1 << 20))
    text = write_report(folder, overrides=("train.steps=40",)).read_text()
    assert "It was asked to stop and ended cleanly at step 25 of 40." in text
    assert f"closeranks train {folder}/job.toml -n 2 train.steps=40 checkpoint.resume={tmp_path}/state\n" in text
    assert "| checkpoint | `state`, 1.0 MiB |" in text


def test_a_failed_run_says_what_went_wrong_and_starts_again_without_a_state(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(num_steps=3, reason="failed"), failure="rank 1 was killed by signal 9\n").read_text()
    assert "**It failed** after step 3 of 40." in text
    assert "```text\nrank 1 was killed by signal 9\n```" in text
    assert "No state was saved to resume from." in text


def test_a_run_that_vanished_is_called_so(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(num_steps=3, reason="")).read_text()
    assert "**It did not end cleanly**: nothing was recorded after step 3 of 40." in text


def test_a_folder_without_steps_is_reported_honestly(tmp_path: Path) -> None:
    text = write_report(tmp_path, failure="the model could not be built").read_text()
    assert "No step was recorded" in text
    assert "the model could not be built" in text


def test_a_run_of_one_step_claims_no_throughput(make_run: Callable[..., Path]) -> None:
    assert "| throughput | too short to measure" in write_report(make_run(num_steps=1)).read_text()


def test_skipped_steps_and_warnings_are_told(make_run: Callable[..., Path]) -> None:
    folder = make_run(num_steps=20, reason="")
    add(folder, step(21, taken=False, loss=float("nan")), *(Warned(f"warning {n}", step=n) for n in range(12)))
    add(folder, Warned("warning 0", step=5))
    text = write_report(folder).read_text()
    assert "(1 skipped); loss 5.12 -> 2.04" in text
    assert "- warning 0 (step 0, 2 times)" in text
    assert "- and 2 more, in the metrics files" in text


def test_a_run_in_which_no_update_was_taken_says_so(tmp_path: Path) -> None:
    add(tmp_path, CPU, step(1, taken=False, loss=float("nan")))
    assert "no update was taken: the gradients of every step were not finite" in write_report(tmp_path).read_text()


def test_a_scripts_run_goes_on_in_python(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (tmp_path / "state").write_bytes(b"x")
    add(folder, Saved(step=40, path=str(tmp_path / "state"), bytes=1))
    text = write_report(folder, is_script=True).read_text()
    assert f'Session(..., train={{"steps": 80, ...}}, checkpoint={{"resume": "{tmp_path}/state"}})' in text
    assert "closeranks train" not in text


def test_bad_samples_have_a_row_of_their_own(make_run: Callable[..., Path]) -> None:
    folder = make_run(num_steps=2)
    assert "bad samples" not in write_report(folder).read_text()
    add(folder, replace(step(3), num_bad=39))
    rows = write_report(folder).read_text().splitlines()
    assert "| bad samples | 39 skipped and excluded from the loss |" in rows
    assert not any("waiting for data" in row and "skipped" in row for row in rows)


def test_faults_have_a_section_with_what_they_cost(make_run: Callable[..., Path]) -> None:
    folder = make_run(num_steps=20, reason="")
    add(
        folder,
        Snapshotting(3, 1, 30 << 20, 0.002, "replica"),
        replace(CPU, generation=1, first_step=19),
        Restored(19, "memory", 1, 0.02),
        *(step(number) for number in range(20, 41)),
    )
    add(
        folder,
        RankLost(0, 1, "", 21, "killed", "killed | by SIGKILL", 0.05),
        RanksClosed(1, 20, 0.93, 1, 2, "data=2"),
        SlowRank(0, "", 30, 2.0, 0.2, 0.1),
        HostChanged("b", "joined", "", 2),
        rank=AGENT,
    )
    text = write_report(folder).read_text()
    assert "closed ranks after 1 fault." in text.splitlines()[2]
    rows = [line for line in text.split("## Faults")[1].splitlines() if line.startswith("|")]
    assert re.fullmatch(
        r"\| 0:0\d \| rank 1 lost at step 21 \(killed / by SIGKILL\) \| 50 ms \| 0.9 s \| 1 "
        r"\| 2 workers, data=2, from memory \|",
        rows[2],
    )
    assert "rank 0 is slow at step 30" in rows[3]
    assert "host b joined with 2 workers" in rows[4]
    assert "1 fault: 1.0 s" in text
    assert "in doing 1 finished step again." in text
    assert "State kept in memory every step (30.0 MiB a rank, a second copy in each replica; 2 ms a copy)." in text
    assert "| steps | 1 to 40, 40.0k tokens |" in text, "each step counts once, and a fault is no restart"
    assert "faults 1.0 s" in text


def test_a_run_without_faults_says_so_in_a_sentence(make_run: Callable[..., Path]) -> None:
    section = write_report(make_run()).read_text().split("## Faults")[1].split("##")[0]
    assert section.strip() == "None was recorded."
    failed = write_report(make_run(name="failed", reason="failed"), failure="rank 1 was killed").read_text()
    assert "## Faults" not in failed, "its own account says why"


def test_many_faults_do_not_flood_the_page(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    for generation in range(60):
        lost, closed = RankLost(generation, 1, "", 20, "killed"), RanksClosed(generation + 1, 20, 1.0, 1, 2)
        add(folder, lost, closed, rank=AGENT)
    text = write_report(folder).read_text()
    assert text.count("rank 1 lost") == 40
    assert "And 20 more, in `metrics/agent.jsonl`." in text
    assert "60 faults: 1 min 0 s" in text


def test_the_number_behind_a_checkpoint_is_explained(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(num_steps=40)
    (tmp_path / "step-00000040-2").mkdir()
    add(folder, Saved(step=40, path=str(tmp_path / "step-00000040-2"), bytes=1))
    page = write_report(folder).read_text()
    assert "`step-00000040-2` (-2: saved after the run was opened again; a higher number is always newer), 1 B" in page
