"""A worker that forms a real group over the store it was told of."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from closeranks.agent.link import WorkerLink
from closeranks.agent.store import address_of


def reduce(payload: dict[str, Any], link: WorkerLink) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world, timeout = link.world, timedelta(seconds=30)
    if world.is_lead:
        listener = link.listen_socket()
        link.announce_store(address_of(listener))
        host, _, port = link.store().rpartition(":")
        store = dist.TCPStore(host, int(port), None, True, timeout, False, master_listen_fd=listener.detach())
    else:
        host, _, port = link.store().rpartition(":")
        store = dist.TCPStore(host, int(port), None, False, timeout, False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
    link.send_event({"event": "sum", "total": int(total), "port": int(port)})
    dist.destroy_process_group()
