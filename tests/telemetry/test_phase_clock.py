"""The clock of phases: every instant belongs to one phase, nested phases return to the outer one."""

from __future__ import annotations

import timeit
from collections.abc import Iterator

import pytest
import torch

from closeranks.core import phases
from closeranks.core.phases import TimedWork, install_clock, phase
from closeranks.telemetry.phase_clock import (
    CudaPhaseClock,
    HostPhaseClock,
    NvtxPhaseClock,
    StepPhaseClock,
    make_phase_clock,
)


class Ticks:
    """A clock that is advanced by hand."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: int) -> None:
        self.now_ns += seconds * 1_000_000_000


@pytest.fixture
def ticks() -> Iterator[Ticks]:
    yield Ticks()
    install_clock(None)


def test_each_instant_belongs_to_the_innermost_phase(ticks: Ticks) -> None:
    clock = HostPhaseClock(ticks)
    install_clock(clock)
    phases.switch(phases.FORWARD)
    ticks.pass_s(1)
    with phase(phases.BACKWARD):
        ticks.pass_s(2)
        with phase("data.all_reduce"):
            ticks.pass_s(4)
        ticks.pass_s(8)
    ticks.pass_s(16)
    clock.end_step(1)
    ticks.pass_s(32)  # the next step's: its phase goes on
    clock.end_step(2)
    first, second = clock.pop()
    assert first.phases == {"other": 0, "forward": 17, "backward": 10, "data.all_reduce": 4}
    assert (first.step, second.step) == (1, 2)
    assert second.phases == {"forward": 32}
    assert not list(clock.pop())


def test_an_exception_ends_its_phase(ticks: Ticks) -> None:
    clock = HostPhaseClock(ticks)
    install_clock(clock)

    class Broken:
        def wait(self) -> None:
            ticks.pass_s(3)
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="by peer"):
        TimedWork(Broken(), "data.all_reduce").wait()
    ticks.pass_s(1)
    clock.end_step(1)
    assert next(clock.pop()).phases == {"other": 1, "data.all_reduce": 3}


def test_without_a_clock_nothing_is_measured_and_work_is_waited_for() -> None:
    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(True)

    TimedWork(Work(), "data.all_reduce").wait()
    assert waited
    assert phases.switch(phases.DATA) == ""


def test_a_clock_installed_within_a_phase_is_not_confused(ticks: Ticks) -> None:
    with phase(phases.EVALUATION):
        clock = HostPhaseClock(ticks)
        install_clock(clock)
        ticks.pass_s(1)
    ticks.pass_s(1)
    clock.end_step(1)
    assert next(clock.pop()).phases == {"other": 2}


def test_ranges_of_a_profiler_have_the_names_of_the_phases(ticks: Ticks) -> None:
    log: list[tuple[str, str | int]] = []

    def start(name: str) -> int:
        log.append(("start", name))
        return len(log)

    clock = NvtxPhaseClock(HostPhaseClock(ticks), start, lambda handle: log.append(("end", handle)))
    install_clock(clock)
    phases.switch(phases.FORWARD)
    ticks.pass_s(1)
    with phase("data.all_reduce"):
        ticks.pass_s(2)
    clock.end_step(1)
    clock.close()
    names = ["other", "forward", "data.all_reduce", "forward"]
    assert [name for what, name in log if what == "start"] == names
    assert [handle for what, handle in log if what == "end"] == [1, 3, 5, 7], "each ends before the next begins"
    assert next(clock.pop()).phases == {"other": 0, "forward": 1, "data.all_reduce": 2}


def test_a_cpu_has_no_ranges() -> None:
    assert isinstance(make_phase_clock(torch.device("cpu"), nvtx=True), HostPhaseClock)


@pytest.mark.gpu
def test_ranges_are_marked_if_a_tool_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert isinstance(make_phase_clock(device, nvtx="auto"), CudaPhaseClock)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
    assert isinstance(make_phase_clock(device, nvtx="auto"), NvtxPhaseClock)
    assert isinstance(make_phase_clock(device, nvtx=False), CudaPhaseClock)


@pytest.mark.gpu
def test_ranges_are_cheap_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    per_switch = {}
    for nvtx in (False, True):
        clock = make_phase_clock(device, nvtx=nvtx)

        def take_step(clock: StepPhaseClock = clock) -> None:
            for _ in range(100):
                clock.switch(phases.FORWARD)
            clock.end_step(1)
            assert list(clock.pop(wait=True))

        per_switch[nvtx] = min(timeit.repeat(take_step, number=1, repeat=20)) / 100
        clock.close()
    print({nvtx: f"{1e6 * seconds:.2f} us" for nvtx, seconds in per_switch.items()})
    assert per_switch[True] - per_switch[False] < 20e-6, "ten times what it takes"


@pytest.mark.gpu
def test_on_a_gpu_phases_are_the_device_s_time() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = make_phase_clock(device)
    assert isinstance(clock, CudaPhaseClock)
    cycles = 50_000_000  # some 25 ms
    slept: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(2):
        for name in (phases.FORWARD, phases.BACKWARD):
            clock.switch(name)
            slept.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            slept[-1][0].record()
            torch.cuda._sleep(cycles)
            slept[-1][1].record()
        clock.switch(phases.OPTIMIZER)
    clock.end_step(1)
    assert not list(clock.pop()), "the host must not wait for the device"
    (measured,) = clock.pop(wait=True)
    times_s = [begin.elapsed_time(end) / 1000 for begin, end in slept]
    assert measured.phases["forward"] == pytest.approx(times_s[0] + times_s[2], rel=0.02)
    assert measured.phases["backward"] == pytest.approx(times_s[1] + times_s[3], rel=0.02)
    assert measured.phases["optimizer"] < 0.05 * times_s[0]
