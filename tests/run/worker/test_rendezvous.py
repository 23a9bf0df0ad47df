"""The store a world forms on: nobody listens where nobody shall come, and names and ports are checked at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from closeranks.core.errors import SetupError
from closeranks.core.world import World
from closeranks.run.worker import rendezvous
from closeranks.run.worker.error_output import STORE_LOST
from closeranks.run.worker.rendezvous import count_failure, launcher_store, make_store, wait_for_all_ranks


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    launcher_store.cache_clear()
    yield
    launcher_store.cache_clear()


@contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind((host, 0))
        holder.listen()
        yield holder.getsockname()[1]


def free_port() -> int:
    with held_port() as port:
        return port


def slurm(rank: int = 0, size: int = 2, local_size: int = 2, address: str = "") -> World:
    return World(rank, size, rank, local_size, launcher="slurm", store=address or f"127.0.0.1:{free_port()}")


def listeners(port: int) -> set[str]:
    """The addresses on which something listens to a port, as /proc/net tells them."""
    found = set()
    for name, everywhere in (("tcp", "00000000"), ("tcp6", "0" * 32)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, port_hex = line.split()[1].split(":")
            if int(port_hex, 16) == port and line.split()[3] == "0A":
                found.add("everywhere" if address == everywhere else "one address")
    return found


def test_a_world_of_one_needs_no_port() -> None:
    assert isinstance(make_store(World(), None), dist.HashStore)


def test_a_second_group_of_a_script_does_not_read_the_firsts_keys() -> None:
    world = slurm(size=2)
    first, second = make_store(world, None), make_store(world, None)
    first.set("address", "of the first")
    assert not second.check(["address"])
    assert first.get("address") == b"of the first"


def test_on_one_host_nothing_listens_beyond_loopback() -> None:
    world = slurm()
    launcher_store(world)
    assert listeners(int(world.store.rpartition(":")[2])) == {"one address"}


def test_with_other_hosts_the_store_is_reached_by_any_address_of_this_one() -> None:
    world = slurm(size=4, local_size=2)
    launcher_store(world)
    assert listeners(int(world.store.rpartition(":")[2])) == {"everywhere"}


def test_a_port_in_use_is_told_with_the_variable_to_set() -> None:
    with held_port() as port, pytest.raises(SetupError, match=rf"{port}.*Set MASTER_PORT to a free port"):
        launcher_store(slurm(address=f"127.0.0.1:{port}"))


def test_an_unknown_host_is_told_at_once() -> None:
    with pytest.raises(SetupError, match=r"'no-such-host\.invalid' does not resolve.*Set MASTER_ADDR"):
        launcher_store(slurm(rank=1, address="no-such-host.invalid:29500"))


def test_a_store_that_nobody_opened_is_told_with_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, listen_fd: int | None = None) -> object:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(rendezvous, "_tcp_store", refused)
    with pytest.raises(
        SetupError, match=r"could not be reached: connection refused \(rank 1\)\. Set MASTER_ADDR.*MASTER_PORT"
    ):
        launcher_store(slurm(rank=1))


def test_failures_are_counted_on_the_store() -> None:
    world = slurm()
    assert count_failure(world) is None, "no store was opened yet"
    launcher_store(world)
    assert [count_failure(world) for _ in range(3)] == [1, 2, 3]


def test_a_store_that_is_gone_counts_nothing() -> None:
    world = slurm()
    opened = launcher_store(world)
    gone = World(1, 2, 1, 2, launcher="slurm", store=f"127.0.0.1:{free_port()}")
    assert count_failure(gone) == STORE_LOST
    opened.set_timeout(timedelta(seconds=1))


def test_rank_0_waits_for_the_last_rank() -> None:
    lead = slurm()
    opened = launcher_store(lead)
    opened.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(SetupError, match=rf"1 of 2 ranks did not join the rendezvous at {lead.store}"):
        wait_for_all_ranks(lead)
    wait_for_all_ranks(World(1, 2, 1, 2, launcher="slurm", store=lead.store))
    opened.wait(["closeranks/0/all here"])
