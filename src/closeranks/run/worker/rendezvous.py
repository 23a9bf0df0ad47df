"""Rendezvous: opens the store on which the process group of a world forms.

Rank 0 opens it: under the agent on an ephemeral port whose address the agent passes on, under srun on a port that is
derived from the job; torchrun provides its own. Invariants: under the agent nothing listens beyond the configured
address, under srun on one host nothing beyond loopback; no key of an earlier group is read again.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import cache
from itertools import count

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from closeranks.agent.detection.failure import plain_message
from closeranks.agent.workers.store_socket import bind_store, store_address
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.errors import SetupError
from closeranks.core.world import World
from closeranks.run.worker.error_output import STORE_LOST

_NUMBERS = count()
_COUNT_S = 5.0


def make_store(world: World, link: WorkerLink | None) -> Store:
    if link is not None:
        return _agent_store(world, link)
    if world.size == 1 and world.launcher != "torchrun":
        return dist.HashStore()  # type: ignore[attr-defined]
    # A script's second session forms its own group on the same store: its keys must differ from the first one's.
    return PrefixStore(f"group/{next(_NUMBERS)}", launcher_store(world))


@cache
def launcher_store(world: World) -> Store:
    """The one store of this process's world under torchrun or srun; the first call opens it."""
    if world.launcher == "torchrun":
        store: Store = next(rendezvous("env://"))[0]
        return store
    return _fixed_store(world)


def wait_for_all_ranks(world: World) -> None:
    """Rank 0 waits until all ranks have arrived: if it failed and left earlier, a late rank would wait in vain."""
    store, prefix = launcher_store(world), f"closeranks/{world.generation}"
    if store.add(f"{prefix}/arrived", 1) == world.size:
        store.set(f"{prefix}/all here", "")
    if not world.is_lead:
        return
    try:
        store.wait([f"{prefix}/all here"])
    except RuntimeError:
        num_missing = world.size - store.add(f"{prefix}/arrived", 0)
        what = f"{num_missing} of {world.size} ranks did not join the rendezvous at {world.store}"
        raise SetupError(what, "See their logs, and set MASTER_ADDR to an address that every host reaches.") from None


def count_failure(world: World) -> int | None:
    """How many ranks have failed so far, including this one; STORE_LOST if the store does not answer, None if it was
    never opened."""
    if not launcher_store.cache_info().currsize:
        return None
    host, _, port = world.store.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _COUNT_S).close()  # torch prints a stack if nobody answers
        store = launcher_store(world)
        store.set_timeout(timedelta(seconds=_COUNT_S))
        return int(store.add(f"closeranks/{world.generation}/failures", 1))
    except (OSError, RuntimeError):  # torch's own store errors are all of the latter kind
        return STORE_LOST


def _agent_store(world: World, link: WorkerLink) -> Store:
    if world.is_lead:
        listener = link.listen_socket()
        address = store_address(listener)
        store = _tcp_store(address, listen_fd=listener.detach())
        link.announce_store(address)
        return store
    return _tcp_store(link.wait_for_store())


def _tcp_store(address: str, listen_fd: int | None = None) -> Store:
    """Does not wait for the other workers: a worker that never arrives is detected by the agent, not by a timeout."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=listen_fd is not None, wait_for_workers=False, master_listen_fd=listen_fd
    )


def _fixed_store(world: World) -> Store:
    host, _, port = world.store.rpartition(":")
    _check_name(host, world)
    listen_fd = _listen(host, int(port), world) if world.is_lead else None
    try:
        return _tcp_store(world.store, listen_fd)
    except (RuntimeError, ValueError) as error:
        fix = "Set MASTER_ADDR to an address of the first host that every host reaches, and MASTER_PORT to a free port."
        what = f"rank 0's store at {world.store} could not be reached: {plain_message(error)}"
        raise SetupError(what, fix, rank=world.rank) from error


def _check_name(host: str, world: World) -> None:
    """torch would retry an unknown host name for five minutes."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        what = f"rank 0's host '{host}' does not resolve ({error.strerror})"
        raise SetupError(what, "Set MASTER_ADDR to its address.", rank=world.rank) from None


def _listen(host: str, port: int, world: World) -> int:
    """If all ranks are on one host, listen on the given address (loopback, unless MASTER_ADDR is set), else on every
    interface: on the host itself its name may resolve to loopback, while other hosts reach it by another address."""
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        return bind_store(host if world.local_size == world.size else everywhere, port).detach()
    except SetupError as error:
        raise SetupError(error.what, "Set MASTER_PORT to a free port of the first host.", rank=world.rank) from None
