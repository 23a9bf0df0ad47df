"""Takes snapshots of a session's state, into memory that outlives the workers.

One before the first step, and one after every n-th commit, while the next step computes. Each copy is complete before
the next vote, and is sealed before the vote of the step that is copied next (the same vote if n is 1). With "auto", n
follows from the cost of a snapshot and the time of a step, on which all ranks agree from time to time.

Invariants: all ranks take snapshots of the same steps, and none begins one before all have sealed the one before it
([Note: one whole state at any time]); training never ends for lack of memory; without snapshot memory nothing is done.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.capture.capture import Capture
from closeranks.capture.slots import SlotHeader
from closeranks.core.events import Event, Snapshotting, StepDone, Warned, encode
from closeranks.elastic.backup_ranks import layout_digest, survives_host_loss
from closeranks.elastic.restore_plan import OWN_FILES, PEER_FILES, RankPlacement, rank_placements, slot_to_overwrite
from closeranks.elastic.snapshot_interval import should_remeasure, snapshot_cost_s, steps_between
from closeranks.elastic.snapshot_paths import SnapshotPaths
from closeranks.elastic.snapshot_writer import Snapshot, SnapshotDestinations, SnapshotResult, SnapshotWriter
from closeranks.elastic.vote import Ballot
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.run.state.restore import RestoredGeneration, choose_backup_ranks, rank_images
from closeranks.run.state.state import RunState
from closeranks.run.worker.agent_client import AgentClient
from closeranks.telemetry.run_log.recorder import to_line

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

_NUM_FIRST = 2
"""The first snapshots of a generation, one for each slot of the pair: allocating the slot may take far longer than a
copy."""


class SessionSnapshots(Component):
    """The snapshots of one session, in the order of its steps."""

    def __init__(
        self,
        context: RunContext,
        state: RunState,
        capture: Capture,
        restored: RestoredGeneration,
        emit: Callable[[Event], None],
        agent_client: AgentClient,
        schedule_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._context, self._state, self._capture = context, state, capture
        self._emit, self._agent_client, self._schedule_state = emit, agent_client, schedule_state
        self._sync_schedule = context.sync_schedule
        self._last_steps: deque[StepDone] = deque(maxlen=context.sync_schedule.sync_interval)
        """Results of the last steps: the next generation reports them if rank 0 was lost before it could."""
        self._restored = restored
        self._images = rank_images(context, state)
        self._backup_ranks = choose_backup_ranks(context, state, self._images)
        self._writer = SnapshotWriter(self._destinations(restored.snapshot_paths)) if restored.snapshot_paths else None
        every = context.job.elastic.snapshot_every
        self._is_auto = every == "auto"
        self._every = max(1, every) if isinstance(every, int) else int(restored.start_point.tree.get("every", 1))
        self._reported_every = restored.start_point.tree.get("every")
        self._first = self._begun = self._done = restored.start_point.step
        self._sealed = -1
        self._is_warned = False
        self._closed_bytes = 0
        """Of the snapshots when they were closed."""
        self._stepped_at, self._lost_s = 0.0, 0.0
        self._num_results, self._has_decided = 0, False
        self._steps, self._stalls, self._lates, self._sends = (list[float]() for _ in range(4))

    def emit_start_events(self, warnings: Sequence[str]) -> None:
        """Emit the events that say where this generation starts. ``warnings``: warnings about the run."""
        for event in self._restored.start_events(warnings, is_rank_zero=self._context.world.is_lead):
            self._emit(event)

    def start(self, step: int) -> None:
        """Called before the first step. Nothing is copied if every copy is already where it would be written."""
        if self._writer is None:
            return
        self._stepped_at = time.monotonic()
        if self._restored.is_in_place:
            self._sealed = step
            self._agent_client.note_snapshot(step)
        else:
            self._capture.begin(self._state.tensors(), self._snapshot(self._writer, step))

    def is_due(self, step: int) -> bool:
        """Whether ``after_step`` will copy the state of this step. Only at boundaries do all ranks have the same
        state."""
        is_time = step - self._begun >= self._every and self._sync_schedule.is_sync_step(step)
        return self._writer is not None and is_time

    def after_step(self, step: int) -> list[Snapshot]:
        """Called after a commit, once nothing else changes the state before the next step. Returns the targets of a
        snapshot, empty if none is due."""
        if self._writer is None:
            return []
        now = time.monotonic()
        self._steps.append(max(0.0, now - self._stepped_at - self._lost_s))
        self._stepped_at, self._lost_s, self._done = now, 0.0, step
        if self._is_time(step):
            self._decide(self._writer, step)
        if self.is_due(step):
            return self._snapshot(self._writer, step)
        if step == self._first + 1:  # not earlier: a recovery ends with the first step of its generation
            self._writer.make_ready(self._capture, self._state.tensors())
        return []

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        self._last_steps.append(entry.done)

    def before_vote(self, index: int, ballot: Ballot) -> None:
        """Completes the copy in progress. If a snapshot may follow this step, also waits until the one before it is
        sealed or has failed: once all ranks have voted, the slot of the one before that is free."""
        if self._writer is None:
            return
        self._capture.wait_until_copied()
        step = self._done + 1
        if self.is_due(step) or self._is_time(step) or self._writer.is_done:
            self._wait(self._writer)

    def seal(self, step: int) -> bool:
        """Collective, at the end of a generation. Returns whether every rank now has exactly this step in memory."""
        if self._writer is not None:
            self._wait(self._writer)
            if self._begun != step:
                self._context.groups.world.all_gather_text("")  # all have sealed the one before
                self._capture.begin(self._state.tensors(), self._snapshot(self._writer, step))
                self._wait(self._writer)
        return all(self._context.groups.world.all_gather_text("yes" if self._sealed == step else ""))

    def hand_over(self, step: int, save: Callable[[], object]) -> None:
        """Collective, when a generation ends by agreement: the next one finds exactly this step in memory, whichever
        host leaves, or else in a checkpoint."""
        self._context.step_timer.enter_phase(WorkerPhase.SNAPSHOT)
        is_safe = self.seal(step) and survives_host_loss(self._context.hosts, self._images, self._backup_ranks)
        if not is_safe and self._context.job.checkpoint.save:
            save()
        self._agent_client.has_regrouped = True

    def close(self) -> None:
        if self._writer is not None:
            self._closed_bytes = self._writer.num_bytes
            self._writer.close()

    def _snapshot(self, writer: SnapshotWriter, step: int) -> list[Snapshot]:
        world = self._context.world
        header = SlotHeader(
            generation=world.generation,
            step=step,
            image=self._images[world.rank],
            num_images=len(set(self._images)),
            layout=layout_digest(self._context.layout),
            rank=world.rank,
            run=self._restored.snapshot_paths.run,
        )
        tree: dict[str, Any] = {**self._state.tree(step), "every": self._every}
        after = self._sync_schedule.previous_sync(step)
        tree["last"] = "".join(to_line(encode(done)).decode() for done in self._last_steps if after < done.step <= step)
        if world.is_lead:
            tree["rhythm"] = self._schedule_state()
        self._begun = step
        return writer.snapshot(header, json.dumps(tree).encode())

    def _wait(self, writer: SnapshotWriter) -> None:
        self._capture.wait_until_copied()
        result = writer.wait()
        if result is not None:
            self._on_result(result)

    def _on_result(self, result: SnapshotResult) -> None:
        if result.is_sealed:
            self._sealed = result.step
            self._agent_client.note_snapshot(result.step)
        self._num_results += 1
        if self._num_results == _NUM_FIRST + 1:
            for costs in (self._stalls, self._lates, self._sends):
                costs.clear()
        num_threads = 1 if self._context.device.type == "cuda" else torch.get_num_threads()
        num_busy = self._context.world.local_size * num_threads
        for seconds, costs in ((result.stall_s, self._stalls), (result.late_s, self._lates)):
            costs.append(snapshot_cost_s(seconds, result.busy_s, _num_cores(), num_busy))
        self._sends.append(result.send_s)
        self._lost_s += result.late_s if self._every == 1 else result.stall_s
        if result.problem and not self._is_warned:
            self._is_warned = True
            what = f"rank {self._context.world.rank}: {result.problem}; training continues"
            self._emit(Warned(what, result.step))

    def _is_time(self, step: int) -> bool:
        """Counted in boundaries, as ranks can agree only there."""
        num_rounds = self._sync_schedule.num_syncs(step) - self._sync_schedule.num_syncs(self._first)
        return self._sync_schedule.is_sync_step(step) and should_remeasure(num_rounds, has_decided=self._has_decided)

    def _decide(self, writer: SnapshotWriter, step: int) -> None:
        """Collective. The first step and the first snapshots, which include allocation, are left out of the figures if
        there are others. A generation that has taken no others yet keeps the interval it started with."""
        if self._num_results <= (_NUM_FIRST if self._is_auto else 0):  # same on all ranks: all begun ones are done
            return
        self._has_decided = True
        steps = sorted(self._steps[1:] or self._steps)
        # The lower quartile is a step without a snapshot: with one every second step, half of the steps have none.
        own = [median(steps) if self._context.device.type == "cpu" else steps[len(steps) // 4]]
        own += [median_low(costs) for costs in (self._stalls, self._lates, self._sends)]
        gathered = [json.loads(text) for text in self._context.groups.world.all_gather_text(json.dumps(own))]
        step_s, stall_s, late_s, send_s = (max(numbers) for numbers in zip(*gathered, strict=True))
        for numbers in (self._steps, self._stalls, self._lates, self._sends):
            del numbers[:-1]
        if self._is_auto:
            share = self._context.job.elastic.snapshot_cost
            self._every = steps_between(stall_s, late_s, step_s, share, send_s)
        cost_s = late_s if self._every == 1 else max(stall_s, send_s - step_s)
        if self._every != self._reported_every:
            self._reported_every = self._every
            if self._context.world.is_lead:
                every = max(self._every, self._sync_schedule.sync_interval)
                self._emit(Snapshotting(step, every, writer.num_bytes, cost_s, self.redundancy))

    def memory(self) -> Mapping[str, int]:
        return {} if self._writer is None else {"snapshots": self._closed_bytes or self._writer.num_bytes}

    @property
    def redundancy(self) -> str:
        """Where the second copy of each rank's state is, for people."""
        hosts = self._context.hosts
        pairs = [(hosts[rank], hosts[backup]) for rank, backup in enumerate(self._backup_ranks) if backup is not None]
        if pairs:
            return "peer on another host" if all(one != other for one, other in pairs) else "peer"
        return "replica" if len(set(self._images)) < len(self._images) else "none"

    def _destinations(self, snapshot_paths: SnapshotPaths) -> SnapshotDestinations:
        hosts, rank = self._context.hosts, self._context.world.rank
        placements = rank_placements(hosts, self._images)
        backup = self._backup_ranks[rank]
        same_host = placements[backup] if backup is not None and hosts[backup] == hosts[rank] else None
        across_hosts = [(w, k) for w, k in enumerate(self._backup_ranks) if k is not None and hosts[w] != hosts[k]]
        source = next((writer for writer, other in across_hosts if other == rank), None)
        return SnapshotDestinations(
            own=self._pair(snapshot_paths, snapshot_paths.own_index, placements[rank], OWN_FILES),
            same_host_slots=None
            if same_host is None
            else self._pair(snapshot_paths, same_host.local_index, same_host, PEER_FILES),
            remote_peer=None if same_host is not None else backup,
            remote_source=source,
            remote_source_slots=None
            if source is None
            else self._pair(snapshot_paths, snapshot_paths.own_index, placements[rank], PEER_FILES),
            group=self._open_group() if across_hosts else None,
        )

    def _pair(
        self, snapshot_paths: SnapshotPaths, local_index: int, placement: RankPlacement, files: tuple[int, int]
    ) -> tuple[str, str]:
        first = slot_to_overwrite(self._restored.found_copies, self._restored.state, placement, files)
        second = files[0] if first == files[1] else files[1]
        return snapshot_paths.paths[local_index][first], snapshot_paths.paths[local_index][second]

    def _open_group(self) -> dist.ProcessGroup:
        """Collective. A group of its own, so that snapshots cannot be confused with the messages of training."""
        timeout = timedelta(seconds=self._context.job.run.timeout_s)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self._context.world_group.closers.append(lambda: dist.destroy_process_group(group))
        return group


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
