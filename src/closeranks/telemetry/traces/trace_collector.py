"""Asks a running job for a trace, and waits until every rank has written its file.

Invariant: what is waited for can always come to an end: the run answers, ends, loses a rank, or nothing happens for
``patience_s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.traces.rank_trace import TraceDamaged, read_header
from closeranks.telemetry.traces.run_watch import RunWatch
from closeranks.telemetry.traces.trace_file import failure_file
from closeranks.telemetry.traces.trace_mailbox import TraceAnswer, TraceMailbox, TraceRequest

_PAUSE_S = 0.1
_GRACE_S = 5.0
"""Once no rank can begin to write any more, one that has begun may finish."""


@dataclass(frozen=True, slots=True)
class CollectedTraces:
    folder: Path
    """Where the traces of these steps are."""
    paths: Mapping[int, Path]
    missing: Mapping[int, str]
    """Ranks without a trace, and why."""


class TraceCollector:
    def __init__(self, folder: Path, on_note: Callable[[str], None], patience_s: float) -> None:
        self._run, self._watch = RunFolder(folder), RunWatch(folder)
        self._on_note, self._patience_s = on_note, patience_s

    def collect(self, request: TraceRequest) -> CollectedTraces:
        """``UserError`` if the run refuses or cannot answer."""
        self._check_running()
        mailbox = TraceMailbox(self._run.path)
        with mailbox.claim():
            try:
                mailbox.post(request)
                answer = self._wait_for_answer(mailbox, request)
            finally:
                mailbox.withdraw()
            if answer.refusal:
                raise UserError(f"nothing is traced: {answer.refusal}", "Ask for other steps or ranks, or later.")
            return self._wait_for_traces(answer)

    def _check_running(self) -> None:
        if ending := self._watch.ending():
            fix = (
                "Only a run that is training can be traced: start it again, with --profile 10:13 to trace chosen steps."
            )
            raise UserError(f"{self._run.path} {ending}", fix)

    def _wait_for_answer(self, mailbox: TraceMailbox, request: TraceRequest) -> TraceAnswer:
        where = self._watch.step
        self._on_note(f"asking for a trace; the run answers after a step{f' (now at {where})' if where else ''} ...")
        generation, deadline = self._watch.generation, time.monotonic() + self._patience_s
        while (answer := mailbox.answer_to(request)) is None:
            self._check_running()
            if self._watch.generation != generation and not mailbox.is_waiting:
                raise _lost(self._run.path)
            if time.monotonic() > deadline:
                what = f"{self._run.path} has not answered within {self._patience_s:g} s"
                fix = f"Is it training? `closeranks status {self._run.path}` shows it. --timeout sets how long to wait."
                raise UserError(what, fix)
            time.sleep(_PAUSE_S)
        return answer

    def _wait_for_traces(self, answer: TraceAnswer) -> CollectedTraces:
        folder = self._run.step_traces(answer.first_step)
        self._on_note(f"{_describe(answer)}, after one step of warm-up ...")
        paths = {rank: folder / f"rank-{rank:05d}.json.gz" for rank in answer.ranks}
        found: dict[int, Path] = {}
        failed: dict[int, str] = {}
        deadline, is_over = time.monotonic() + self._patience_s, False
        while (open_ranks := [rank for rank in paths if rank not in found and rank not in failed]) and (
            time.monotonic() < deadline
        ):
            before = len(found)
            for rank in open_ranks:
                self._look(rank, paths[rank], answer.id, found, failed)
            if len(found) > before:
                self._on_note(f"traces written: {len(found)} of {len(paths)}")
                deadline = max(deadline, time.monotonic() + self._patience_s) if not is_over else deadline
            if not is_over and self._is_over(answer):
                is_over, deadline = True, time.monotonic() + _GRACE_S
            time.sleep(_PAUSE_S)
        missing = {rank: failed.get(rank, self._why_missing(answer)) for rank in paths if rank not in found}
        if is_over:
            _remove_unfinished(folder)
        return CollectedTraces(folder, found, missing)

    def _look(self, rank: int, path: Path, request: str, found: dict[int, Path], failed: dict[int, str]) -> None:
        """A file of an earlier request is none of ours."""
        try:
            if read_header(path).request == request:
                found[rank] = path
        except FileNotFoundError:
            with suppress(OSError):
                failure = failure_file(path, request)
                failed[rank] = read_text(failure, 1 << 16)
                failure.unlink()
        except (OSError, TraceDamaged) as error:
            failed[rank] = str(error)

    def _is_over(self, answer: TraceAnswer) -> bool:
        return bool(self._watch.ending()) or self._watch.generation > answer.generation

    def _why_missing(self, answer: TraceAnswer) -> str:
        if self._watch.generation > answer.generation:
            return "a rank was lost while it was traced"
        if ending := self._watch.ending():
            return f"the run {ending}"
        return f"nothing was written for {self._patience_s:g} s; is its run folder another one than here?"


def _lost(path: Path) -> UserError:
    return UserError(f"{path} lost a rank before the trace began", "It recovers by itself. Ask again.")


def _describe(answer: TraceAnswer) -> str:
    steps = (
        f"step {answer.first_step}"
        if answer.first_step == answer.last_step
        else (f"steps {answer.first_step} to {answer.last_step}")
    )
    return f"tracing {steps} on {len(answer.ranks)} rank{'s' * (len(answer.ranks) != 1)}"


def _remove_unfinished(folder: Path) -> None:
    """What killed ranks have left behind."""
    for path in folder.glob(".rank-*"):
        with suppress(OSError):
            path.unlink()
