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

LOOK_S = 0.5
"""The longest interval between two checks; a small ``floor_s`` shortens it."""
_PATIENT = 10.0
"""How many times ``floor_s`` a read may take: a disk or a store may pause for a while, and another worker would not
read any faster. The first visit to a phase in a new generation may take as long, if an earlier generation knew the
phase."""
_BOUNDLESS = frozenset({WorkerPhase.START, WorkerPhase.HOOK, WorkerPhase.COMPILE, WorkerPhase.SAVE, WorkerPhase.END})
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
        """How long a worker may be stopped by a signal."""
        return min(self.floor_s, STOPPED_S)

    def limit_s(self, phase: WorkerPhase, longest_s: float | None, earlier_s: float | None = None) -> float:
        """How long a worker may show no progress in a phase. ``longest_s``: the longest recent visit; None: not seen in
        this generation. ``earlier_s``: the longest visit in earlier generations."""
        known_s = self.factor * max(longest_s or 0.0, earlier_s or 0.0)
        if phase in _BOUNDLESS or (longest_s is None and earlier_s is None):
            return max(self.first_s, self.floor_s, known_s)
        if phase in STEADY and longest_s is not None:
            return max(self.floor_s, self.factor * longest_s)
        return max(_PATIENT * self.floor_s, known_s)


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
    """Whether the suspects were stopped by a signal, according to the kernel."""
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
        what = "was stopped by a signal" if self.is_stopped else "made no progress"
        why = f"; {self.why}" if self.why else ""
        return f"{what} for {now - self.since:.1f} s, {PHASE_WORDS[self.phase]}{why}"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What the kernel reports about one process; ``agent.look`` fills it in."""

    state: str
    """Of the main thread: R, S, D, T, t; empty when it is gone."""
    call: str = ""
    """The system call that the main thread sleeps in: ``lock``, or its name or number; empty where it is unknown."""
    load: float = 0.0
    """Processors that all its threads together kept busy while it was sampled."""


_SIGNS: tuple[tuple[str, Callable[[ProcessSample], bool]], ...] = (
    ("", lambda sight: sight.state == _STOPPED),
    ("stuck in the kernel, perhaps in a driver or a network file system", lambda sight: sight.state == "D"),
    (
        "asleep, and not in a collective",
        lambda sight: sight.state == "S" and sight.load < _BUSY and sight.call not in ("", "lock"),
    ),
    ("busy while the others wait, perhaps holding the GIL", lambda sight: sight.load >= _BUSY),
)
"""What tells a suspect from ranks that wait, each with its wording; a stop is recorded in ``Hang.is_stopped``."""


def position(word: WorkerProgress) -> tuple[int, int, int]:
    """A sort key for progress, by which workers that wait for each other can be compared."""
    return (
        -1 if word.step is None else word.step,
        word.phase,
        word.micro_batches_done if word.phase is WorkerPhase.COMPUTE else 0,
    )


def furthest_behind(words: Mapping[int, WorkerProgress]) -> tuple[int, ...]:
    """The ranks that are furthest behind: all of them, when all are alike."""
    furthest = min(map(position, words.values()), default=None)
    return tuple(sorted(rank for rank, word in words.items() if position(word) == furthest))


def find_hang(
    words: Mapping[int, WorkerProgress],
    now: float,
    deadlines: HangDeadlines,
    *,
    earlier: Mapping[WorkerPhase, float] = _NOTHING,
    awake_since: float = 0.0,
) -> Hang | None:
    """The hang among the live workers of a generation, or None. ``words``: progress by rank; ``awake_since``: time
    before it does not count."""
    if not words:
        return None
    suspects = furthest_behind(words)
    phase, step = words[suspects[0]].phase, words[suspects[0]].step
    since = max(awake_since, *(words[rank].at for rank in suspects))
    known = [words[rank].longest.get(phase) for rank in suspects]
    # The slowest suspect sets the limit for all; if one has not completed the phase yet, it counts as a first visit.
    longest_s = None if None in known else max(seen for seen in known if seen is not None)
    limit_s = deadlines.limit_s(phase, longest_s, earlier.get(phase))
    return Hang(suspects, step, phase, since, limit_s) if now - since > limit_s else None


def narrow_by_kernel(still: Hang, sights: Mapping[int, ProcessSample]) -> Hang:
    """The same hang with fewer suspects, where the kernel's view tells some from the others.

    A rank that waits in a collective sleeps on a lock (or, on an accelerator, spins). So the first of these signs that
    holds for some ranks, but not for all, selects them: stopped; stuck in the kernel; asleep in another call; busy.
    """
    for why, test in _SIGNS:
        found = tuple(rank for rank in still.suspects if rank in sights and test(sights[rank]))
        if found and (len(found) < len(still.suspects) or not why):
            return replace(still, suspects=found, is_stopped=not why, why=why)
    return still


def narrow_by_stack(still: Hang, places: Mapping[int, str]) -> Hang:
    """The same hang, with only the suspects whose main thread is at another Python location than most. Needs three."""
    found = {rank: places[rank] for rank in still.suspects if places.get(rank)}
    usual = max(found.values(), key=list(found.values()).count, default="")
    odd = tuple(rank for rank, place in found.items() if place != usual)
    if not odd or 2 * len(odd) >= len(still.suspects):
        return still
    return replace(still, suspects=odd, why=f"at {found[odd[0]]}, most others at {usual}")


def narrow_by_data_read(still: Hang, places: Mapping[int, str]) -> Hang:
    """The same hang for ranks that wait for data: a rank with a thread or process in the user's code that reads samples
    is one that the others wait for."""
    found = {rank: place for rank, place in places.items() if place}
    if not found:
        return still
    place = found[min(found)]
    return replace(still, suspects=tuple(sorted(found)), why=f"reading a sample at {place} does not return")


def merge_hangs(
    claims: Mapping[str, Hang], host_of: Mapping[int, str], words: Mapping[int, WorkerProgress]
) -> Hang | None:
    """The hang over several hosts. Each host sees its own workers only, and reports a hang also when they just wait for
    a worker of another host. So there is a hang when every host with a rank that is furthest behind of all reports one;
    of those reports, the ones with evidence (``why``) are preferred. A stopped rank is certain without the other hosts.
    """
    held = {host: still for host, still in claims.items() if all(_holds(still, words.get(r)) for r in still.suspects)}
    certain = [still for still in held.values() if still.is_stopped]
    needed = {host_of[rank] for rank in furthest_behind(words)}
    if not certain and not needed <= held.keys():
        return None
    told = certain or [held[host] for host in sorted(needed)]
    sharp = [still for still in told if still.is_stopped or still.why] or told
    suspects = tuple(sorted(rank for still in sharp for rank in still.suspects))
    return replace(sharp[0], suspects=suspects) if suspects else None


def _holds(still: Hang, word: WorkerProgress | None) -> bool:
    """Whether a rank is still in the step and phase that its host reported."""
    return word is not None and (word.step, word.phase) == (still.step, still.phase)


class HangDetector:
    """Keeps what must be remembered between checks, over successive generations."""

    def __init__(self, deadlines: HangDeadlines) -> None:
        self._deadlines = deadlines
        self.every_s = min(LOOK_S, deadlines.floor_s / 4)
        self._earlier: dict[WorkerPhase, float] = {}
        self._latest: Collection[WorkerProgress] = ()
        self._stopped: dict[int, tuple[WorkerProgress, float]] = {}
        self._looked_at = self._awake_since = 0.0

    def begin(self) -> None:
        """A new generation: what earlier ones learned is the limit for the first visit to each phase."""
        self._earlier = longest_by_phase(self._latest, self._earlier)
        self._latest, self._stopped, self._looked_at = (), {}, 0.0

    def check(self, words: Mapping[int, WorkerProgress], states: Mapping[int, str], now: float) -> Hang | None:
        """Call it every ``every_s`` with the progress of all live workers, and the kernel's state of each process."""
        if now - self._looked_at > 4 * self.every_s + 1.0:
            self._awake_since, self._stopped = now, {}  # this process did not run, and perhaps neither did the workers
        self._looked_at, self._latest = now, list(words.values())
        still = self._held(words, states, now) or find_hang(
            words, now, self._deadlines, earlier=self._earlier, awake_since=self._awake_since
        )
        if still is not None and all(states.get(rank) == _STOPPED for rank in still.suspects):
            still = replace(still, is_stopped=True)
        return still

    def _held(self, words: Mapping[int, WorkerProgress], states: Mapping[int, str], now: float) -> Hang | None:
        """Ranks that were stopped at every check for a while, in whatever phase: waiting longer would not help."""
        held = [rank for rank, state in states.items() if state == _STOPPED and rank in words]
        last, self._stopped = self._stopped, {}
        for rank in held:
            before = last.get(rank)
            self._stopped[rank] = before if before and before[0].at == words[rank].at else (words[rank], now)
        limit_s = self._deadlines.stopped_s
        ripe = sorted(rank for rank, (_, since) in self._stopped.items() if now - since >= limit_s)
        if not ripe:
            return None
        word = words[ripe[0]]
        since = max(word.at, self._awake_since)
        return Hang(tuple(ripe), word.step, word.phase, since, limit_s, is_stopped=True)


def longest_by_phase(
    words: Iterable[WorkerProgress], earlier: Mapping[WorkerPhase, float] = _NOTHING
) -> dict[WorkerPhase, float]:
    """The longest visit of any worker to each phase, now or earlier."""
    found = dict(earlier)
    for word in words:
        for phase, seconds in word.longest.items():
            found[phase] = max(found.get(phase, 0.0), seconds)
    return found
