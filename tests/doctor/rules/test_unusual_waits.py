"""Rules about many small collectives, and about more threads than processors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from closeranks.core.events import Resources
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.finding import Finding
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import even, facts


def _findings(made: RunFacts) -> tuple[Finding, ...]:
    diagnosis = diagnose(made)
    assert diagnosis.failed_rules == ()
    return diagnosis.findings


def _sending(made: RunFacts, name: str, calls: int, num_bytes: int) -> RunFacts:
    def row(one: Any) -> Any:
        return replace(one, calls={name: calls}, sent_bytes={name: num_bytes})

    return replace(made, times={rank: tuple(map(row, own)) for rank, own in made.times.items()})


@pytest.mark.parametrize(
    ("calls", "num_bytes", "bucket_mib", "found"),
    [
        (200, 200 * 4, 25.0, "small-collectives"),
        (200, 200 << 20, 25.0, "exposed-communication"),
        (4, 4 * 4, 25.0, "exposed-communication"),
        (200, 200 * 4, 0.5, "exposed-communication"),
    ],
    ids=["many small ones", "large ones", "few", "buckets have a rule of their own"],
)
def test_many_small_collectives(calls: int, num_bytes: int, bucket_mib: float, found: str) -> None:
    made = facts(*even({"data.all_reduce": 0.1}), started={"num_trainable": 1_000_000, "bucket_mib": bucket_mib})
    (first,) = _findings(_sending(made, "data.all_reduce", calls, num_bytes))
    assert first.cause == found
    if found == "small-collectives":
        assert first.gain == pytest.approx(0.5, rel=0.02)
        assert "200 in a step, with 4 bytes each" in first.evidence


def _used(cpus: float, waits: float = 0.0, **host: float) -> Resources:
    return Resources(
        seconds=5.0,
        process={"cpus": cpus, "run_wait_share": waits},
        host_wide={"cpus": 2 * cpus, "num_cpus": 2.0, **host},
    )


@pytest.mark.parametrize(("threads", "found"), [(1, []), (4, ["too-many-threads"]), ("auto", [])])
def test_more_threads_than_processors(threads: int | str, found: list[str]) -> None:
    used = {rank: _used(1.0, 0.6) for rank in (0, 1)}
    findings = _findings(facts({}, {}, used=used, settings={"run": {"threads": threads}}))
    assert [one.cause for one in findings] == found
    assert [str(change) for one in findings for change in one.changes] == ["run.threads=1"] * len(found)
