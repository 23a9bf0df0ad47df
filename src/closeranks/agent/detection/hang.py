"""Hang detection: which ranks make no progress, and whether their deadline has passed.

The progress of the ranks in, a hang out: nothing here touches a process. A rank that waits for another makes no
progress either, so the rank furthest behind decides, by the deadline of its phase; while it is within that, no rank is
declared hung, however long the others wait. Where several are equally far behind (collectives inside a forward), the
kernel's view of their processes tells which of them do not wait in a collective.

Invariants: no rank is declared hung before ``floor_s``, except one that the kernel reports as stopped for
``STOPPED_S``; a phase that has never been seen to complete has ``first_s``, and so have phases of unpredictable length,
such as hooks; time in which the agent itself did not run does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from closeranks.agent.detection.progress import PHASE_WORDS, STEADY, WorkerPhase, WorkerProgress

CHECK_INTERVAL_S = 0.5
"""The longest interval between two checks; a small ``floor_s`` shortens it."""
_READ_FACTOR = 10.0
"""How many times ``floor_s`` a read may take: a disk or a store may pause for a while, and another worker would not
read any faster. The first visit to a phase in a new generation may take as long, if an earlier generation knew the
phase."""
_UNPREDICTABLE = frozenset(
    {WorkerPhase.START, WorkerPhase.HOOK, WorkerPhase.COMPILE, WorkerPhase.SAVE, WorkerPhase.END}
)
"""Phases whose earlier durations predict nothing: a hook that usually prints may compute for minutes every thousandth
time."""
STOPPED_S = 2.0
"""A stopped process does not continue by itself; this allows for one that is stopped and continued at once."""
_STOPPED = "T"
_BUSY = 0.1
"""Processors: a rank that waits keeps none busy, one that works may share a processor with many others."""
_NOTHING: Mapping[WorkerPhase, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HangDeadlines:
    """The settings of ``[elastic]`` for hang detection."""

    floor_s: float = 5.0
    factor: float = 8.0
    first_s: float = 600.0

    @property
    def stopped_s(self) -> float:
        """How long a worker may be stopped."""
        return min(self.floor_s, STOPPED_S)

    def limit_s(self, phase: WorkerPhase, longest_s: float | None, earlier_s: float | None = None) -> float:
        """How long a worker may show no progress in a phase. ``longest_s``: the longest recent visit; None: not seen in
        this generation. ``earlier_s``: the longest visit in earlier generations."""
        known_s = self.factor * max(longest_s or 0.0, earlier_s or 0.0)
        if phase in _UNPREDICTABLE or (longest_s is None and earlier_s is None):
            return max(self.first_s, self.floor_s, known_s)
        if phase in STEADY and longest_s is not None:
            return max(self.floor_s, self.factor * longest_s)
        return max(_READ_FACTOR * self.floor_s, known_s)


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang of a generation."""

    suspects: tuple[int, ...]
    """The ranks that are furthest behind: all of them, when all are alike."""
    step: int | None
    phase: WorkerPhase
    since: float
    """Their last progress, by the agent's clock."""
    limit_s: float
    is_stopped: bool = False
    """Whether the suspects were stopped, by a signal or a frozen cgroup, according to the kernel."""
    why: str = ""
    """The evidence against them, where it goes beyond their progress."""

    @property
    def culprit(self) -> int | None:
        return self.suspects[0] if len(self.suspects) == 1 else None

    @property
    def kind(self) -> str:
        """The kind in ``RankLost``."""
        return "stopped" if self.is_stopped else "hang"

    def cause(self, now: float) -> str:
        """One line for people."""
        what = "was stopped by a signal or a frozen cgroup" if self.is_stopped else "made no progress"
        why = f"; {self.why}" if self.why else ""
        return f"{what} for {now - self.since:.1f} s, {PHASE_WORDS[self.phase]}{why}"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What the kernel reports about one process; ``process_probe`` fills it in."""

    state: str
    """Of the main thread: R, S, D, T, t; empty when it is gone."""
    call: str = ""
    """The system call that the main thread sleeps in: ``lock``, or its name or number; empty where it is unknown."""
    load: float = 0.0
    """Processors that all its threads together kept busy while it was sampled."""


_SIGNS: tuple[tuple[str, Callable[[ProcessSample], bool]], ...] = (
    ("", lambda sample: sample.state == _STOPPED),
    ("stuck in the kernel, perhaps in a driver or a network file system", lambda sample: sample.state == "D"),
    (
        "asleep, and not in a collective",
        lambda sample: sample.state == "S" and sample.load < _BUSY and sample.call not in ("", "lock"),
    ),
    ("busy while the others wait, perhaps holding the GIL", lambda sample: sample.load >= _BUSY),
)
"""What tells a suspect from ranks that wait, each with its wording; a stop is recorded in ``Hang.is_stopped``."""


def position(progress: WorkerProgress) -> tuple[int, int, int]:
    """A sort key for progress, by which workers that wait for each other can be compared."""
    return (
        -1 if progress.step is None else progress.step,
        progress.phase,
        progress.micro_batches_done if progress.phase is WorkerPhase.COMPUTE else 0,
    )


def furthest_behind(progress_of: Mapping[int, WorkerProgress]) -> tuple[int, ...]:
    """The ranks that are furthest behind: all of them, when all are alike."""
    furthest = min(map(position, progress_of.values()), default=None)
    return tuple(sorted(rank for rank, progress in progress_of.items() if position(progress) == furthest))


def find_hang(
    progress_of: Mapping[int, WorkerProgress],
    now: float,
    deadlines: HangDeadlines,
    *,
    earlier: Mapping[WorkerPhase, float] = _NOTHING,
    awake_since: float = 0.0,
) -> Hang | None:
    """The hang among the live workers of a generation, or None. ``progress_of``: by rank; ``awake_since``: time before
    it does not count."""
    if not progress_of:
        return None
    suspects = furthest_behind(progress_of)
    phase, step = progress_of[suspects[0]].phase, progress_of[suspects[0]].step
    since = max(awake_since, *(progress_of[rank].at for rank in suspects))
    known = [progress_of[rank].longest.get(phase) for rank in suspects]
    # The slowest suspect sets the limit for all; if one has not completed the phase yet, it counts as a first visit.
    longest_s = None if None in known else max(seen for seen in known if seen is not None)
    limit_s = deadlines.limit_s(phase, longest_s, earlier.get(phase))
    return Hang(suspects, step, phase, since, limit_s) if now - since > limit_s else None


def find_stall(
    progress_of: Mapping[int, WorkerProgress],
    now: float,
    deadlines: HangDeadlines,
    *,
    awake_since: float = 0.0,
    is_certain: bool = False,
) -> Hang | None:
    """A standstill that is worth telling although no deadline has passed: no rank makes progress, and one waits much
    longer than it ever had to, or for its first batch, or it ``is_certain`` that something is wrong. The rank that it
    waits for may have a long deadline (in a hook, say)."""
    ages_s = {rank: now - max(one.at, awake_since) for rank, one in progress_of.items()}
    if min(ages_s.values(), default=0.0) <= deadlines.floor_s:
        return None
    usual_s = {
        rank: deadlines.factor * one.longest[one.phase]
        for rank, one in progress_of.items()
        if one.phase in one.longest and one.phase not in _UNPREDICTABLE
    }
    suspects = furthest_behind(progress_of)
    first = progress_of[suspects[0]]
    # Unlike a first computation, which may compile, a first batch that does not come is worth a word.
    is_unusual = first.phase is WorkerPhase.DATA and WorkerPhase.DATA not in first.longest
    if not (is_certain or is_unusual or any(ages_s[rank] > usual for rank, usual in usual_s.items())):
        return None
    return Hang(suspects, first.step, first.phase, now - min(ages_s.values()), deadlines.floor_s)


def narrow_by_kernel(hang: Hang, samples: Mapping[int, ProcessSample]) -> Hang:
    """The same hang with fewer suspects, where the kernel's view tells some from the others.

    A rank that waits in a collective sleeps on a lock (or, on an accelerator, spins). So the first of these signs that
    holds for some ranks, but not for all, selects them: stopped; stuck in the kernel; asleep in another call; busy.
    """
    for why, test in _SIGNS:
        found = tuple(rank for rank in hang.suspects if rank in samples and test(samples[rank]))
        if found and (len(found) < len(hang.suspects) or not why):
            return replace(hang, suspects=found, is_stopped=not why, why=why)
    return hang


def narrow_by_stack(hang: Hang, places: Mapping[int, str]) -> Hang:
    """The same hang, with only the suspects whose main thread is at another Python location than most. Needs three."""
    found = {rank: places[rank] for rank in hang.suspects if places.get(rank)}
    usual = max(found.values(), key=list(found.values()).count, default="")
    odd = tuple(rank for rank, place in found.items() if place != usual)
    if not odd or 2 * len(odd) >= len(hang.suspects):
        return hang
    return replace(hang, suspects=odd, why=f"at {found[odd[0]]}, most others at {usual}")


def narrow_by_data_read(hang: Hang, places: Mapping[int, str]) -> Hang:
    """The same hang for ranks that wait for data: a rank with a thread or process in the user's code that reads samples
    is one that the others wait for."""
    found = {rank: place for rank, place in places.items() if place}
    if not found:
        return hang
    place = found[min(found)]
    return replace(hang, suspects=tuple(sorted(found)), why=f"reading a sample at {place} does not return")


def merge_hangs(
    reports: Mapping[str, Hang], host_of: Mapping[int, str], progress_of: Mapping[int, WorkerProgress]
) -> Hang | None:
    """The hang over several hosts. Each host sees its own workers only, and reports a hang also when they just wait for
    a worker of another host. So there is a hang when every host with a rank that is furthest behind of all reports one;
    of those reports, the ones with evidence (``why``) are preferred. A stopped rank is certain without the other hosts.
    """
    confirmed = {
        host: hang for host, hang in reports.items() if all(_holds(hang, progress_of.get(r)) for r in hang.suspects)
    }
    certain = [hang for hang in confirmed.values() if hang.is_stopped]
    needed = {host_of[rank] for rank in furthest_behind(progress_of)}
    if not certain and not needed <= confirmed.keys():
        return None
    chosen = certain or [confirmed[host] for host in sorted(needed)]
    specific = [hang for hang in chosen if hang.is_stopped or hang.why] or chosen
    suspects = tuple(sorted(rank for hang in specific for rank in hang.suspects))
    return replace(specific[0], suspects=suspects) if suspects else None


def _holds(hang: Hang, progress: WorkerProgress | None) -> bool:
    """Whether a rank is still in the step and phase that its host reported."""
    return progress is not None and (progress.step, progress.phase) == (hang.step, hang.phase)


class HangDetector:
    """Keeps what must be remembered between checks, over successive generations."""

    def __init__(self, deadlines: HangDeadlines) -> None:
        self._deadlines = deadlines
        self.every_s = min(CHECK_INTERVAL_S, deadlines.floor_s / 4)
        self._earlier: dict[WorkerPhase, float] = {}
        self._latest: Collection[WorkerProgress] = ()
        self._stopped: dict[int, tuple[WorkerProgress, float]] = {}
        self._checked_at = self._awake_since = 0.0

    def begin(self) -> None:
        """A new generation: what earlier ones learned is the limit for the first visit to each phase."""
        self._earlier = longest_by_phase(self._latest, self._earlier)
        self._latest, self._stopped, self._checked_at = (), {}, 0.0

    def check(self, progress_of: Mapping[int, WorkerProgress], states: Mapping[int, str], now: float) -> Hang | None:
        """Call it every ``every_s`` with the progress of all live workers, and the kernel's state of each process."""
        if now - self._checked_at > 4 * self.every_s + 1.0:
            self._awake_since, self._stopped = now, {}  # this process did not run, and perhaps neither did the workers
        self._checked_at, self._latest = now, list(progress_of.values())
        hang = self._stopped_hang(progress_of, states, now) or find_hang(
            progress_of, now, self._deadlines, earlier=self._earlier, awake_since=self._awake_since
        )
        if hang is not None and all(states.get(rank) == _STOPPED for rank in hang.suspects):
            hang = replace(hang, is_stopped=True)
        return hang

    def stall(
        self, progress_of: Mapping[int, WorkerProgress], now: float, is_mismatch: Callable[[], bool]
    ) -> Hang | None:
        """A standstill to tell, where ``check`` has found no hang yet. ``is_mismatch``: whether the ranks' collectives
        cannot match; asked only while nothing moves."""
        found = find_stall(progress_of, now, self._deadlines, awake_since=self._awake_since)
        if found is not None:
            return found
        found = find_stall(progress_of, now, self._deadlines, awake_since=self._awake_since, is_certain=True)
        return found if found is not None and is_mismatch() else None

    def _stopped_hang(
        self, progress_of: Mapping[int, WorkerProgress], states: Mapping[int, str], now: float
    ) -> Hang | None:
        """Ranks that were stopped at every check for a while, in whatever phase: waiting longer would not help."""
        stopped = [rank for rank, state in states.items() if state == _STOPPED and rank in progress_of]
        last, self._stopped = self._stopped, {}
        for rank in stopped:
            before = last.get(rank)
            self._stopped[rank] = (
                before if before and before[0].at == progress_of[rank].at else (progress_of[rank], now)
            )
        limit_s = self._deadlines.stopped_s
        overdue = sorted(rank for rank, (_, since) in self._stopped.items() if now - since >= limit_s)
        if not overdue:
            return None
        progress = progress_of[overdue[0]]
        since = max(progress.at, self._awake_since)
        return Hang(tuple(overdue), progress.step, progress.phase, since, limit_s, is_stopped=True)


def longest_by_phase(
    all_progress: Iterable[WorkerProgress], earlier: Mapping[WorkerPhase, float] = _NOTHING
) -> dict[WorkerPhase, float]:
    """The longest visit of any worker to each phase, now or earlier."""
    found = dict(earlier)
    for progress in all_progress:
        for phase, seconds in progress.longest.items():
            found[phase] = max(found.get(phase, 0.0), seconds)
    return found
