"""Rules about what a run uses: limits and neighbours, swap, clocks, and processors that leave no room for readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from closeranks.core.events import Resources
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.finding import Finding
from tests.doctor.made import facts


def _used(cpus: float = 0.9, waits: float = 0.0, **groups: Any) -> Resources:
    host = {"cpus": 1.9, "num_cpus": 2.0, **groups.pop("host_wide", {})}
    return Resources(seconds=5.0, process={"cpus": cpus, "run_wait_share": waits}, host_wide=host, **groups)


def _causes(*used: Resources, phases: dict[str, float] | None = None) -> list[str]:
    made = facts(*[phases or {}] * len(used), used=dict(enumerate(used)))
    return [one.cause for one in diagnose(made).findings]


def test_workers_that_have_the_host_for_themselves() -> None:
    assert _causes(_used(), _used()) == []


def test_other_programs_take_the_processors() -> None:
    finding = diagnose(facts({}, {}, used={0: _used(0.5, 0.4), 1: _used(0.5, 0.3)})).findings[0]
    assert finding.cause == "noisy-neighbour"
    assert finding.gain == pytest.approx(0.4)
    assert "0.9 of the 2 processors" in finding.what


def test_waiting_for_processors_that_the_run_itself_uses_is_no_neighbour() -> None:
    assert _causes(_used(0.95, 0.4), _used(0.95, 0.4)) == []


LIMITED = _used(0.5, 0.4, cgroup={"limit_cpus": 0.5, "periods": 50.0, "throttled_periods": 40.0})


def test_a_cpu_limit_on_all_ranks() -> None:
    finding = diagnose(facts({}, {}, used={0: LIMITED, 1: LIMITED})).findings[0]
    assert finding.cause == "cpu-limit"
    assert "0.5 processors" in finding.evidence[0]
    assert "stopped in 80%" in finding.evidence[0]


def test_a_cpu_limit_on_one_rank_is_why_it_is_slow() -> None:
    made = facts({"forward": 0.2}, {"vote": 0.17}, used={0: LIMITED, 1: _used()})
    (finding,) = diagnose(made).findings
    assert finding.cause == "straggler"
    assert "a CPU limit of 0.5 processors stopped it in 80%" in " ".join(finding.evidence)


@pytest.mark.parametrize(("mib_per_s", "found"), [(0.1, []), (20.0, ["swapping"])])
def test_swap(mib_per_s: float, found: list[str]) -> None:
    assert _causes(_used(host_wide={"swap_in_bytes": mib_per_s * 5 * 2**20, "io_wait_cpus": 0.4})) == found


@pytest.mark.parametrize(
    ("clock", "reason", "found"),
    [
        (1980.0, "temperature (hardware)", []),
        (1200.0, "temperature (hardware)", ["throttled-clocks"]),
        (1200.0, "power cap", []),
    ],
)
def test_clocks(clock: float, reason: str, found: list[str]) -> None:
    gpu = {"sm_clock_mhz": clock, "sm_clock_max_mhz": 1980.0, "utilization": 0.95, "temperature_c": 90.0}
    assert _causes(_used(gpu=gpu, gpu_throttled_by=[reason])) == found


def test_busy_processors_leave_less_to_gain_for_readers() -> None:
    def gain(cpus: float) -> float:
        busy = _used(cpus / 2, host_wide={"cpus": cpus})
        made = facts({"data": 0.1}, done={"data_decode_s": 0.2}, used={0: busy})
        return diagnose(made).findings[0].gain

    assert gain(0.6) == pytest.approx(0.5, rel=0.05)
    assert gain(1.6) == pytest.approx(0.2)


def _reading(disk: float, called: float, busy: float = 0.2, read_s: float = 0.3) -> Finding:
    """The first finding about a run that waits for data: MB a second from the disk, and of read calls."""
    host = {"cpus": 0.4, "num_cpus": 2.0, "disk_busy_share": busy}
    reads = {"cpus": 0.2, "read_bytes": disk * 5e6, "read_call_bytes": called * 5e6}
    used = {rank: Resources(seconds=5.0, process=reads, host_wide={} if rank else host) for rank in (0, 1)}
    done = {"data_read_s": read_s, "data_decode_s": 0.2}
    return diagnose(facts({"data": 0.1}, {"data": 0.1}, used=used, done=done)).findings[0]


@pytest.mark.parametrize(
    ("disk", "called", "busy", "is_from_disk"),
    [
        (40.0, 50.0, 0.2, True),
        (40.0, 0.1, 0.2, True),
        (2.0, 0.1, 0.9, True),
        (2.0, 0.1, 0.2, False),
        (5.0, 50.0, 0.9, False),
        (0.0, 0.0, 0.0, False),
    ],
    ids=["read calls", "mapped files", "a slow disk", "little from an idle disk", "the page cache has most", "unknown"],
)
def test_page_cache_misses_are_why_training_waits_for_data(
    disk: float, called: float, busy: float, is_from_disk: bool
) -> None:
    found = _reading(disk, called, busy)
    assert found.cause == "input-bound"
    assert ("mostly for reading from the disk" in found.what) == is_from_disk
    words = f"{disk:g} MB/s from the disk: the page cache misses"
    assert any(words in one for one in found.evidence) == is_from_disk
    assert [change.key for change in found.changes] == ([] if is_from_disk else ["data.workers"])


@pytest.mark.parametrize(
    ("data_s", "cpus", "found"),
    [(0.01, 0.6, ["input-bound"]), (0.01, 1.99, []), (0.1, 1.99, ["input-bound"])],
    ids=["processors are free", "none is free", "none is free, but the wait is long"],
)
def test_readers_that_lack_a_processor_are_not_blamed_for_it(data_s: float, cpus: float, found: list[str]) -> None:
    busy = _used(cpus / 2, host_wide={"cpus": cpus})
    made = facts({"data": data_s}, done={"data_read_s": 0.005}, used={0: busy})
    assert [one.cause for one in diagnose(made).findings] == found


def test_a_slow_decoder_is_not_blamed_on_the_disk() -> None:
    assert "decoding" in _reading(40.0, 50.0, read_s=0.1).what


def test_bytes_of_collectives_are_no_reads_of_data() -> None:
    """Sockets are read by the same calls as files: of 130 MB/s here, 90 MB/s."""
    reads = Resources(seconds=5.0, process={"read_bytes": 2e8, "read_call_bytes": 6.5e8})
    made = facts({"data": 0.1}, used={0: reads}, done={"data_read_s": 0.3})
    assert "disk" not in diagnose(made).findings[0].what
    rows = tuple(replace(one, sent_bytes={"data.all_reduce": 18_000_000}) for one in made.times[0])
    assert "from the disk" in diagnose(replace(made, times={0: rows})).findings[0].what


@pytest.mark.parametrize(
    ("is_compiled", "change"),
    [(False, "train.compile=true"), (True, "train.micro_batch=8"), (None, "train.compile=true")],
)
def test_a_device_that_waits_for_launches(is_compiled: bool | None, change: str) -> None:
    settings = {"train": {"compile": is_compiled}}
    made = facts({}, settings=settings, started={"device": "NVIDIA H200"}, busy={0: 0.06})
    (finding,) = diagnose(made).findings
    assert finding.cause == "launch-bound"
    assert finding.gain == pytest.approx(0.4)
    assert str(finding.changes[0]) == change


def test_a_device_that_waits_for_data_is_not_launch_bound() -> None:
    made = facts({"data": 0.1}, started={"device": "NVIDIA H200"}, busy={0: 0.096}, done={"data_read_s": 0.2})
    assert [one.cause for one in diagnose(made).findings] == ["input-bound"]


@pytest.mark.parametrize(("hosts", "found"), [((0, 0), []), ((0, 1), ["tensor-across-hosts"])])
def test_a_tensor_axis_across_hosts(hosts: tuple[int, int], found: list[str]) -> None:
    used = {rank: Resources(seconds=5.0, host_number=host) for rank, host in enumerate(hosts)}
    made = facts({"tensor.all_gather": 0.03}, {"tensor.all_gather": 0.03}, used=used, started={"layout": "tensor=2"})
    assert [one.cause for one in diagnose(made).findings] == found
