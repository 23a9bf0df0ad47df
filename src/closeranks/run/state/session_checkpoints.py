"""Decides when a session saves checkpoints, takes them, and reports their outcome.

Rank 0 decides that a save is due; the request is part of the vote, so that all ranks save their parts of the same step.
The copy is made while the next step computes and is complete before the optimizer changes anything; everything after it
happens in another process. Invariants: training never waits for a disk and never ends because of one: a save that fails
is reported and tried again; only the last one, which nothing follows, is waited for and may fail the run.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.capture.capture import Capture
from closeranks.checkpoint.config import seconds_of
from closeranks.checkpoint.format.manifest import parse_folder
from closeranks.checkpoint.save.save_schedule import SaveSchedule
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings
from closeranks.checkpoint.save.saver import CheckpointSaver, SaveTarget
from closeranks.core.errors import CloseranksError, SetupError
from closeranks.core.events import Evaluated, Event, Pruned, Saved, SaveFailed, Warned
from closeranks.core.requests import SAVE
from closeranks.core.system.fallback_folders import fallback_folders, resume_advice
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.run.huggingface.hub_files import saved_hub_metadata
from closeranks.run.job.job import Job
from closeranks.run.job.ownership import check_owned
from closeranks.run.state.rescued_files import remove_rescued
from closeranks.run.state.state import RunState
from closeranks.storage.open import absolute, open_storage
from closeranks.storage.protocol import StorageError

FOLDER, AUTO = "checkpoints", "auto"
_TRIES = 3
"""Attempts of the last save, which nothing follows that could try again."""
_EARLY_S = 10.0
"""When "auto" prepares for its first save: shorter runs need no buffer and no process."""


def checkpoint_place(job: Job, folder: Path) -> str:
    """Where a run's checkpoints are."""
    return absolute(job.checkpoint.folder or str(folder / FOLDER))


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The step and the state that a run starts from."""

    step: int = 0
    path: str = ""
    tree: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Warnings about it: checkpoints that were skipped and why, anything unusual about the weights."""
    is_rescued: bool = False
    """Whether it is no checkpoint but a rescued state, written by hosts that had lost the job's leader."""


class SessionCheckpoints(Component):
    """The saves of one session, in the order of its steps."""

    def __init__(
        self,
        context: RunContext,
        state: RunState,
        capture: Capture,
        folder: Path,
        emit: Callable[[Event], None],
        start_point: StartPoint,
    ) -> None:
        config = context.job.checkpoint
        self._context, self._state, self._capture = context, state, capture
        self._emit, self._config = emit, config
        self._folder = folder
        settings = SaveSettings.from_config(config, str(folder / FOLDER))
        remote = absolute(settings.remote) if settings.remote else ""
        self._settings = replace(settings, place=absolute(settings.place), remote=remote)
        mtbf_s = seconds_of(config.mtbf) if config.mtbf else None
        every = config.every if config.save else 0
        self._hub = (
            saved_hub_metadata(folder, start_point.tree, config.weights)
            if context.world.is_lead and config.save
            else {}
        )
        history = start_point.tree.get("rhythm") or {"is_ending": True}
        self._schedule = SaveSchedule.from_state(every, mtbf_s, context.world.size, history)
        self._is_requested = self._is_granted = self._is_pending = False
        """Requested: this rank's request is in a vote that is not read yet. Granted: all ranks save at the next
        boundary. Pending: on rank 0, a checkpoint is being written that is neither committed nor failed yet."""
        self._durable: set[tuple[int, str]] = set()
        """Step and tier of what is safe, as far as this rank can know: on rank 0 a committed checkpoint, elsewhere the
        rank's written part."""
        self._last_vote_at: float | None = None
        self._stalls: dict[int, float] = {}
        self._last_eval: Evaluated | None = None
        self._best: list[float] = []
        self._saved_step = -1
        if config.resume == AUTO and start_point.path and not start_point.is_rescued:
            self._saved_step = start_point.step
            self._durable.add((start_point.step, "primary"))
        self._token, self._num_agreements = "", 0
        self._saver: CheckpointSaver | None = self._open_early(start_point.step) if config.save else None
        self._warm_up_at = time.monotonic() + (_EARLY_S if every == "auto" else 0.0)
        self._is_warm, self._is_warned = every == 0, False

    # During training

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if self._requests_save(index + 1):
            ballot.requests |= {SAVE}

    def _requests_save(self, step: int) -> bool:
        """Whether this rank requests a save in the vote of ``step``; called once in every step."""
        self.poll_reports()
        check_owned()
        last_s, self._last_vote_at = self._last_vote_at, time.monotonic()
        if last_s is not None:
            self._schedule.record_step(self._last_vote_at - last_s)
        if not self._is_warm and self._last_vote_at >= self._warm_up_at and self._saver is not None:
            self._is_warm = True
            self._saver.warm_up(self._capture, self._state.tensors())
        if self._is_requested or self._is_granted:  # with an accelerator the host reads a vote one step late
            return False
        if self._context.world.is_lead:
            self._warn_if_too_frequent(step)
            self._is_requested = not self._is_pending and self._schedule.is_due(step, self._last_vote_at)
        else:
            self._is_requested = self._schedule.is_retry_due(self._last_vote_at)
        return self._is_requested

    def _warn_if_too_frequent(self, step: int) -> None:
        """Warn once if saves take longer than the steps between them."""
        every = self._config.every
        if self._is_pending and not self._is_warned and isinstance(every, int) and every and step % every == 0:
            self._is_warned = True
            what = f"a save takes longer than checkpoint.every = {every} steps: saves due meanwhile are skipped"
            self._emit(Warned(what, step))

    def grant_save(self) -> None:
        """The vote granted a save: all ranks save at the next boundary."""
        self._is_requested, self._is_granted = False, True

    @property
    def is_save_granted(self) -> bool:
        """Whether ``begin_save`` will save, once nothing else happens between two steps."""
        return self._is_granted

    def begin_save(self, step: int) -> list[SaveTarget]:
        """Called on all ranks. The targets of the save that was granted; empty if none was."""
        if not self._is_granted:
            return []
        self._is_granted = False
        self._context.step_timer.enter_phase(WorkerPhase.SAVE)
        return self._start_save(step)

    def on_eval(self, result: Evaluated) -> None:
        """Called on all ranks, with the same loss. A state among the best so far is copied at once, before hooks may
        change anything."""
        self._last_eval, self._last_vote_at = result, None  # the time since the last step was not training
        keep = self._config.keep_best if self._config.save and math.isfinite(result.loss) else 0
        if keep and (len(self._best) < keep or result.loss < max(self._best)):
            self._best = sorted([*self._best, result.loss])[:keep]
            if targets := self._start_save(result.step):
                self._capture.begin(self._state.tensors(), targets)
                self._finish_copy()

    def poll_reports(self) -> None:
        """Report the outcome of earlier saves; never blocks."""
        for report in self._saver.poll() if self._saver is not None else ():
            self._on_report(report)

    def _start_save(self, step: int) -> list[SaveTarget]:
        """Begin a save of the current state."""
        if step == self._saved_step:
            return []
        try:
            self._saver = self._saver or self._open(self._settings)
        except SetupError as error:  # the same on all ranks
            self._emit(SaveFailed(step, error.what, self._context.world.rank))
            return []
        self._is_pending = self._context.world.is_lead
        self._schedule.record_started()
        self._saved_step = step
        self._stalls = {step: 0.0}
        return self._saver.begin_save(step, self._tree(step, is_ending=False), self._metric(step))

    # Between steps and at the end: blocking

    def save_now(self, step: int, place: Path | str | None = None, *, is_hurried: bool = False) -> str:
        """Collective. Make this state durable and return its path; blocks, retries, and raises if all attempts fail.

        ``is_hurried``: the process will be killed soon, and an older save in progress is not worth waiting for.
        """
        if place is None:
            try:
                self._saver = self._saver or self._open(self._settings)
                return self._save_here(self._saver, step, is_hurried)
            except SetupError as error:  # the same on all ranks
                raise self._saved_elsewhere(step, error) from error
        saver = self._open(replace(self._settings, place=str(place), remote="", keep_last=1 << 30))
        try:
            return self._write(saver, step, self._settings.timeout_s, lambda report: None)
        finally:
            saver.close()

    def _save_here(self, saver: CheckpointSaver, step: int, is_hurried: bool) -> str:
        is_older = is_hurried and step != self._saved_step
        patience_s = self._context.job.agent.interrupt_s / 3 if is_older else self._settings.timeout_s
        for report in saver.wait(patience_s):
            self._on_report(report)
        tiers = ("primary", "remote") if self._settings.remote else ("primary",)
        if not self._all_agree(all((step, tier) in self._durable for tier in tiers)):
            return self._write(saver, step, patience_s, self._on_report)
        self._saved_step = step
        return saver.path_of(step)

    def _saved_elsewhere(self, step: int, error: SetupError) -> SetupError:
        """Collective. Nothing follows this save, so its state is written wherever there is space; the error says where.
        Memory and temporary files belong to one host: with several hosts, their agents rescue the state."""
        context = self._context
        looks = context.world.is_lead and context.world.local_size == context.world.size
        num_bytes = self._capture.num_saved_bytes(self._state.tensors()) * context.world.size
        here = fallback_folders(self._folder, num_bytes) if looks else iter(())
        while place := context.groups.world.broadcast_text(str(next(here, ""))):
            saver = self._open(replace(self._settings, place=place, remote="", keep_last=1 << 30))
            reports: list[SaveReport] = []
            try:
                path = self._write(saver, step, self._settings.timeout_s, reports.append, num_tries=1)
            except SetupError:
                if context.world.is_lead:
                    shutil.rmtree(place, ignore_errors=True)
                continue
            finally:
                saver.close()
            if context.world.is_lead:
                written = next(report for report in reports if report.kind == "committed")
                self._emit(Saved(step, path, written.num_bytes, written.seconds))
            return SetupError(
                error.what, f"The state of step {step} is in {path} instead. {resume_advice(Path(place))}"
            )
        return error

    def _write(
        self,
        saver: CheckpointSaver,
        step: int,
        patience_s: float,
        on_report: Callable[[SaveReport], None],
        num_tries: int = _TRIES,
    ) -> str:
        failed: dict[str, str] = {}
        reported: set[tuple[str, str]] = set()
        for number in range(num_tries):
            is_last = number == num_tries - 1
            tree = self._tree(step, is_ending=True)
            reports = saver.save_now(step, self._state.tensors(), tree, self._metric(step), patience_s=patience_s)
            failed = {r.tier: r.what for r in reports if r.kind == "failed" and r.save == reports[-1].save}
            for report in reports:  # once: a tier that is committed reports so at every attempt
                if (report.kind, report.tier) not in reported and (is_last or report.kind != "failed"):
                    on_report(report)
            reported |= {(report.kind, report.tier) for report in reports if report.kind == "committed"}
            if self._all_agree(not failed):
                return saver.path_of(step)
        if self._all_agree("primary" not in failed):  # only the remote tier failed, which was reported
            return saver.path_of(step)
        if saver.went_remote(step) and self._all_agree("remote" not in failed):  # only the remote tier succeeded
            return f"{self._settings.remote.rstrip('/')}/{saver.path_of(step).rpartition('/')[2]}"
        what = failed.get("primary") or "another worker could not save its part of the state"
        raise SetupError(what, "Fix that, and resume: the previous checkpoint is still valid.")

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def after_vote(self, index: int, verdict: Verdict) -> None:
        """After this the optimizer may change the state."""
        self._finish_copy()

    def _finish_copy(self) -> None:
        """Wait until the state may change."""
        self._capture.wait_until_copied()
        if self._saved_step in self._stalls and not self._stalls[self._saved_step]:
            self._stalls[self._saved_step] = self._capture.stall_s

    def _open_early(self, step: int) -> CheckpointSaver | None:
        """A place that cannot be used is the user's mistake when a run starts; in a later generation it is a failed
        save, and the next one tries again."""
        try:
            return self._open(self._settings)
        except SetupError as error:
            if self._context.world.is_first_generation:
                raise
            self._emit(SaveFailed(step, error.what, self._context.world.rank))
            return None

    def _open(self, settings: SaveSettings) -> CheckpointSaver:
        """Collective, with the same outcome on all ranks. Rank 0 draws a token and looks up the attempt number, which
        name all saves, and broadcasts them."""
        world, text = self._context.world, ""
        if world.is_lead:
            try:
                text = json.dumps([secrets.token_hex(4), next_attempt(settings.place, settings.remote), ""])
            except CloseranksError as error:
                text = json.dumps(["", 0, error.what])
        token, attempt, problem = json.loads(self._context.groups.world.broadcast_text(text))
        if problem:
            raise SetupError(problem, "Change checkpoint.folder, or make it writable.")
        self._token = token  # fresh: no key of an earlier agreement starts with it
        return CheckpointSaver(
            world.rank, world.size, token, attempt, str(self._context.layout), settings, self._config
        )

    def _tree(self, step: int, *, is_ending: bool) -> dict[str, Any] | None:
        if not self._context.world.is_lead:
            return None
        hub = {"hub": self._hub} if self._hub else {}
        return {**self._state.checkpoint_tree(step), **hub, "rhythm": self._schedule.state(is_ending=is_ending)}

    def schedule_state(self) -> dict[str, Any]:
        """State of the save schedule, for the next generation."""
        return self._schedule.state(is_ending=False)

    def _metric(self, step: int) -> float | None:
        """The evaluation loss of exactly this state, if there is one."""
        return self._last_eval.loss if self._last_eval is not None and self._last_eval.step == step else None

    def _all_agree(self, is_ok: bool) -> bool:
        self._num_agreements += 1
        patience_s = 3 * self._settings.timeout_s  # rank 0 may wait for a save in progress, a lock, and parts
        return self._context.groups.world.all_agree(is_ok, f"{self._token}/{self._num_agreements}", patience_s)

    def _on_report(self, report: SaveReport) -> None:
        assert self._saver is not None
        now_s, here = time.monotonic(), (report.step, report.tier)
        match report.kind:
            case "written" if not self._context.world.is_lead:
                self._durable.add(here)
                if report.tier == "primary":
                    self._schedule.clear_failures()
            case "committed":
                self._durable.add(here)
                stall_s = self._stalls.get(report.step, 0.0)
                if report.tier == "primary":
                    remove_rescued(self._folder, report.step)
                    self._is_pending = False
                    self._schedule.record_save(stall_s, report.seconds, now_s)
                path = self._saver.path_of(report.step) if report.tier == "primary" else report.path
                self._emit(Saved(report.step, path, report.num_bytes, report.seconds, stall_s, report.tier))
            case "failed":
                self._durable.discard(here)
                if report.tier == "primary":
                    self._is_pending = False
                    self._schedule.record_failure(now_s)
                self._emit(SaveFailed(report.step, report.what, self._context.world.rank, report.tier))
            case "collected":
                if report.what:
                    self._emit(Warned(f"old checkpoints could not be removed: {report.what}", report.step))
                if report.names:
                    self._emit(Pruned(report.step, list(report.names)))


def next_attempt(place: str, remote: str) -> int:
    """The attempt number under which this opening of a run saves: one more than that of every checkpoint at either
    place. A remote place that cannot be reached now is ignored: it may be reached later."""
    try:
        attempts = _attempts_at(place)
    except StorageError as error:
        raise SetupError(f"checkpoints cannot be kept in {place}: {error}") from error
    try:
        attempts += _attempts_at(remote) if remote else []
    except StorageError:
        attempts += [0]
    return max(attempts, default=0) + 1


def _attempts_at(place: str) -> list[int]:
    return [found[1] for name in open_storage(place).names() if (found := parse_folder(name))]
