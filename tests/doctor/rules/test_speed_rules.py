"""Every rule about speed: it finds its cause with the change to make, and is silent without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from closeranks.core.events import Resources, Saved
from closeranks.doctor.diagnose import RULES, diagnose
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import NUM, even, facts

GPU = {"device": "NVIDIA H200"}


@dataclass(frozen=True)
class Case:
    cause: str
    slow: Callable[[], RunFacts]
    gain: float
    """Expected; a share of the step."""
    change: str = ""
    """How the first change begins."""


def _slow(*ranks: Any, **more: Any) -> Callable[[], RunFacts]:
    return lambda: facts(*ranks, **more)


def _alternating(slow: Mapping[str, float]) -> Callable[[], RunFacts]:
    """Two ranks that are slow in turn."""
    rows: list[list[Mapping[str, float]]] = [
        [slow if step % 2 == rank else {} for step in range(NUM)] for rank in (0, 1)
    ]
    return lambda: facts(*rows)


CASES = {
    "data": Case(
        "input-bound",
        _slow({"data": 0.1}, settings={"data": {"workers": 0}}, done={"data_decode_s": 0.2}),
        0.5,
        "data.workers=3",
    ),
    "copy": Case("host-to-device", _slow({"host_to_device": 0.1}, started=GPU), 0.5),
    "slow link": Case(
        "exposed-communication",
        _slow(*even({"data.all_reduce": 0.1}), started={"num_trainable": 1_000_000}),
        0.5 * (1 - 1 / 3.9),
        'sync.compress.name="int8"',
    ),
    "fast link": Case(
        "exposed-communication",
        _slow(*even({"data.all_reduce": 0.1}), started={"num_trainable": 100_000_000}),
        0.25,
        "train.global_batch=64",
    ),
    "no overlap": Case(
        "exposed-communication",
        _slow(*even({"data.all_reduce": 0.1}), settings={"sync": {"overlap": False}}),
        0.25,
        "sync.overlap=true",
    ),
    "tensor axis": Case(
        "exposed-communication", _slow(*even({"tensor.all_gather": 0.1}), started={"layout": "tensor=2"}), 0.25
    ),
    "buckets": Case(
        "small-collectives",
        _slow(*even({"data.all_reduce": 0.1}), started={"bucket_mib": 0.01, "num_trainable": 1_000_000}),
        0.5,
        "sync.bucket_mib=25.0",
    ),
    "buckets that backward is slow to start": Case(
        "small-collectives",
        _slow(
            *even({"data.all_reduce": 0.04, "backward": 0.12}),
            started={"bucket_mib": 0.01, "num_trainable": 1_000_000},
        ),
        0.5,
        "sync.bucket_mib=25.0",
    ),
    "straggler": Case("straggler", _slow({"forward": 0.13}, {"vote": 0.102}), 0.5, 'elastic.stragglers="evict"'),
    "uneven": Case("uneven-batches", _alternating({"forward": 0.13}), 0.333),
    "recompute": Case(
        "needless-recompute",
        _slow(
            {},
            settings={"train": {"recompute": "full"}},
            done={"memory_bytes": 1 << 30},
            started={"device_memory_bytes": 16 << 30},
        ),
        0.27,
        'train.recompute="none"',
    ),
    "small micro-batch": Case(
        "small-micro-batch",
        _slow(
            {},
            done={"memory_bytes": 1 << 30},
            started={"device_memory_bytes": 64 << 30, "measured_flops": 1e12, "flops_per_item": 1e6},
        ),
        8 * 0.003 / 0.1 * 7 / 8,
        "train.micro_batch=32",
    ),
    "small micro-batch, of unknown FLOPs": Case(
        "small-micro-batch",
        _slow(
            {},
            done={"memory_bytes": 1 << 30},
            started={"device_memory_bytes": 64 << 30, "micro_batch": 1},
        ),
        0.9 * 7 / 8,
        "train.micro_batch=8",
    ),
    "no compile, of a known speed": Case(
        "no-compile",
        _slow(
            {},
            settings={"train": {"compile": False}},
            started={**GPU, "measured_flops": 1e12, "flops_per_item": 0.2 * 1e12 * 0.09 / 64, "micro_batch": 32},
        ),
        0.9 * 0.5 * 0.8,
        "train.compile=true",
    ),
    "recompilation": Case("recompilation", _slow({"compile": 0.1}), 0.5),
    "no compile": Case(
        "no-compile", _slow({}, settings={"train": {"compile": False}}, started=GPU), 0.18, "train.compile=true"
    ),
    "saves": Case(
        "save-stalls", _slow({"save": 0.1}, settings={"checkpoint": {"every": 1}}), 0.48, "checkpoint.every=25"
    ),
    "snapshots": Case(
        "snapshot-cost",
        _slow({"snapshot": 0.1}, settings={"elastic": {"snapshot_every": 1}}),
        0.48,
        'elastic.snapshot_every="auto"',
    ),
    "evaluation": Case(
        "frequent-evaluation",
        _slow({"evaluation": 0.1}, settings={"train": {"eval_every": 1}}),
        0.475,
        "train.eval_every=20",
    ),
    "collection": Case(
        "garbage-collection", _slow({"gc": 0.1}, settings={"train": {"gc_every": 1}}), 0.495, "train.gc_every=100"
    ),
    "hooks": Case("user-code", _slow({"user_code": 0.1}), 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_with_its_change_and_gain(name: str) -> None:
    case = CASES[name]
    first = diagnose(case.slow()).findings[0]
    assert first.cause == case.cause
    assert first.gain == pytest.approx(case.gain, rel=0.05)
    assert first.evidence
    assert first.advice
    assert str(first.changes[0] if first.changes else "").startswith(case.change)
    assert bool(first.changes) == bool(case.change)


def test_a_bubble_asks_for_smaller_micro_batches() -> None:
    """Two micro-batches in a pipeline of two ranks: a bubble of a third."""
    about = {"layout": "pipeline=2"}
    made = facts(*even({"pipeline.receive": 0.05}), started=about)
    assert not diagnose(made).findings  # eight micro-batches: a bubble of a ninth, as it must be
    few = facts(*even({"pipeline.receive": 0.05}), started={**about, "micro_batch": 16})
    finding = diagnose(few).findings[0]
    assert finding.cause == "pipeline-bubble"
    assert str(finding.changes[0]) == "train.micro_batch=4"
    assert finding.gain == pytest.approx(1 - (2 / 3) / (8 / 9), rel=0.01)


def test_smaller_micro_batches_are_not_advised_where_they_cost_as_much_as_they_save() -> None:
    """Computing is far from the peak: what it takes beyond arithmetic is taken for a cost of each micro-batch."""
    about = {"layout": "pipeline=2", "micro_batch": 16, "measured_flops": 1e12}
    for reached, changes in ((0.9, ["train.micro_batch=4"]), (0.1, [])):
        flops_per_item = reached * 1e12 * 2 * 0.09 / 64
        made = facts(*even({"pipeline.receive": 0.05}), started={**about, "flops_per_item": flops_per_item})
        finding = diagnose(made).findings[0]
        assert finding.cause == "pipeline-bubble"
        assert [str(change) for change in finding.changes] == changes


@pytest.mark.parametrize(("waits", "found"), [(0.0, []), (0.6, ["small-micro-batch"])])
def test_micro_batches_of_unknown_flops_must_be_short_without_other_programs(waits: float, found: list[str]) -> None:
    """Four of one sample, 22.5 ms each: too long, unless they waited for a processor for more than half of it."""
    used = {0: Resources(seconds=5.0, process={"run_wait_share": waits})}
    about = {"micro_batch": 1, "global_batch": 4, "device_memory_bytes": 64 << 30}
    made = facts(started=about, done={"memory_bytes": 1 << 30}, used=used)
    assert [one.cause for one in diagnose(made).findings] == found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("settings", [{}, {"train": {"compile": False, "recompute": "none", "eval_every": 10}}])
def test_a_healthy_run_has_no_finding(num_ranks: int, settings: dict[str, Any]) -> None:
    diagnosis = diagnose(facts(*even({"data.all_reduce": 0.005}, num_ranks), settings=settings))
    assert diagnosis.findings == ()
    assert diagnosis.failed_rules == ()


def test_one_rank_that_waits_for_data_is_input_bound_and_not_a_straggler() -> None:
    diagnosis = diagnose(facts({"data": 0.1}, {"vote": 0.1}, done={"data_read_s": 0.15}))
    assert [one.cause for one in diagnosis.findings] == ["input-bound"]


@pytest.mark.parametrize(
    ("hosts", "slow", "said"),
    [
        ((0, 0, 1, 1), (2, 3), "The host of ranks 2, 3 is slow"),
        ((0, 0, 1, 1), (3,), "Rank 3 is slow"),
        ((0, 0, 0, 0, 1, 1), (4, 5), "The host of ranks 4, 5 is slow"),
        ((0, 1, 2), (2,), "Rank 2 is slow"),
    ],
    ids=["one of two hosts", "one rank of a host", "the smaller host", "a rank to each host"],
)
def test_a_slow_host_is_told_from_a_slow_rank(hosts: Sequence[int], slow: Sequence[int], said: str) -> None:
    rows = [{"forward": 0.13} if rank in slow else {"vote": 0.102} for rank in range(len(hosts))]
    used = {rank: Resources(host_number=host) for rank, host in enumerate(hosts)}
    first = diagnose(facts(*rows, used=used)).findings[0]
    assert first.cause == "straggler"
    assert first.what.startswith(said)
    assert first.gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("every", "save_s", "found"),
    [(1, 2.0, ["slow-saves"]), (1, 0.1, []), (10, 2.0, ["slow-saves"]), (20, 2.0, []), ("auto", 2.0, []), (0, 2.0, [])],
)
def test_saves_that_take_longer_than_the_steps_between_them(every: int | str, save_s: float, found: list[str]) -> None:
    saves = [Saved(step=step, seconds=save_s) for step in (2, 12)]
    remote = Saved(step=12, seconds=100.0, tier="remote")
    made = facts(settings={"checkpoint": {"every": every}}, events=[*saves, remote])
    findings = diagnose(made).findings
    assert [one.cause for one in findings] == found
    assert [str(change) for one in findings for change in one.changes] == ["checkpoint.every=40"] * len(found)


def test_a_rank_that_had_more_to_do_by_chance_is_no_straggler() -> None:
    """It is the slower one in 12 of 20 steps, the other one in the remaining 8."""
    slow: Mapping[str, float] = {"forward": 0.13}
    rows: list[list[Mapping[str, float]]] = [
        [slow if (step % 5 < 3) == (rank == 0) else {} for step in range(NUM)] for rank in (0, 1)
    ]
    assert [one.cause for one in diagnose(facts(*rows)).findings] == ["uneven-batches"]


def test_ranks_of_different_stages_are_not_compared() -> None:
    rows = ({"forward": 0.13}, {"pipeline.receive": 0.05})
    assert "straggler" in {one.cause for one in diagnose(facts(*rows)).findings}
    staged = diagnose(facts(*rows, started={"layout": "pipeline=2"}))
    assert "straggler" not in {one.cause for one in staged.findings}


def test_every_rule_has_a_case() -> None:
    elsewhere = {"interruptions", "loss-values", "loss-scale", "processors", "device-clocks", "swap"}
    elsewhere |= {"idle-device", "tensor-axis", "nccl-transport", "slow-link"}
    elsewhere |= {"many-collectives"}
    assert len(RULES) - len(elsewhere) <= len({case.cause for case in CASES.values()} | {"pipeline-bubble"})
