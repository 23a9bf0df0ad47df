"""Formats a run's status for people. Pure: a status and its freshness in, text out.

Invariant: what is shown as current was reported just now; anything older is shown with its age.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from closeranks.facts.prices import DevicePrice
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.account_text import account_lines
from closeranks.telemetry.goodput.loss_target import target_words
from closeranks.telemetry.live.status import RunStatus, StatusFreshness, WorkerStatus


def status_text(status: RunStatus, freshness: StatusFreshness, now: float, price: DevicePrice | None = None) -> str:
    """The whole output of ``closeranks status``."""
    parts = [f"{status.run}: {_first_line(status, freshness, now)}"]
    if freshness in (StatusFreshness.NOW, StatusFreshness.SILENT):
        parts += [_agent_line(status, now), "", *_worker_rows(status.workers)]
    if len(status.hosts) > 1 and freshness is not StatusFreshness.ENDED:
        parts += [
            "",
            *_table(("host", "workers", "state"), [(h.name, str(h.num_workers), h.state) for h in status.hosts]),
        ]
    if status.device and status.target is not None:
        parts += ["", f"target loss: {target_words(status.target, price, status.device, status.item)}"]
    if status.device and (lines := account_lines(status.account, price, status.device, status.item)):
        parts += ["", *lines]
    if status.happened:
        rows = [f"  {_clock(one.at, now)}  {one.text}" for one in status.happened]
        parts += ["", "last events", *rows]
    if status.notes:
        parts += ["", *(f"Note: {note}." for note in status.notes)]
    return "\n".join(parts)


def one_line(status: RunStatus, freshness: StatusFreshness, now: float) -> str:
    """For output that is not a terminal, where the screen cannot be redrawn."""
    return _first_line(status, freshness, now)


def _first_line(status: RunStatus, freshness: StatusFreshness, now: float) -> str:
    place = _place(status)
    who = f"its agent, process {status.writer.pid} on {status.writer.host},"
    match freshness:
        case StatusFreshness.NOW:
            return f"{status.state}, {place}"
        case StatusFreshness.ENDED:
            return f"{status.state} {_ago(status, now)}, {place}"
        case StatusFreshness.GONE:
            return f"last heard {_ago(status, now)} ({place}): {who} is gone and did not report how the run ended"
        case StatusFreshness.SILENT:
            return f"last heard {_ago(status, now)} ({place}): {who} is alive but does not update the status"
        case StatusFreshness.FAR:
            return f"last heard {_ago(status, now)} ({place}): {who} cannot be checked from this machine"
        case StatusFreshness.UNWATCHED:
            return f"last heard {_ago(status, now)} ({place}): no agent watches it (torchrun, srun, plain Python)"


def _place(status: RunStatus) -> str:
    of = f" of {status.num_steps}" if status.num_steps else ""
    step = f"step {status.step}{of}" if status.step else "no step finished yet"
    return f"{step}, generation {status.generation}{_eta(status)}"


def _eta(status: RunStatus) -> str:
    if status.eta_s is None or status.has_ended or status.step >= status.num_steps:
        return ""
    error = f" ± {formatting.duration(status.eta_error_s)}" if status.eta_error_s is not None else ""
    return f", about {formatting.duration(status.eta_s)}{error} to go"


def _ago(status: RunStatus, now: float) -> str:
    return f"{formatting.duration(max(0.0, now - status.at))} ago"


def _agent_line(status: RunStatus, now: float) -> str:
    words = [
        f"agent {status.writer.pid} on {status.writer.host}",
        f"for {formatting.duration(max(0.0, now - status.began_at))}",
    ]
    words.append(formatting.count(status.world_size, "worker"))
    if status.snapshot_every:
        every = "every step" if status.snapshot_every == 1 else f"every {status.snapshot_every} steps"
        words.append(f"state kept in memory {every} ({formatting.size(status.snapshot_bytes)} on this host)")
    return ", ".join(words)


def _worker_rows(workers: Sequence[WorkerStatus]) -> list[str]:
    rows = [
        (
            str(one.rank),
            one.host,
            str(one.pid) if one.pid is not None else "-",
            str(one.step) if one.step is not None else "-",
            one.phase,
            formatting.duration(one.own_s) if one.own_s > 0 else "-",
            formatting.size(one.memory_bytes) if one.memory_bytes else "-",
        )
        for one in workers
    ]
    return _table(("rank", "host", "process", "step", "doing", "own time", "memory"), rows)


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    lines = (headings, *rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _clock(at: float, now: float) -> str:
    form = "%H:%M:%S" if abs(now - at) < 20 * 3600 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(at))
