"""What NCCL prints about its transports, in the formats of its versions, whole and damaged."""

from __future__ import annotations

import random

import pytest

from closeranks.doctor.nccl_log import nccl_json, parse_nccl_log
from tests.doctor.nccl_lines import IB, OLD, SHARED_MEMORY, TCP


def _found(text: str) -> set[tuple[str, bool, bool, int, int]]:
    log = parse_nccl_log(text.splitlines())
    assert log is not None
    return {
        (one.via, one.has_gpudirect, one.is_between_hosts, one.num_pairs, one.num_channels) for one in log.transports
    }


def test_infiniband_between_hosts_and_peer_access_within_them() -> None:
    log = parse_nccl_log(IB.splitlines())
    assert log is not None
    assert _found(IB) == {("NET/IB", True, True, 2, 3), ("P2P/CUMEM", False, False, 2, 3)}
    assert (log.version, log.has_ib) == ("2.27.3+cuda12.9", True)
    assert log.settings == {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth0"}
    assert str(log) == (
        "between hosts NET/IB with GPUDirect RDMA, 2 pairs | within a host P2P/CUMEM, 2 pairs (NCCL 2.27.3+cuda12.9)"
    )


def test_tcp_between_hosts_and_the_memory_of_a_host() -> None:
    assert _found(TCP) == {("NET/Socket", False, True, 2, 4), ("SHM", False, False, 2, 4)}


def test_a_network_within_a_host() -> None:
    """Both ranks of the communicator are on one host, though a rank of the same number in another one is not."""
    lines = [
        "n1:1:9 [0] NCCL INFO comm 0x11 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0xaa - Init START",
        "n1:2:9 [1] NCCL INFO comm 0x12 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 2000 commId 0xaa - Init START",
        "n1:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0",
        "n1:2:9 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [receive] via NET/Socket/0",
        "n1:1:9 [0] NCCL INFO comm 0x21 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0xbb - Init START",
        "n2:1:9 [0] NCCL INFO comm 0x22 rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0xbb - Init START",
        "n1:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
        "n1:1:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] [send] via NET/Socket/0 comm 0x11 nRanks 02",
    ]
    assert _found("\n".join(lines)) == {("NET/Socket", False, False, 1, 2), ("NET/IB", True, True, 1, 1)}


@pytest.mark.parametrize(
    ("said", "via", "is_direct"),
    [
        ("Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC", "P2P/IPC", False),
        ("Channel 04/1 : 0[0] -> 1[1] via P2P/indirect/3[3]", "P2P/indirect", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P/CUMEM", False),
        ("Ring 00 : 0 -> 1 via direct shared memory", "SHM", False),
        ("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", False),
        ("Channel 00/0 : 0[0] -> 9[1] [send] via NET/IB/2(1)/GDRDMA/Shared", "NET/IB", True),
        ("Channel 00/0 : 0[0] -> 9[1] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric", True),
        ("Channel 00/0 : 9[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA/flush=None", "NET/Libfabric", True),
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0 comm 0x2083dd50 nRanks 02", "NET/Socket", False),
        ("Channel 00/0 : 0[0] -> 8[0] [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP", True),
    ],
)
def test_forms_of_a_channel(said: str, via: str, is_direct: bool) -> None:
    for before in ("", "[2026-01-02 03:04:05] ", "(Worker pid=3) "):
        (found,) = _found(f"{before}n1:41:57 [0] NCCL INFO {said}")
        assert found[:2] == (via, is_direct)


def test_old_versions_have_no_number_of_a_communicator() -> None:
    assert _found(OLD) == {("NET/Socket", False, True, 2, 2)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NCCL version 2.27.3+cuda12.9",
        "n1:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2   3",
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 99999999999[0] -> 1[1] via P2P/CUMEM",
        "n" * 100_000 + ":1:2 [0] NCCL INFO",
    ],
)
def test_lines_that_say_nothing(text: str) -> None:
    assert parse_nccl_log(text.splitlines()) is None
    assert nccl_json(None) is None


@pytest.mark.parametrize("seed", range(20))
def test_damaged_lines_cost_what_they_held(seed: int) -> None:
    rng = random.Random(seed)
    text = list(IB + TCP + SHARED_MEMORY)
    for _ in range(len(text) // 50):
        text[rng.randrange(len(text))] = rng.choice("\x00\n:[]>/9é ")
    log = parse_nccl_log("".join(text).splitlines())
    assert log is None or all(one.num_pairs > 0 for one in log.transports)
