"""What the NCCL of this machine prints is understood."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from closeranks.doctor.nccl_log import SOCKET, parse_nccl_log

pytestmark = pytest.mark.gpu

RANK = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
assert x.sum().item() == 2 << 20
dist.destroy_process_group()
"""


def test_a_real_log_of_two_ranks_on_one_gpu() -> None:
    """NCCL takes them for ranks of two hosts, which NCCL_HOSTID names, and connects them by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nccl = {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | world | nccl | {"RANK": str(rank), "NCCL_HOSTID": f"host-{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    lines = "".join(printed).splitlines()
    log = parse_nccl_log(lines)
    print("\n".join(line for line in lines if "Channel" in line or "version" in line)[:3000], log)
    assert log is not None
    assert {one.via for one in log.transports} == {SOCKET}, lines
    assert sum(one.num_pairs for one in log.transports) == 2
    assert log.version
    assert log.settings["NCCL_IB_DISABLE"] == "1"
