"""The report's resources: medians and highest values, what slowed the run from outside, memory by kind."""

from __future__ import annotations

from pathlib import Path

from closeranks.core.events import MemoryUsed, Resources
from closeranks.telemetry.reports.resource_section import resource_section
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.resource_history import collect, load_resources

GIB = 1 << 30


def used(cpus: float = 0.9, **groups: dict[str, float]) -> Resources:
    return Resources(5.0, process={"cpus": cpus, "rss_bytes": GIB, **groups.pop("process", {})}, **groups)


def test_nothing_recorded_is_nothing_shown(tmp_path: Path) -> None:
    assert resource_section(load_resources(tmp_path)) == ""


def test_medians_and_highest_values_and_the_rank_that_had_them() -> None:
    text = resource_section(
        collect([(0, 1.0, used(0.5)), (0, 2.0, used(0.7)), (1, 1.0, used(0.5)), (1, 2.0, used(2.0))])
    )
    assert "| processors, a worker | 0.6 | 2 | rank 1 |" in text
    assert "| memory, a worker | 1.0 GiB | 1.0 GiB |  |" in text
    assert "swapped" not in text
    assert "limit" not in text


def test_a_record_with_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    for bad in (float("inf"), float("nan")):
        recorder.emit(used(gpu={"ecc_corrected": bad, "energy_j": bad}))
    recorder.emit(used(0.25))
    recorder.close()
    assert "| processors, a worker | 0.25 | 0.25 |  |" in resource_section(load_resources(tmp_path))


def test_a_neighbour_is_what_the_host_says_beyond_our_workers() -> None:
    history = collect(
        [
            *((0, at, used(1.0, host_wide={"cpus": busy})) for at, busy in ((5.0, 2.0), (10.0, 5.0))),
            *((1, at + 0.3, used(1.0)) for at in (5.0, 10.0)),
            (2, 5.0, Resources(5.0, host_number=1, process={"cpus": 9.0})),
        ]
    )
    assert history.neighbour_cpus() == [0.0, 3.0]
    assert "| of them other programs | 1.5 | 3 |  |" in resource_section(history)


def test_throttling_and_swapping_are_said_in_sentences() -> None:
    cgroup = {"limit_cpus": 0.5, "periods": 50, "throttled_periods": 20, "throttled_s": 1.0}
    text = resource_section(collect([(1, 1.0, used(cgroup=cgroup, host_wide={"swap_in_bytes": 3 * GIB}))]))
    assert "- A CPU limit of 0.5 processors (rank 1's) stopped workers in 40.0% of its periods." in text
    assert "- The host swapped: 3.0 GiB were read back from swap." in text
    free = {**cgroup, "throttled_periods": 0}
    assert "limit" not in resource_section(collect([(1, 1.0, used(cgroup=free))]))


def test_a_gpu_s_clocks_energy_and_errors() -> None:
    gpu = {"utilization": 0.9, "sm_clock_mhz": 1980.0, "energy_j": 1.8e6, "ecc_uncorrected": 0, "ecc_corrected": 2}
    lowered = Resources(5.0, gpu=gpu, gpu_throttled_by=["power cap"])
    text = resource_section(collect([(0, 1.0, lowered), (0, 2.0, Resources(5.0, gpu=gpu))]))
    assert "- GPU clocks were lowered by power cap in 50.0% of the samples." in text
    assert "- GPUs used 1 kWh." in text
    assert "- GPU memory corrected 4 errors." in text
    assert "could not" not in text
    assert "| GPU clock (MHz) | 1980 | 1980 |  |" in text


def test_memory_is_that_of_the_rank_that_holds_most_and_of_its_last_event(tmp_path: Path) -> None:
    for rank, events in enumerate(
        ([{"parameters": GIB}], [{"parameters": GIB}, {"parameters": 2 * GIB, "gradients": 0}])
    ):
        recorder = EventRecorder(tmp_path, rank)
        for kinds in events:
            recorder.emit(MemoryUsed(2, kinds))
        recorder.close()
    path = tmp_path / "metrics" / "rank-00001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event": "memory", "kinds": {"parameters": "x"}}\n{"event": "resou')
    assert "- Rank 1 holds: parameters 2.0 GiB." in resource_section(load_resources(tmp_path))
