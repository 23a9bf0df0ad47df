import json
from pathlib import Path

from closeranks.telemetry.run_log.sample_log import build_sample_log, read_samples


def row(step: int, micro_batch: int, *samples: int) -> dict[str, object]:
    return {"step": step, "micro_batch": micro_batch, "first": 0, "samples": list(samples), "skipped": []}


def test_a_step_that_was_done_again_counts_once() -> None:
    log = build_sample_log([row(1, 0, 5, 6), row(1, 1, 7, 8), row(2, 0, 1, 2), row(1, 0, 5, 6)])
    assert log.samples_of(1) == (5, 6, 7, 8)
    assert log.samples_of(2) == (1, 2)
    assert log.samples_of(3) == ()
    assert log.conflicts == ()


def test_other_samples_for_the_same_place_are_not_hidden() -> None:
    log = build_sample_log([row(1, 0, 5, 6), row(1, 0, 5, 9)])
    assert log.samples_of(1) == (5, 9)
    assert [taken.samples for taken in log.conflicts] == [(5, 6)]


def test_ranks_of_several_generations_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    first = tmp_path / "metrics" / "samples-00000.jsonl"
    second = tmp_path / "metrics" / "samples-00001.jsonl"
    first.write_text(f"{json.dumps(row(1, 0, 1))}\n{json.dumps(row(1, 1, 2))}\n")
    second.write_text(f"{json.dumps(row(1, 1, 2))}\n{json.dumps(row(2, 0, 3))}\n" + '{"step": 2, "micro')
    log = read_samples(tmp_path)
    assert (log.samples_of(1), log.samples_of(2)) == ((1, 2), (3,))
    assert read_samples(tmp_path / "nowhere").steps == {}
