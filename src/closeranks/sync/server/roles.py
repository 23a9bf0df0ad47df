"""Which ranks of a run are parameter servers, and which jobs and layouts can have them?

Servers are the last data ranks. They compute no micro-batch: each owns a shard of the optimizer state and updates it
with what the workers push. For state, checkpoints and recovery they are data ranks of a layout with ``zero = 1`` whose
shards all belong to the servers, so nothing else needs to know of them. Pure, without torch. Invariant: without
``[sync.server]`` every rank is a worker, and nothing here changes or refuses anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from closeranks.core.errors import Problem
from closeranks.facts.layout import Layout, pluralize
from closeranks.sync.config import ServerConfig, SyncConfig


@dataclass(frozen=True, slots=True)
class Roles:
    """The data ranks of a run: workers first, servers last."""

    num_workers: int
    num_servers: int = 0

    def worker_rank(self, rank: int) -> int | None:
        """A data rank's number among those that compute micro-batches; None: it is a server."""
        return rank if rank < self.num_workers else None

    def server_rank(self, rank: int) -> int | None:
        """Its number among the servers; None: it is a worker."""
        return None if rank < self.num_workers else rank - self.num_workers


def roles(sync: SyncConfig, num_data_ranks: int) -> Roles:
    return Roles(num_data_ranks - sync.server.count, sync.server.count)


def planned_layout(sync: SyncConfig, layout: Layout) -> Layout:
    """Optimizer state is on the servers: a layout without ZeRO becomes ``zero = 1``."""
    return replace(layout, zero=1) if sync.server.is_on and layout.zero == 0 else layout


def job_problems(
    sync: SyncConfig, *, batch_norm: str, noise_every: int, ema: float, precision: str, deterministic: bool
) -> Iterator[Problem]:
    """What is wrong with ``[sync.server]`` in a job, as far as one can tell without knowing the workers."""
    if sync.server.backup:
        yield from _backup_problems(sync.server, deterministic)
    if not sync.server.is_on:
        return
    if sync.local.is_on:
        what = "with local SGD every replica has an optimizer of its own, and with servers no worker has one"
        yield Problem("sync.server.count", what, "Set it to 0, or sync.local.every = 0.")
    if sync.compress.name == "powersgd":
        what = "powersgd sends factors of the sum over all workers, and servers own slices that no factor belongs to"
        yield Problem("sync.compress.name", what, 'Set it to "int8" or "topk", or sync.server.count = 0.')
    elif sync.compress.name != "none" and not sync.server.waits_for_all and sync.server.mode != "async":
        how = "backup workers" if sync.server.backup else 'mode = "stale"'
        what = f"what a push lost is kept if its step is taken, and with {how} no worker knows that in time"
        yield Problem("sync.compress.name", what, 'Set it to "none", or use sync.server.mode = "sync" without backup.')
    if batch_norm == "sync":
        what = "synchronised batch norm needs all data ranks in every forward, and servers run none"
        yield Problem("layout.batch_norm", what, 'Set it to "micro", or sync.server.count = 0.')
    if noise_every:
        what = "the noise scale is measured by ranks that all compute gradients, and servers compute none"
        yield Problem("train.noise_every", what, "Set it to 0, or sync.server.count = 0.")
    if sync.server.waits_for_all:
        return
    wait = "sync.server.backup = 0" if sync.server.backup else 'sync.server.mode = "sync"'
    if ema:
        what = "the average is taken of the weights of a step, and workers hold those of different steps"
        yield Problem("optim.ema", what, f"Set it to 0, or {wait}.")
    if precision == "fp16":
        what = "the loss scale follows from the verdict on every step, which workers do not wait for"
        yield Problem("train.precision", what, f'Use "bf16", or {wait}.')


def _backup_problems(server: ServerConfig, deterministic: bool) -> Iterator[Problem]:
    """Where leaving out late pushes could not be exact, or would mean nothing."""
    place = "sync.server.backup"
    if not server.is_on:
        what = "it is the servers that leave out late pushes, and there are none: an all-reduce cannot leave out a rank"
        yield Problem(place, what, "Set sync.server.count to 1 or more, or this to 0.")
    elif server.mode == "stale":
        what = 'with mode = "stale" a late push goes into a later update, so none can be left out'
        yield Problem(place, what, 'Set it to 0, or sync.server.mode = "sync".')
    elif server.mode == "async":
        what = 'with mode = "async" every push is an update of its own, so none is late'
        yield Problem(place, what, 'Set it to 0, or sync.server.mode = "sync".')
    if deterministic:
        what = "which workers are late differs from run to run, so two runs cannot have the same bits"
        yield Problem(place, what, "Set it to 0, or run.deterministic = false.")


def layout_problems(sync: SyncConfig, layout: Layout) -> Iterator[Problem]:
    """Whether a legal layout leaves workers beside the servers, and splits nothing that servers do not split."""
    if not sync.server.is_on:
        return
    if layout.zero > 1 or layout.shard or layout.num_ranks != layout.data:
        what = "with parameter servers each worker computes with the whole model, and the servers split its state"
        fix = "Set layout.zero = 0 and leave out layout.shard and the other axes, or set sync.server.count = 0."
        yield Problem("layout", what, fix)
    if layout.data <= sync.server.count:
        servers = pluralize(sync.server.count, "server")
        what = f"{servers} of {pluralize(layout.data, 'rank')} leave no worker: servers are counted among the ranks"
        yield Problem("sync.server.count", what, f"Start with -n {sync.server.count + 1} or more, or set it lower.")
    elif layout.data - sync.server.count <= sync.server.backup:
        workers = pluralize(layout.data - sync.server.count, "worker")
        what = f"of {workers} a step may leave out {sync.server.backup}, so it would wait for none"
        fix = f"Start with -n {sync.server.count + sync.server.backup + 1} or more, or set it lower."
        yield Problem("sync.server.backup", what, fix)
