"""The lab itself: hosts reach each other, fall silent, come back, and leave nothing behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import Lab, LabHost, require_lab

pytestmark = pytest.mark.hosts


@pytest.fixture
def lab() -> Iterator[Lab]:
    require_lab()
    with Lab(2) as lab:
        yield lab
    assert lab.tag not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not lab.hosts_file.exists()
    assert [host.name for host in lab.hosts if host.is_on] == []


def told(host: LabHost, script: str) -> str:
    done = host.run(["sh", "-c", script])
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def test_hosts_are_apart_but_for_the_network(lab: Lab) -> None:
    first, second = lab.hosts
    assert told(first, "hostname") == "h0"
    assert told(second, "getent hosts h0").split() == [first.address, "h0"]
    told(first, "echo x > /dev/shm/mine")
    assert told(second, "ls /dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    assert told(first, "cat /proc/1/comm") == "sleep"
    assert first.reaches(second)
    assert second.reaches(first)


def test_a_cut_is_silence_and_heals(lab: Lab) -> None:
    first, second = lab.hosts
    second.cut()
    assert not first.reaches(second, timeout_s=0.3)
    assert second.is_on
    second.heal()
    assert first.reaches(second, timeout_s=60.0)


def test_power_off_kills_everything_on_one_host(lab: Lab) -> None:
    first, second = lab.hosts
    here, there = (host.start(["sh", "-c", "echo up; sleep 1000 & wait"]) for host in lab.hosts)
    for process in (here, there):
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    second.power_off()
    assert there.returncode != 0
    assert here.poll() is None
    assert not first.reaches(second, timeout_s=0.3)
    second.power_on()
    assert told(second, "hostname") == "h1"
    assert first.reaches(second, timeout_s=60.0)


def test_labs_stand_beside_one_another(lab: Lab) -> None:
    with Lab(2) as other:
        assert other.hosts[0].address == lab.hosts[0].address
        assert other.hosts[0].reaches(other.hosts[1])
        lab.hosts[1].cut()
        assert other.hosts[0].reaches(other.hosts[1])
