"""Where did the time of a run's workers go, over all faults and commands? Events of ranks and agent in, account out.

Pure but for ``load_records``. Ranks whose records were not read are taken to be like the mean of those that were.

[Note: stragglers] A collective ends when the last rank has arrived, so its waiting is that rank's fault, and the rest
is communication. The rank that waits least in a step is the one that the others wait for; what each of them waits
longer than it is counted as waiting for the slowest rank. Stages of a pipeline are compared with ranks of the same
stage, and their own waiting for each other is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from closeranks.core.errors import UserError
from closeranks.core.events import (
    Evaluated,
    Event,
    Launched,
    LaunchEnded,
    RankLost,
    RanksClosed,
    RunEnded,
    RunStarted,
    StepDone,
    StepPhases,
    decode,
)
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh
from closeranks.telemetry.goodput.rank_record import RankRecord, SessionRecord
from closeranks.telemetry.goodput.sessions import SessionSpan, TimedStart, find_sessions
from closeranks.telemetry.goodput.time_account import (
    DETECTION,
    END,
    EVALUATION,
    RECOVERY,
    REDONE,
    ROW_WORDS,
    SKIPPED,
    START,
    STRAGGLER,
    UNACCOUNTED,
    USEFUL,
    TimeAccount,
)
from closeranks.telemetry.run_log.fault_history import TimedEvent
from closeranks.telemetry.run_log.recorder import lines_of, parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_reader import OTHER_SAMPLES, RankLog, other_logs

AGENT_EVENTS = (Launched, LaunchEnded, RankLost, RanksClosed)
_RANKS_READ = 16


class RunRecords(NamedTuple):
    """What is read of a run to account for its time: the arguments of ``build_account``."""

    ranks: Mapping[int, RankRecord]
    agent: Sequence[TimedEvent]
    num_ranks: int


class SessionAccount(NamedTuple):
    span: SessionSpan
    rows: Mapping[str, float]
    """Worker-seconds by row."""


def session_accounts(ranks: Mapping[int, RankRecord], agent: Sequence[TimedEvent]) -> list[SessionAccount]:
    """One after the other; the time between two commands is in none."""
    return [SessionAccount(span, _session_rows(span, ranks)) for span in find_sessions(_starts(ranks), agent)]


def build_account(ranks: Mapping[int, RankRecord], agent: Sequence[TimedEvent], num_ranks: int = 0) -> TimeAccount:
    """``ranks``: records of rank 0 and of any others; ``agent``: its events, in order; ``num_ranks``: how many left a
    record."""
    sessions = session_accounts(ranks, agent)
    rows = dict.fromkeys(ROW_WORDS, 0.0)
    for session in sessions:
        for name, seconds in session.rows.items():
            rows[name] += seconds
    spans, steps = [session.span for session in sessions], _lead(ranks).sessions
    energies = [joules for record in ranks.values() for joules, _ in record.energy]
    num_ranks = max(num_ranks, len(ranks), *(span.world_size for span in spans), 0)
    return TimeAccount(
        rows=rows,
        worker_s=sum(rows.values()),
        wall_s=sum(span.end - span.begin for span in spans),
        num_steps=sum(one.num_counted for one in steps),
        num_samples=sum(one.num_counted * one.started.global_batch for one in steps),
        num_items=sum(one.num_items for one in steps),
        num_redone=sum(one.num_redone for one in steps),
        num_launches=sum(span.is_first for span in spans),
        num_faults=sum(span.num_faults for span in spans),
        num_ranks=num_ranks,
        num_read=len(ranks),
        energy_j=sum(energies) * num_ranks / len(ranks) if energies else None,
    )


def _starts(ranks: Mapping[int, RankRecord]) -> list[TimedStart]:
    """Rank 0's starts; a session ends with the last event of any rank before the next one begins."""
    own = _lead(ranks).sessions
    starts = []
    for place, session in enumerate(own):
        until = own[place + 1].at if place + 1 < len(own) else float("inf")
        heard = (one.last_at for record in ranks.values() for one in record.sessions)
        last_at = max([session.last_at, *(at for at in heard if session.at <= at < until)])
        starts.append(TimedStart(session.at, session.started, last_at))
    return starts


def _lead(ranks: Mapping[int, RankRecord]) -> RankRecord:
    """Rank 0's record, or the first that there is."""
    return ranks[min(ranks)] if ranks else RankRecord()


def _session_rows(session: SessionSpan, ranks: Mapping[int, RankRecord]) -> dict[str, float]:
    """Worker-seconds by row; workers that stood idle before this generation are those of the one before."""
    lead = START if session.is_first else RECOVERY
    found = {rank: one for rank, record in ranks.items() if (one := _record_in(session, record)) is not None}
    if not found:
        return {lead: (session.end - session.begin) * (session.num_before or session.world_size)}
    rows = dict.fromkeys(ROW_WORDS, 0.0)
    for record in found.values():
        for name, seconds in _rank_rows(session, record, lead).items():
            rows[name] += seconds / len(found)
    straggler_s = min(_straggler_s(found, session) / len(found), rows[USEFUL])
    rows[USEFUL] -= straggler_s
    rows[STRAGGLER] += straggler_s
    before = session.num_before or session.world_size
    return {name: seconds * (before if name == lead else session.world_size) for name, seconds in rows.items()}


def _record_in(session: SessionSpan, record: RankRecord) -> SessionRecord | None:
    inside = [one for one in record.sessions if session.begin <= one.at <= session.end]
    return inside[-1] if inside and session.started is not None else None


def _rank_rows(session: SessionSpan, record: SessionRecord, lead: str) -> dict[str, float]:
    whole_s = session.end - session.begin
    is_fault = session.detected_s is not None
    if record.begun_at is None or record.done_at is None:
        late_s = min(session.detected_s or 0.0, whole_s)
        return {lead: whole_s - late_s, DETECTION: late_s}
    begun_at = max(session.begin, record.begun_at)
    covered_to = begun_at + record.phases_s
    # The last step may have been finished for a moment only when its phases began to be missing.
    over_s = max(0.0, record.unphased_s - max(0.0, record.done_at - covered_to))
    rows = {
        lead: begun_at - session.begin,
        USEFUL: record.useful_s,
        SKIPPED: record.skipped_s,
        REDONE: record.redone_s + record.cut_s,
        **record.lost_s,
    }
    rows[USEFUL if record.useful_s >= over_s else REDONE] -= over_s
    rows[EVALUATION] = rows.get(EVALUATION, 0.0) + record.unphased_evals_s
    left_at = max(record.done_at + record.unphased_evals_s, covered_to)
    if record.closed_at is not None:
        left_at = max(left_at, record.closed_at)
    tail_s = max(0.0, session.end - left_at)
    if is_fault:
        late_s = min(session.detected_s or 0.0, tail_s)
        rows[DETECTION], rows[REDONE] = late_s, rows[REDONE] + tail_s - late_s
    else:
        rows[END] = tail_s
    rows[UNACCOUNTED] = whole_s - sum(rows.values())
    return rows


def _straggler_s(found: Mapping[int, SessionRecord], session: SessionSpan) -> float:
    """See [Note: stragglers]; the sum over the ranks that were read, of steps that count. Those that are known only in
    sum are taken to be like the others."""
    total_s = 0.0
    for group in _comparable(found, session.started):
        waits: dict[int, list[float]] = {}
        for record in group:
            for place, step in enumerate(record.steps):
                if record.is_counted(place):
                    waits.setdefault(step, []).append(record.waits[place])
        group_s = sum(sum(each) - len(each) * min(each) for each in waits.values())
        num, num_summed = sum(map(len, waits.values())), sum(record.num_summed for record in group)
        total_s += group_s * (num + num_summed) / max(1, num)
    return total_s


def _comparable(found: Mapping[int, SessionRecord], started: RunStarted | None) -> Iterable[list[SessionRecord]]:
    """Ranks that do the same work: of a pipeline, those of one stage."""
    if len(found) < 2:
        return ()
    layout = _layout(started.layout if started else "")
    if layout is None or layout.pipeline == 1 or layout.num_ranks <= max(found):
        return (list(found.values()),)
    mesh, stages = Mesh(layout), dict[int, list[SessionRecord]]()
    for rank, record in found.items():
        stages.setdefault(mesh.coordinate(rank).pipeline, []).append(record)
    return stages.values()


def _layout(text: str) -> Layout | None:
    try:
        layout = Layout.parse(text)
    except UserError:
        return None
    return layout if min(layout.data, layout.tensor, layout.pipeline) > 0 else None


def load_account(folder: Path) -> TimeAccount:
    """The account of a run folder."""
    return build_account(*load_records(folder))


def load_records(folder: Path) -> RunRecords:
    """Of rank 0, and of a few others, evenly spread over all ranks."""
    run = RunFolder(folder)
    others = run.other_metrics()
    ranks = {0: read_rank(RankLog(run.metrics(0)))} if run.metrics(0).exists() else {}
    for log in other_logs(run, [path for path in _sample(others) if path.stem.rpartition("-")[2].isdecimal()]):
        ranks[log.rank] = read_rank(log)
    return RunRecords(ranks, load_agent_events(folder), 1 + len(others))


def _sample(paths: Sequence[Path]) -> Iterator[Path]:
    num = min(len(paths), _RANKS_READ - 1)
    return (paths[place * len(paths) // num] for place in range(num))


_KINDS = {kind.name: kind for kind in (RunStarted, StepDone, StepPhases, Evaluated, RunEnded)}
_MARKS = tuple(f'"event": "{name}"'.encode() for name in (*_KINDS, "resources"))


def read_rank(log: RankLog) -> RankRecord:
    """One rank's record. Lines of other kinds are not parsed."""
    record = RankRecord()
    for stretch in log.stretches("others", num_samples=OTHER_SAMPLES):
        for line in stretch.lines:
            if line[:48].startswith(b"{") and any(mark in line[:48] for mark in _MARKS):
                fields = parse_line(line)
                if fields is not None and "at" in fields:
                    _add(record, fields)
        if stretch.block is not None and not stretch.is_whole:
            record.add_block(stretch.block)
    return record


def _add(record: RankRecord, fields: dict[str, object]) -> None:
    at = float(fields["at"])  # type: ignore[arg-type]
    if fields.get("event") == "resources":
        add_energy(record, at, fields.get("gpu"))
        return
    record.add(at, decode(fields))


def add_energy(record: RankRecord, at: float, gpu: object) -> None:
    """What an accelerator took in an interval, as its driver counts it."""
    joules = gpu.get("energy_j") if isinstance(gpu, dict) else None
    if isinstance(joules, int | float) and 0 <= joules < 1e12:
        record.energy.append((float(joules), at))


def load_agent_events(folder: Path) -> tuple[TimedEvent, ...]:
    """What an account needs of the agent's record."""
    return tuple(_agent_lines(RunFolder(folder)))


def _agent_lines(run: RunFolder) -> Iterator[TimedEvent]:
    marks = tuple(f'"event": "{kind.name}"'.encode() for kind in AGENT_EVENTS)
    for line in lines_of(run.agent):
        if any(mark in line[:48] for mark in marks) and (fields := parse_line(line)) is not None:
            event: Event | None = decode(fields)
            if isinstance(event, AGENT_EVENTS):
                yield TimedEvent(float(fields.get("at", 0.0)), event)
