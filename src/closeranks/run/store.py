"""On which store does the group of a world form?

Rank 0 opens it: under the agent on an ephemeral port whose address the agent passes on, under srun on a port that
follows from the job; torchrun brings its own. Invariant: under the agent nothing listens beyond the configured address.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from closeranks.agent.link import WorkerLink
from closeranks.agent.store import address_of
from closeranks.core.errors import SetupError
from closeranks.core.world import World


def make_store(world: World, link: WorkerLink | None) -> Store:
    if world.launcher == "torchrun":
        store: Store = next(rendezvous("env://"))[0]
        return store
    if link is not None:
        return _agent_store(world, link)
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    return _fixed_store(world)


def _agent_store(world: World, link: WorkerLink) -> Store:
    if world.is_lead:
        listener = link.listen_socket()
        address = address_of(listener)
        store = _tcp_store(address, listen_fd=listener.detach())
        link.announce_store(address)
        return store
    return _tcp_store(link.store())


def _tcp_store(address: str, listen_fd: int | None = None) -> Store:
    """Nobody waits here for the others: a worker that never comes is the agent's business, not a store timeout's."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=listen_fd is not None, wait_for_workers=False, master_listen_fd=listen_fd
    )


def _fixed_store(world: World) -> Store:
    host, _, port = world.store.rpartition(":")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), world_size=world.size, is_master=world.is_lead, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        fix = "Set MASTER_PORT to a free port on the first host."
        raise SetupError(f"the store at {world.store} could not be opened: {error}", fix, rank=world.rank) from error
