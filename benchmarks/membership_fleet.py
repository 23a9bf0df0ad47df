"""A fleet of agents in virtual time: the membership's machines, every message counted, each taking one hop.

Nothing is lost here and no clock drifts; laws under chaos are the tests' business. Workers are not simulated: they
start at once and die at once.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from closeranks.agent.membership.effects import (
    ForwardRequest,
    GenerationSettled,
    HostStatusChanged,
    KillWorkers,
    SendMessage,
)
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.generation import GenerationPhase
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.messages import Envelope
from closeranks.core.requests import REGROUP

HOP_S = 0.001
"""What every message takes: the time of an episode over this is its number of rounds."""


@dataclass
class Episode:
    """What it took to get somewhere."""

    began_at: float
    counted: Counter[str] = field(default_factory=Counter)
    ended_at: float = 0.0
    waited_s: float = 0.0
    """Time in which nothing travels: until the workers of a dead agent are surely dead."""

    @property
    def num_messages(self) -> int:
        """But for beats and their answers, which go on all the time."""
        return sum(count for kind, count in self.counted.items() if kind not in ("beat", "beat_back"))

    @property
    def num_beats(self) -> int:
        return self.counted["beat"] + self.counted["beat_back"]

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    @property
    def num_rounds(self) -> int:
        return round((self.seconds - self.waited_s) / HOP_S)


class Fleet:
    """A lead and so many hosts, none of which is the lead's own. Everybody who is here takes part."""

    def __init__(self, num_hosts: int) -> None:
        self.now = 0.0
        self.lead = Leader(1)
        self.followers = {name: Follower(name, 1, 8, now=0.0) for name in map("h{:05d}".format, range(num_hosts))}
        self.cut: set[str] = set()
        self.episode = Episode(0.0)
        self.handled_s = 0.0
        self.num_handled = 0
        self._num_wanted = num_hosts
        self.num_joined = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._alarms: dict[str, int] = {}
        self._lead_alarm = 0.0
        for name in self.followers:
            self._at(0.0, lambda name=name: self._wake(name))

    # --- episodes

    def until(self, is_there: Callable[[], bool], longest_s: float = 600.0) -> Episode:
        """Run until something is so; what it took."""
        end = self.now + longest_s
        while not is_there():
            if not self._heap or self._heap[0][0] > end:
                raise AssertionError(f"the fleet has not got there within {longest_s:g} s")
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.episode.ended_at = self.now
        return self.episode

    def start_episode(self) -> None:
        self.episode = Episode(self.now)

    def is_running(self, num_members: int) -> bool:
        generation = self.lead.generation
        return (
            self.lead.phase == GenerationPhase.RUNNING
            and generation is not None
            and len(generation.members) == num_members
        )

    def kill(self, names: list[str]) -> None:
        """Their agents die; their kernels close the connections."""
        for name in names:
            del self.followers[name]
            self._at(
                self.now + HOP_S,
                lambda name=name: self._apply_lead_effects(self.lead.on_disconnected(name, 1, self.now)),
            )

    # --- the wires

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act))

    def _send(self, envelope: Envelope, act: Callable[[Envelope], None]) -> None:
        self.episode.counted[envelope.body.kind] += 1
        if envelope.host not in self.cut:
            self._at(self.now + HOP_S, lambda: act(envelope))

    def _to_lead(self, envelope: Envelope) -> None:
        began_at = time.thread_time()
        effects = self.lead.handle(envelope, self.now)
        self.handled_s += time.thread_time() - began_at
        self.num_handled += 1
        self._apply_lead_effects(effects)

    def _apply_lead_effects(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(envelope):
                    self._send(envelope, self._to_host)
                case GenerationSettled():
                    self._begin()
                case HostStatusChanged(change="joined"):
                    self.num_joined += 1
        if self.lead.generation is None and self.num_joined == self._num_wanted:
            self._begin()
        self._set_lead_alarm()

    def _begin(self) -> None:
        members = [(host.name, host.num_workers) for host in self.lead.available]
        self._apply_lead_effects(self.lead.begin(members, {}, self.now))

    def regroup(self) -> None:
        self._apply_lead_effects(self.lead.send_request(REGROUP, self.now))

    def _set_lead_alarm(self) -> None:
        due = self.lead.deadline(self.now)
        if due is not None and due != self._lead_alarm:
            self._lead_alarm = due
            self._at(due, lambda: self._apply_lead_effects(self.lead.tick(self.now)))

    def _to_host(self, envelope: Envelope) -> None:
        follower = self.followers.get(envelope.host)
        if follower is not None:
            self._apply_effects(follower, follower.handle(envelope, self.now))

    def _wake(self, name: str, alarm: int | None = None) -> None:
        follower = self.followers.get(name)
        if follower is not None and (alarm is None or alarm == self._alarms[name]):
            self._apply_effects(follower, follower.tick(self.now))

    def _apply_effects(self, follower: Follower, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(envelope):
                    self._send(envelope, self._to_lead)
                case KillWorkers():
                    self._apply_effects(follower, follower.on_fenced({}, self.now))
                case ForwardRequest(forwarded) if forwarded.request == REGROUP:
                    self._apply_effects(follower, follower.on_workers_done({"regrouped": True}))
        name = follower.host
        self._alarms[name] = alarm = self._alarms.get(name, 0) + 1
        due = follower.deadline(self.now)
        if due is not None:
            self._at(due, lambda: self._wake(name, alarm))
