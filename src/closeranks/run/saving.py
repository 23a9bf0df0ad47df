"""When does a session save, and what does it say of it?

Rank 0 decides that a save is due; the vote carries it, so that all ranks take their parts of the same step. The copy is
made while the next step computes and is joined before the optimizer changes anything; everything after it happens in
another process. Invariants: training never waits for a disk and never ends because of one: a save that fails is told
and tried again; only the last one, which nothing follows, is waited for and may fail the run.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeranks.checkpoint.config import seconds_of
from closeranks.checkpoint.manifest import parse_folder
from closeranks.checkpoint.order import Report, Settings
from closeranks.checkpoint.rhythm import Rhythm
from closeranks.checkpoint.saver import Saver
from closeranks.checkpoint.storage.open import open_storage
from closeranks.checkpoint.storage.protocol import StorageError
from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, Event, Pruned, Saved, SaveFailed
from closeranks.elastic.vote import Verdict
from closeranks.run.parts import Parts
from closeranks.run.state import items, tree_of

FOLDER = "checkpoints"
_TRIES = 3
"""Of the last save, after which nothing could try again."""
_EARLY_S = 10.0
"""When "auto" makes ready for its first save: shorter runs need no buffer and no process."""


def place_of(parts: Parts, folder: Path) -> str:
    """Where a run's checkpoints lie."""
    return parts.job.checkpoint.folder or str(folder / FOLDER)


class Saving:
    """The saves of one session, in the order of its steps."""

    def __init__(
        self, parts: Parts, folder: Path, emit: Callable[[Event], None], history: Mapping[str, Any] | None
    ) -> None:
        config = parts.job.checkpoint
        self._parts, self._emit, self._config = parts, emit, config
        self._settings = Settings.from_config(config, str(folder / FOLDER))
        self._savers: dict[str, Saver] = {}
        mtbf_s = seconds_of(config.mtbf) if config.mtbf else None
        every = config.every if config.save else 0
        self._rhythm = Rhythm.from_state(every, mtbf_s, parts.world.size, history or {"is_ending": True})
        self._is_asked = self._is_pending = False
        """Pending: on rank 0, whether a checkpoint is on its way that neither counts nor failed yet."""
        self._failed: set[int] = set()
        self._asked_s: float | None = None
        self._stalls: dict[int, float] = {}
        self._judged: Evaluated | None = None
        self._best: list[float] = []
        self._saved_step = -1
        self._warm_s = time.monotonic() + (_EARLY_S if every == "auto" else 0.0)
        self._is_warm = not config.save or every == 0
        if not self._is_warm:
            self._saver()  # a place that cannot be written to is told before training
        parts.watchers.append(self._join)

    # While training goes on

    def asks(self, step: int) -> bool:
        """Whether this rank wants a save with the vote of ``step``; called once in every step."""
        self.settle()
        last_s, self._asked_s = self._asked_s, time.monotonic()
        if last_s is not None:
            self._rhythm.stepped(self._asked_s - last_s)
        if not self._is_warm and self._asked_s >= self._warm_s:
            self._is_warm = True
            self._saver().warm(items(self._parts))
        if self._is_asked:
            return True
        if self._parts.world.is_lead:
            self._is_asked = not self._is_pending and self._rhythm.is_due(step, self._asked_s)
        else:
            self._is_asked = self._rhythm.is_retry_due(self._asked_s)
        return self._is_asked

    def begin(self, step: int) -> None:
        """All ranks, at the same step: take the state as it is now. Returns before anything is written."""
        self._is_asked = False
        if step == self._saved_step:
            return
        started_s = time.monotonic()
        self._is_pending = self._parts.world.is_lead
        self._saver().take(step, items(self._parts), self._tree(step, is_ending=False), self._metric(step))
        self._saved_step = step
        self._stalls = {step: time.monotonic() - started_s}

    def evaluated(self, result: Evaluated) -> None:
        """All ranks, with the same loss: one of the best so far is worth keeping."""
        self._judged, self._asked_s = result, None  # what passed since the last step was no step
        keep = self._config.keep_best if self._config.save else 0
        if keep and (len(self._best) < keep or result.loss < max(self._best)):
            self._best = sorted([*self._best, result.loss])[:keep]
            self.begin(result.step)

    def settle(self) -> None:
        """Tell what has become of earlier saves; never waits."""
        for saver in self._savers.values():
            for report in saver.poll():
                self._hear(saver, report)

    # When nothing else is to do

    def save_now(self, step: int, place: Path | str | None = None, *, is_hurried: bool = False) -> str:
        """All ranks: make this state durable and return where it lies; waits, tries again, and raises in the end.

        ``is_hurried``: somebody will kill us soon, and an older save under way is not worth waiting for.
        """
        saver = self._saver(place)
        is_older = is_hurried and step != self._saved_step
        patience_s = self._parts.job.agent.interrupt_s / 3 if is_older else self._settings.timeout_s
        for report in saver.wait(patience_s):
            self._hear(saver, report)
        if place is None and step == self._saved_step and self._everywhere(step not in self._failed):
            return saver.path_of(step)
        failure = ""
        for _ in range(_TRIES):
            tree = self._tree(step, is_ending=True)
            reports = saver.save_now(step, items(self._parts), tree, self._metric(step), patience_s=patience_s)
            failure = self._failure(reports)
            for report in reports:
                self._hear(saver, report)
            if self._everywhere(not failure):
                self._saved_step = step if place is None else self._saved_step
                return saver.path_of(step)
        what = failure or "another worker could not save its part of the state"
        raise SetupError(what, "Free space or choose another checkpoint.folder, and resume from the last checkpoint.")

    def close(self) -> None:
        for saver in self._savers.values():
            saver.close()

    def _join(self, index: int, verdict: Verdict) -> None:
        """A watcher of the step: from here on the optimizer may change the state."""
        for saver in self._savers.values():
            stalled_s = saver.join()
            if stalled_s and self._saved_step in self._stalls:
                self._stalls[self._saved_step] += stalled_s

    def _saver(self, place: Path | str | None = None) -> Saver:
        """One for each place, opened when it is first needed; every rank needs it at the same time."""
        settings = self._settings if place is None else _elsewhere(self._settings, str(place))
        if settings.place not in self._savers:
            world = self._parts.world
            token, part = self._agree(settings)
            self._savers[settings.place] = Saver(
                world.rank, world.size, token, part, str(self._parts.layout), settings, self._config
            )
        return self._savers[settings.place]

    def _agree(self, settings: Settings) -> tuple[str, int]:
        """Names for all saves of this session: rank 0 draws and looks, the others are told."""
        text = ""
        if self._parts.world.is_lead:
            text = json.dumps([secrets.token_hex(4), next_part([settings.place, settings.remote])])
        token, part = json.loads(self._parts.groups.world.share_text(text))
        return token, part

    def _tree(self, step: int, *, is_ending: bool) -> dict[str, Any] | None:
        if not self._parts.world.is_lead:
            return None
        return {**tree_of(self._parts, step), "rhythm": self._rhythm.state(is_ending=is_ending)}

    def _metric(self, step: int) -> float | None:
        """The evaluation of this very state, where there is one."""
        return self._judged.loss if self._judged is not None and self._judged.step == step else None

    def _everywhere(self, is_well: bool) -> bool:
        return self._parts.groups.world.all_agree(is_well)

    def _failure(self, reports: Sequence[Report]) -> str:
        return next((r.what for r in reports if r.kind == "failed" and r.tier == "primary"), "")

    def _hear(self, saver: Saver, report: Report) -> None:
        now_s = time.monotonic()
        match report.kind:
            case "committed":
                stall_s = self._stalls.get(report.step, 0.0)
                if report.tier == "primary":
                    self._is_pending = False
                    self._rhythm.saved(report.step, stall_s, report.seconds, now_s)
                path = saver.path_of(report.step) if report.tier == "primary" else report.path
                self._emit(Saved(report.step, path, report.num_bytes, report.seconds, stall_s, report.tier))
            case "failed":
                if report.tier == "primary":
                    self._is_pending = False
                    self._failed.add(report.step)
                    self._rhythm.failed(report.step, now_s)
                self._emit(SaveFailed(report.step, report.what, self._parts.world.rank, report.tier))
            case "collected" if report.names:
                self._emit(Pruned(report.step, list(report.names)))


def next_part(places: Sequence[str]) -> int:
    """Under which number this opening of a run saves: beyond that of every checkpoint that lies there."""
    parts = [0]
    for place in places:
        if not place:
            continue
        try:
            found = (parse_folder(name) for name in open_storage(place).names())
        except StorageError as error:
            raise SetupError(f"checkpoints cannot be kept in {place}: {error}", "Change checkpoint.folder.") from error
        parts += [one[1] for one in found if one]
    return max(parts) + 1


def _elsewhere(settings: Settings, place: str) -> Settings:
    """A place that the caller chose: one checkpoint there, and nothing that was there is removed."""
    return replace(settings, place=place, remote="", keep_last=1 << 30)
