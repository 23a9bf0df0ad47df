"""Who stands still, and is it time to give it up?

Words in, verdict out: nothing here touches a process. A rank that waits for another stands still as well, so the one
that is furthest behind decides, by the deadline of what it is at; while it is within that, nobody is given up, however
long the others wait. Where several are equally far behind (collectives inside a forward), what the kernel sees of them
tells who does not wait in a collective.

Invariants: nobody is given up before ``floor_s``, but for who is stopped, by the kernel's own word, for ``STOPPED_S``;
a phase that was never seen to its end has ``first_s``, and so has somebody else's code; time in which the agent itself
did not run counts for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from closeranks.agent.progress import PHASE_WORDS, STEADY, Phase, Progress

LOOK_S = 0.5
"""How often to look, at the latest; a small ``floor_s`` asks for it more often."""
_PATIENT = 10.0
"""How many times ``floor_s`` reading has: a disk or a store may pause for a while, and another worker would not read
any faster. The first visit of a new generation has as long, where an earlier one knew the phase."""
_BOUNDLESS = frozenset({Phase.START, Phase.HOOK, Phase.COMPILE, Phase.SAVE, Phase.END})
"""What earlier visits say nothing of: a hook that prints each time may compute for minutes every thousandth."""
STOPPED_S = 2.0
"""A process that is stopped will not go on by itself; this is for whoever stops one and lets it go on at once."""
_STOPPED = "T"
_BUSY = 0.1
"""Processors; who waits keeps none busy, who works may share one with many."""
_NOTHING: Mapping[Phase, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The numbers of ``[elastic]`` that decide here."""

    floor_s: float = 5.0
    factor: float = 8.0
    first_s: float = 600.0

    @property
    def stopped_s(self) -> float:
        """How long a worker may be stopped."""
        return min(self.floor_s, STOPPED_S)

    def limit_s(self, phase: Phase, longest_s: float | None, earlier_s: float | None = None) -> float:
        """How long a worker may give no sign of life. ``longest_s``: what it took lately; None: not seen in this
        generation. ``earlier_s``: what it took in those before."""
        known_s = self.factor * max(longest_s or 0.0, earlier_s or 0.0)
        if phase in _BOUNDLESS or (longest_s is None and earlier_s is None):
            return max(self.first_s, self.floor_s, known_s)
        if phase in STEADY and longest_s is not None:
            return max(self.floor_s, self.factor * longest_s)
        return max(_PATIENT * self.floor_s, known_s)


@dataclass(frozen=True, slots=True)
class Still:
    """A generation that stands still."""

    suspects: tuple[int, ...]
    """The ranks that are furthest behind: all of them, when all are alike."""
    step: int | None
    phase: Phase
    since: float
    """Their last sign of life, by the agent's clock."""
    limit_s: float
    is_stopped: bool = False
    """Whether the suspects were stopped by a signal, as the kernel says."""
    why: str = ""
    """What gave them away, where their words alone did not."""

    @property
    def culprit(self) -> int | None:
        return self.suspects[0] if len(self.suspects) == 1 else None

    @property
    def kind(self) -> str:
        """As ``RankLost`` has it."""
        return "stopped" if self.is_stopped else "hang"

    def cause(self, now: float) -> str:
        """One line for people."""
        what = "was stopped by a signal" if self.is_stopped else "stood still"
        why = f"; {self.why}" if self.why else ""
        return f"{what} for {now - self.since:.1f} s, {PHASE_WORDS[self.phase]}{why}"


@dataclass(frozen=True, slots=True)
class Sight:
    """What the kernel sees of one process; ``agent.look`` fills it in."""

    state: str
    """Of the main thread: R, S, D, T, t; empty when it is gone."""
    call: str = ""
    """What the main thread sleeps in: ``lock``, the name or number of another call, empty where it is not told."""
    load: float = 0.0
    """Processors that all its threads together kept busy while it was looked at."""


_SIGNS: tuple[tuple[str, Callable[[Sight], bool]], ...] = (
    ("", lambda sight: sight.state == _STOPPED),
    ("stuck in the kernel, in a driver or a network file system perhaps", lambda sight: sight.state == "D"),
    (
        "asleep, and not in a collective",
        lambda sight: sight.state == "S" and sight.load < _BUSY and sight.call not in ("", "lock"),
    ),
    ("busy while the others wait, perhaps with the interpreter's lock held", lambda sight: sight.load >= _BUSY),
)
"""What tells a suspect from those that wait, and in which words; stopping is said by ``Still.is_stopped``."""


def position(word: Progress) -> tuple[int, int, int]:
    """How far a rank is: workers that wait for each other can be compared by it."""
    return (-1 if word.step is None else word.step, word.phase, word.tick if word.phase is Phase.COMPUTE else 0)


def behind(words: Mapping[int, Progress]) -> tuple[int, ...]:
    """The ranks that are furthest behind: all of them, when all are alike."""
    furthest = min(map(position, words.values()), default=None)
    return tuple(sorted(rank for rank, word in words.items() if position(word) == furthest))


def standing_still(
    words: Mapping[int, Progress],
    now: float,
    deadlines: Deadlines,
    *,
    earlier: Mapping[Phase, float] = _NOTHING,
    awake_since: float = 0.0,
) -> Still | None:
    """The verdict on the living workers of a generation, by rank. ``awake_since``: what was before does not count."""
    if not words:
        return None
    suspects = behind(words)
    phase, step = words[suspects[0]].phase, words[suspects[0]].step
    since = max(awake_since, *(words[rank].at for rank in suspects))
    known = [words[rank].longest.get(phase) for rank in suspects]
    # The slowest of those that are alike sets the limit for all; one that has not seen the phase makes it a first time.
    longest_s = None if None in known else max(seen for seen in known if seen is not None)
    limit_s = deadlines.limit_s(phase, longest_s, earlier.get(phase))
    return Still(suspects, step, phase, since, limit_s) if now - since > limit_s else None


def blame(still: Still, sights: Mapping[int, Sight]) -> Still:
    """The same with fewer suspects, where what the kernel sees tells some from the others.

    Who waits in a collective sleeps on a lock (or, on an accelerator, spins). So the first of these that holds for
    some, but not for all, names them: stopped; stuck in the kernel; asleep in another call; busy.
    """
    for why, test in _SIGNS:
        found = tuple(rank for rank in still.suspects if rank in sights and test(sights[rank]))
        if found and (len(found) < len(still.suspects) or not why):
            return replace(still, suspects=found, is_stopped=not why, why=why)
    return still


def odd_ones(still: Still, places: Mapping[int, str]) -> Still:
    """The same by where their main threads are in Python: who is elsewhere than most of the suspects. Needs three."""
    found = {rank: places[rank] for rank in still.suspects if places.get(rank)}
    usual = max(found.values(), key=list(found.values()).count, default="")
    odd = tuple(rank for rank, place in found.items() if place != usual)
    if not odd or 2 * len(odd) >= len(still.suspects):
        return still
    return replace(still, suspects=odd, why=f"at {found[odd[0]]}, most others at {usual}")


def reading(still: Still, places: Mapping[int, str]) -> Still:
    """The same for ranks that wait for data, by where in the user's code their samples are read: who is there is the
    one that the others wait for."""
    found = {rank: place for rank, place in places.items() if place}
    if not found:
        return still
    place = found[min(found)]
    return replace(still, suspects=tuple(sorted(found)), why=f"a sample is read at {place} and does not come")


def join(claims: Mapping[str, Still], host_of: Mapping[int, str], words: Mapping[int, Progress]) -> Still | None:
    """The verdict over several hosts: each sees its own workers alone, and finds that they stand still when they only
    wait for one elsewhere. So a claim counts when it is that of every host with a rank that is furthest behind of all;
    of those, the ones that know what gave the culprit away go first. Who was stopped is certain without the others.
    """
    held = {host: still for host, still in claims.items() if all(_holds(still, words.get(r)) for r in still.suspects)}
    certain = [still for still in held.values() if still.is_stopped]
    needed = {host_of[rank] for rank in behind(words)}
    if not certain and not needed <= held.keys():
        return None
    told = certain or [held[host] for host in sorted(needed)]
    sharp = [still for still in told if still.is_stopped or still.why] or told
    suspects = tuple(sorted(rank for still in sharp for rank in still.suspects))
    return replace(sharp[0], suspects=suspects) if suspects else None


def _holds(still: Still, word: Progress | None) -> bool:
    """Whether a rank is still where it was when its host spoke of it."""
    return word is not None and (word.step, word.phase) == (still.step, still.phase)


class Watch:
    """What must be remembered between looks, for one generation after the other."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.every_s = min(LOOK_S, deadlines.floor_s / 4)
        self._earlier: dict[Phase, float] = {}
        self._latest: Collection[Progress] = ()
        self._stopped: dict[int, tuple[Progress, float]] = {}
        self._looked_at = self._awake_since = 0.0

    def begin(self) -> None:
        """A new generation: what the one before has learned holds for the first visits of the next."""
        self._earlier = longest_of(self._latest, self._earlier)
        self._latest, self._stopped, self._looked_at = (), {}, 0.0

    def look(self, words: Mapping[int, Progress], states: Mapping[int, str], now: float) -> Still | None:
        """Call it every ``every_s`` with the words of all workers that live, and the kernel's state of each process."""
        if now - self._looked_at > 4 * self.every_s + 1.0:
            self._awake_since, self._stopped = now, {}  # this very process was held up, and perhaps all others with it
        self._looked_at, self._latest = now, list(words.values())
        still = self._held(words, states, now) or standing_still(
            words, now, self._deadlines, earlier=self._earlier, awake_since=self._awake_since
        )
        if still is not None and all(states.get(rank) == _STOPPED for rank in still.suspects):
            still = replace(still, is_stopped=True)
        return still

    def _held(self, words: Mapping[int, Progress], states: Mapping[int, str], now: float) -> Still | None:
        """Who is stopped, and was at every look for a while, whatever it was at: there is nothing to wait for."""
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
        return Still(tuple(ripe), word.step, word.phase, since, limit_s, is_stopped=True)


def longest_of(words: Iterable[Progress], earlier: Mapping[Phase, float] = _NOTHING) -> dict[Phase, float]:
    """What any worker took for each phase, now or earlier."""
    found = dict(earlier)
    for word in words:
        for phase, seconds in word.longest.items():
            found[phase] = max(found.get(phase, 0.0), seconds)
    return found
