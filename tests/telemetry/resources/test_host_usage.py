"""The whole host's use: what the kernel counts, and a stranger's work as a neighbour's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from closeranks.core.events import Resources
from closeranks.telemetry.resources.host_usage import read_host, retransmits
from closeranks.telemetry.resources.process_usage import read_process
from closeranks.telemetry.resources.reading import used_between
from closeranks.telemetry.run_log.resource_history import collect

SECONDS = 1.0


def test_the_keys_are_those_that_the_page_lists() -> None:
    reading = read_host()
    assert {"swap_in_bytes", "swap_out_bytes", "disk_read_bytes", "disk_write_bytes"} <= set(reading.totals)
    assert {"net_sent_bytes", "net_received_bytes", "net_retransmits"} <= set(reading.totals)
    assert set(reading.rates) == {"cpus", "steal_cpus", "io_wait_cpus"}
    assert set(reading.levels) == {"num_cpus", "load", "page_cache_bytes", "available_bytes"}
    assert reading.levels["num_cpus"] == os.cpu_count()


def test_retransmits_are_found_by_their_name() -> None:
    assert retransmits("Ip: A\nIp: 1\nTcp: ActiveOpens RetransSegs InErrs\nTcp: 5 17 2\nUdp: X\nUdp: 3\n") == 17
    assert retransmits("Ip: A\nIp: 1\n") is None


@contextmanager
def spinning(*, is_ours: bool) -> Iterator[int]:
    """A process that spins: a child of this one, or one whose parent has ended."""
    spin = [sys.executable, "-c", "while True: pass"]
    if is_ours:
        with subprocess.Popen(spin) as child:
            try:
                yield child.pid
            finally:
                child.kill()
        return
    script = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", script, *spin]))
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def neighbour_and_spinner(*, is_ours: bool) -> tuple[float, float]:
    """Processors that the neighbours had, and those that the spinning process had."""
    with spinning(is_ours=is_ours) as pid:
        spinner = psutil.Process(pid)
        at, host, process, spent = time.monotonic(), read_host(), read_process(), sum(spinner.cpu_times()[:2])
        while sum(spinner.cpu_times()[:2]) - spent < SECONDS:
            time.sleep(0.05)
        seconds = time.monotonic() - at
        spent = sum(spinner.cpu_times()[:2]) - spent
        used = Resources(
            seconds,
            process=used_between(process, read_process(), seconds),
            host_wide=used_between(host, read_host(), seconds),
        )
    (others,) = collect([(0, 1.0, used)]).neighbour_cpus()
    return others, spent / seconds


@pytest.mark.world
def test_a_stranger_is_a_neighbour_and_a_child_is_not() -> None:
    others, stranger = neighbour_and_spinner(is_ours=False)
    assert others > 0.8 * stranger
    others, child = neighbour_and_spinner(is_ours=True)
    total = psutil.cpu_count() or 1
    assert others <= total - 0.8 * child, "the child's work is ours"
