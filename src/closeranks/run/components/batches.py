"""Loads the batches of a run's steps, logs their samples, and quarantines bad ones.

A bad sample is found by the rank that reads it. The vote includes the number of bad samples, and only if there are any
do the ranks exchange which ones they are. Invariant: every rank holds the same quarantine after a step is settled, so
that any of them may save it and all stop together when it overflows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.core.errors import CheckpointError, DataError, SetupError
from closeranks.core.events import Event, SharesChanged, Warned
from closeranks.core.system.append_file import AppendFile
from closeranks.data.loading.batch_reader import LoadedBatch
from closeranks.data.loading.loader import Loader
from closeranks.data.loading.quarantine import BadSample, Quarantine, merge
from closeranks.data.sampling.order import MicroBatch, SampleOrder
from closeranks.data.sampling.returned import ReturnedMicroBatches
from closeranks.data.source import LoaderSource
from closeranks.data.timing import StageTimes
from closeranks.elastic.vote import Ballot
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.run.components.component import Component
from closeranks.run.state.saved_state import SavedState
from closeranks.sync.balance import even_shares
from closeranks.telemetry.run_log.run_folder import RunFolder

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

_NAMED = 3
"""Samples skipped in one step that are reported one by one; a damaged block may affect thousands."""


@dataclass
class Batches(Component):
    """The data of one run, as its steps see it."""

    loader: Loader
    quarantine: Quarantine
    order: SampleOrder
    groups: MeshGroups
    sources: tuple[LoaderSource, ...]
    """The sources for training and evaluation."""
    logs_samples: bool = False
    must_agree: bool = False
    """Whether ranks that work on the same micro-batches must check that they found the same bad samples: if they
    differed, a collective would hang."""
    num_shares: int = 0
    """Among how many data ranks (with local SGD, replicas) micro-batches are divided by speed; 0: always evenly."""
    returned: ReturnedMicroBatches | None = None
    """Micro-batches that earlier steps did not take; None: every step takes all of its own."""
    worker: int | None = None
    """This rank's number among those that compute micro-batches."""
    _changes: dict[int, SharesChanged] = field(default_factory=dict)
    """By the step after which shares changed, until that is reported."""
    _times: StageTimes = field(default_factory=StageTimes)
    _waited_s: float = 0.0
    _found: dict[int, tuple[BadSample, ...]] = field(default_factory=dict)
    """Bad samples that this rank found, by step, for steps that are not settled yet."""
    _log: AppendFile | None = None
    _unsettled: dict[int, bytes] = field(default_factory=dict)
    """By step: lines of the log that are written once the step has taken them."""

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    @property
    def counts_samples(self) -> bool:
        """Ranks of one replica read the same samples; one of them counts them."""
        return self.groups.tensor.rank == 0 and self.groups.pipeline.rank == 0

    def start(self, step: int, folder: Path, emit: Callable[[Event], None], *, must_log: bool = True) -> None:
        """Start to read for ``step`` and those after it. ``must_log``: a log of samples that cannot be opened is an
        error; otherwise it is a warning, and opening is tried again."""
        self.loader.start(step)
        if self.logs_samples and self.counts_samples:
            self._open_log(RunFolder(folder).samples(self.rank), emit, must_log)

    def _open_log(self, path: Path, emit: Callable[[Event], None], must_log: bool) -> None:
        """From now on the samples of each step are logged."""
        log_name = f"the sample log of rank {self.rank}"

        def on_lost(why: str) -> None:
            emit(Warned(f"{log_name} cannot be written ({why}): training continues, and writing is retried"))

        def on_back(num_dropped: int) -> None:
            lost = f"{num_dropped} bytes of it were lost" if num_dropped else "nothing was lost"
            emit(Warned(f"{log_name} is written again; {lost}"))

        try:
            self._log = AppendFile(path, on_lost, on_back, must_open=must_log)
        except OSError as error:
            fix = "Make it writable, or set data.log_samples = false."
            raise SetupError(f"cannot write {path}: {error.strerror}", fix, rank=self.rank) from error

    def assigned(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step: those that were returned to it, then its own."""
        return (*self._returned_to_this(step), *self.loader.assigned(step))

    def load_step(self, step: int, assigned: Sequence[MicroBatch]) -> Sequence[LoadedBatch]:
        """Load the micro-batches of a step that are ``assigned`` to this rank. The samples of a padding micro-batch are
        counted by another rank."""
        own = self.loader.take(step)
        loaded = [*self.loader.read_again(self._returned_to_this(step)), *own]
        if self.must_agree:
            self._agree(loaded, step)
        self._times += self.loader.last_times
        if self.counts_samples:
            own = [one for one, planned in zip(loaded, assigned, strict=True) if not planned.is_padding]
            if bad := tuple(sample for one in own for sample in one.skipped):
                self._found[step] = bad
            if self._log is not None:
                self._write(step, own)
        return loaded

    def skip_step(self, step: int) -> None:
        """Leave out this rank's micro-batches of a step."""
        self.loader.take(step)

    def settle(self, step: int, taken: Sequence[int]) -> None:
        """``taken``: the workers whose micro-batches the step took; the others' are returned."""
        assert self.returned is not None
        self.returned.settle(step, taken)
        lines = self._unsettled.pop(step, b"")
        if self.worker not in taken:
            self._found.pop(step, None)  # whoever takes them finds them bad again
        elif self._log is not None and lines:
            self._log.write(lines)

    def figures(self, index: int) -> Mapping[str, Any]:
        """Times of reading since the last call."""
        times, self._times = self._times, StageTimes()
        waited_s, self._waited_s = self.loader.wait_s - self._waited_s, self.loader.wait_s
        return {
            "data_wait_s": waited_s,
            "data_read_s": times.read_s,
            "data_fetch_s": times.fetch_s,
            "data_decode_s": times.decode_s,
            "data_collate_s": times.collate_s,
        }

    def before_vote(self, index: int, ballot: Ballot) -> None:
        ballot.num_bad = len(self._found.get(index, ()))

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        """If the vote of a step counted bad samples, gather which ones they are, warn, and stop if there are too
        many."""
        done = entry.done
        if (change := self._changes.pop(done.step, None)) and self.rank == 0:
            emit(change)
        if not done.num_bad:
            return
        own = json.dumps([sample.to_json() for sample in self._found.pop(done.step - 1, ())])
        gathered = [
            BadSample.from_json(row) for text in self.groups.world.all_gather_text(own) for row in json.loads(text)
        ]
        fresh = self.quarantine.add(merge(gathered))
        for text in describe_skipped(fresh) if self.rank == 0 else ():
            emit(Warned(text, done.step))
        self.quarantine.check(done.step)

    @property
    def order_signature(self) -> str:
        """What must stay as it is in the sample order when a run resumes; empty for the default order."""
        return self.order.signature

    def set_shares(self, shares: tuple[int, ...], step: int) -> None:
        """Called on all ranks, after ``step``: sets how many micro-batches each takes from now on."""
        before, of = self.current_shares, "replica" if self.groups.replica_group.count > 1 else "data rank"
        if shares != before:
            self.loader.set_shares(shares)
            self._changes[step] = SharesChanged(step, of, list(shares), list(before))

    @property
    def current_shares(self) -> tuple[int, ...]:
        """Micro-batches that each of ``num_shares`` takes of a step of full length."""
        num_micro, width = self.loader.schedule.micro_batches_per_step, self.groups.data.size // self.num_shares
        return self.loader.shares or even_shares(num_micro, self.num_shares, width)

    def tree(self) -> dict[str, Any]:
        shares = {"shares": list(self.loader.shares)} if self.loader.shares else {}
        waiting = self.returned.state() if self.returned else []
        returned = {"returned": waiting} if waiting else {}
        return {"data": {"quarantine": self.quarantine.state(), **shares, **returned}}

    def check(self, saved: SavedState) -> None:
        waiting = saved.tree.get("data", {}).get("returned", ())
        if waiting and self.returned is None:
            what = f"{len(waiting)} micro-batches of the saved run were dropped by its steps and are still to be taken"
            raise CheckpointError(what, "Keep sync.server.backup at 1 or more, or resume from the end of an epoch.")

    def restore(self, saved: SavedState) -> None:
        """Saved shares are ignored if this run has another number of them or does not balance by speed."""
        state = saved.tree.get("data", {})
        self.quarantine.load(state.get("quarantine", ()))
        shares = tuple(map(int, state.get("shares", ())))
        self.loader.set_shares(shares if len(shares) == self.num_shares else ())
        if self.returned is not None:
            self.returned.load(state.get("returned", ()))

    def _returned_to_this(self, step: int) -> tuple[MicroBatch, ...]:
        return () if self.returned is None or self.worker is None else self.returned.assigned(step, self.worker)

    def _agree(self, loaded: Sequence[LoadedBatch], step: int) -> None:
        """Ranks of one replica each read the same samples: if one finds a sample bad that another does not (a damaged
        copy on one host), their batches differ in size and a collective would hang."""
        own = json.dumps([self.groups.data.rank, [bad.sample for one in loaded for bad in one.skipped]])
        found: dict[int, list[int]] = {}
        for replica, bad in map(json.loads, self.groups.replica_group.world.all_gather_text(own)):
            if found.setdefault(replica, bad) != bad:
                odd = sorted(set(found[replica]) ^ set(bad))
                what = f"sample {odd[0] if odd else bad} can be read by some ranks of a replica and not by others"
                fix = "Fix the copy on the host that cannot read it, or set data.on_bad = 'stop' to see its error."
                raise DataError(what, fix, step=step + 1)

    def close(self) -> None:
        self.loader.close()
        for source in self.sources:
            source.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, step: int, loaded: Sequence[LoadedBatch]) -> None:
        assert self._log is not None
        rows = [
            {
                "step": step + 1,
                "micro_batch": one.micro_batch.index,
                "first": one.micro_batch.first,
                "samples": [int(sample) for sample in self.order.between(one.micro_batch.first, one.micro_batch.last)],
                "skipped": [bad.sample for bad in one.skipped],
            }
            for one in loaded
        ]
        if self.returned is not None:
            now = round(time.time(), 3)
            rows = [
                row | {"of_step": one.micro_batch.step + 1, "time": now} for row, one in zip(rows, loaded, strict=True)
            ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        if self.returned is not None:
            self._unsettled[step] = lines
        else:
            self._log.write(lines)


def check_dataset_lengths(lengths: Sequence[str], identity: str) -> None:
    """Check that all ranks have opened the same data: otherwise each would read a different part of it."""
    others = [rank for rank, length in enumerate(lengths) if length != lengths[0]]
    if others:
        what = f"{identity} has {lengths[0]} samples on rank 0 and {lengths[others[0]]} on rank {others[0]}"
        raise DataError(what, "Give every rank the same data: the same files, and a length that does not change.")


def describe_skipped(fresh: Sequence[BadSample]) -> list[str]:
    """Warnings about the samples that one step skipped; the checkpoint lists them all."""
    warnings = [f"sample {bad.sample} is skipped: {bad.message}" for bad in fresh[:_NAMED]]
    if (more := len(fresh) - len(warnings)) > 0:
        warnings.append(f"and {more} more sample{'s are' if more > 1 else ' is'} skipped at this step")
    return warnings
