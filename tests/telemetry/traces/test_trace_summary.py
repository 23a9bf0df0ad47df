from pathlib import Path

import pytest

from closeranks.telemetry.traces.rank_trace import read_rank_trace
from closeranks.telemetry.traces.trace_summary import TraceSummary, summarize_rank, summary_lines
from tests.telemetry.traces.rank_files import PID, event, kernel, write

ON_A_GPU = [
    event("cudaLaunchKernel", 0, 5, cat="cuda_runtime"),
    event("cuLaunchKernelEx", 5, 5, cat="cuda_driver"),
    event("cudaMemcpyAsync", 10, 5, cat="cuda_runtime"),
    kernel("matmul", 100, 100),
    kernel("all_reduce", 150, 100, stream=20),  # half of it beside the matmul
    event("Memcpy HtoD", 300, 50, cat="gpu_memcpy", pid=0, tid=7),
    kernel("matmul", 450, 50),
    event("step 5", 100, 400, cat="gpu_user_annotation", pid=0, tid=7),  # no work of its own
]


def test_the_device_is_busy_while_any_stream_is(tmp_path: Path) -> None:
    device = summarize_rank(read_rank_trace(write(tmp_path / "t.gz", ON_A_GPU))).device
    assert device is not None
    assert device.busy_s == pytest.approx(250e-6)
    assert device.idle_s == pytest.approx(150e-6)
    assert device.idle_share == pytest.approx(150 / 400)
    assert (device.num_kernels, device.num_launches) == (3, 2)


def test_kernels_are_summed_by_name(tmp_path: Path) -> None:
    top = summarize_rank(read_rank_trace(write(tmp_path / "t.gz", ON_A_GPU))).top_kernels
    assert [(one.name, one.count, round(one.seconds * 1e6)) for one in top] == [
        ("matmul", 2, 150),
        ("all_reduce", 1, 100),
    ]


def test_an_operation_counts_without_those_inside_it(tmp_path: Path) -> None:
    events = [
        event("linear", 0, 100),
        event("addmm", 10, 60),
        event("copy", 20, 10),
        event("addmm", 100, 5),  # begins where the first ends
        event("step 5", 0, 500, cat="user_annotation"),
        event("addmm", 30, 40, tid=PID + 1),
    ]
    summary = summarize_rank(read_rank_trace(write(tmp_path / "t.gz", events)))
    assert [(one.name, one.count, round(one.seconds * 1e6)) for one in summary.top_ops] == [
        ("addmm", 3, 95),
        ("linear", 1, 40),
        ("copy", 1, 10),
    ]
    assert summary.device is None
    assert summary.phases == pytest.approx({"forward": 1e-3, "vote": 1e-3})
    assert sum(summary.phases.values()) == pytest.approx(summary.seconds)


def test_people_read_the_first_ranks_and_the_number_of_the_others(tmp_path: Path) -> None:
    one = summarize_rank(read_rank_trace(write(tmp_path / "t.gz", [*ON_A_GPU, kernel("k" * 300, 460, 1)])))
    lines = summary_lines(TraceSummary(5, 6, 5e-5, (one,) * 6))
    assert lines[1].startswith("The longest phases of each rank, and the kernels")
    assert (
        lines[3] == "rank 0 (host here, data 0): 2 steps of 1 ms; device idle for 37.5% of the time, 2 kernels a step"
    )
    assert lines[4] == "  forward 50.0%, vote 50.0%"
    assert lines[5].split() == ["75", "us", "a", "step", "7.5%", "1x", "matmul"]
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "2 more ranks: summary.json has their figures."
