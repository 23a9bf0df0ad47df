"""Workers that form a real group over the store they were told of."""

from __future__ import annotations

import itertools
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from custom_request import CUSTOM

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.workers.store_socket import store_address
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.elastic.vote import Ballot, Vote
from closeranks.parallel.process_group import RankGroup


def form_group(link: WorkerLink) -> int:
    """The port of the store."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world, timeout = link.world, timedelta(seconds=30)
    if world.is_lead:
        listener = link.listen_socket()
        link.announce_store(store_address(listener))
        host, _, port = link.wait_for_store().rpartition(":")
        store = dist.TCPStore(host, int(port), None, True, timeout, False, master_listen_fd=listener.detach())
    else:
        host, _, port = link.wait_for_store().rpartition(":")
        store = dist.TCPStore(host, int(port), None, False, timeout, False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return int(port)


def reduce(payload: dict[str, Any], link: WorkerLink) -> None:
    port = form_group(link)
    total = torch.tensor([link.world.rank + 1])
    dist.all_reduce(total)
    link.send_event({"event": "sum", "total": int(total), "port": port})
    dist.destroy_process_group()


def vote(payload: dict[str, Any], link: WorkerLink) -> None:
    """Votes step by step with what it is asked for, until every rank got the custom request from its own agent. Writes
    down what came of every vote."""
    form_group(link)
    folder = Path(payload["folder"])
    world, scale, number = link.world, torch.ones(()), torch.ones((), dtype=torch.float64)
    voting, verdicts = Vote(RankGroup(world.rank, world.size), (), clip=0.0), []
    link.send_event({"event": "ready"})
    for step in itertools.count(1):
        link.progress(step, WorkerPhase.VOTE)
        requests = link.poll()
        heard = torch.tensor([float(CUSTOM in requests)], dtype=torch.float64)
        outcome = voting.cast(Ballot(number, number, number, {}, requests, extra={"heard": heard}), scale).read()
        verdicts.append(sorted(request.kind for request in outcome.requests))
        if outcome.extra["heard"] == [world.size]:
            break
    (folder / f"verdicts-{world.rank}.json").write_text(json.dumps(verdicts))
    while len(list(folder.glob("verdicts-*.json"))) < world.size:  # whoever leaves now could fail another's last vote
        time.sleep(0.01)
    dist.destroy_process_group()
