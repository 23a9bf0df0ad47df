"""Machines of the membership that were broken on purpose, each in one place: what the tests must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from closeranks.agent.membership.follower import Follower, Work
from closeranks.agent.membership.generation import Generation, Phase, Standing
from closeranks.agent.membership.lead import Lead
from closeranks.agent.membership.messages import Beat, BeatBack, Fence, Letter
from closeranks.agent.membership.peers import Peer
from closeranks.agent.membership.register import Candidate, EmbeddedRegister, Holding

from .chaoses import flapping, seeded, unheard
from .cluster import Parts
from .trouble import Chaos


class TakesStaleTerms(Follower):
    def _is_stale(self, letter: Letter) -> bool:
        return letter.session != self.session


class TakesStaleSessions(Follower):
    def _is_stale(self, letter: Letter) -> bool:
        return letter.term < self.term


class ForgetsEarlyFences(Follower):
    def _on_fence(self, fence: Fence) -> Any:
        newest = self.generation
        effects = super()._on_fence(fence)
        if newest < fence.generation:
            self.generation = newest
        return effects


class LeasesFromReceipt(Follower):
    def _on_beat_back(self, back: BeatBack, now: float) -> Any:
        if back.seq in self._sent:
            self._sent[back.seq] = now
        return super()._on_beat_back(back, now)


class JoinsWithLiveWorkers(Follower):
    def _cut(self, why: str, now: float) -> Any:
        effects = super()._cut(why, now)
        if self.work == Work.KILLING:
            self.work = Work.IDLE
        return effects


class BeginsEarly(Lead):
    """One confirmed fence is enough for it."""

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return any(seat.standing >= Standing.DONE for seat in generation.seats.values())


class CountsNoMargin(Lead):
    """Leases end on its clock when they end on the host's, or a little earlier."""

    def _trust(self, peer: Peer, now: float) -> Any:
        pace = super()._trust(peer, now)
        peer.expires_at = now + 0.75 * pace.lease_s
        return pace


class ForgetsJoinsWhileBreaking(Lead):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.forgotten: set[str] = set()

    def _is_available(self, peer: Peer) -> bool:
        return peer.name not in self.forgotten and super()._is_available(peer)

    def _on_beat(self, peer: Peer, beat: Beat, now: float) -> Any:
        is_new = not peer.is_heard and self.phase == Phase.BREAKING
        effects = super()._on_beat(peer, beat, now)
        if is_new:
            self.forgotten.add(peer.name)
        return effects


class AnswersTheLost(Lead):
    """Renews leases that it has counted as expired."""

    def handle(self, letter: Letter, now: float) -> Any:
        peer = self._peer_of(letter)
        if peer is not None and peer.is_lost and isinstance(letter.body, Beat):
            return self._on_beat(peer, letter.body, now)
        return super().handle(letter, now)


class LeadsForEver(Lead):
    """Its authority never runs out."""

    def _is_silent(self, now: float) -> bool:
        return False

    def tick(self, now: float) -> Any:
        self.until = max(self.until, now + 1)
        return super().tick(now)


class HoldsFromReceipt(Candidate):
    def answer(self, number: int, holding: Holding, now: float) -> Any:
        if self._pending is not None and self._pending.number == number:
            self._asked_at = now
        return super().answer(number, holding, now)


class TakesUpOldTerms(Candidate):
    """Leads again in a term that it has given up."""

    def _resign(self, now: float) -> Any:
        resigned = super()._resign(now)
        self._past = 0
        return resigned


class TakesWithoutLooking(EmbeddedRegister):
    """Sets without comparing."""

    def take(self, seen_term: int, holder: str, now: float) -> Holding:
        self._held, self._expires_at = Holding(seen_term + 1, holder), now + self.lease_s
        return self._held


@dataclass(frozen=True)
class Hunt:
    """Where a broken machine is looked for: in the kind of chaos in which it shows soonest."""

    chaos: Callable[[int, int], Chaos]
    num_contenders: int
    parts: Parts


IN_SCENES = {
    "accepts orders of a stale term": Parts(follower=TakesStaleTerms),
    "accepts orders of a stale session": Parts(follower=TakesStaleSessions),
    "forgets a fence that overtook its begin": Parts(follower=ForgetsEarlyFences),
    "counts the lease from receipt": Parts(follower=LeasesFromReceipt),
    "joins while its workers live": Parts(follower=JoinsWithLiveWorkers),
    "begins before all are fenced": Parts(lead=BeginsEarly),
    "forgets a join while breaking": Parts(lead=ForgetsJoinsWhileBreaking),
    "answers hosts that it has given up": Parts(lead=AnswersTheLost),
    "holds the register from receipt": Parts(candidate=HoldsFromReceipt),
    "takes up a term it has given up": Parts(candidate=TakesUpOldTerms),
    "sets without comparing": Parts(register=TakesWithoutLooking),
}

IN_CLUSTERS = {
    "counts the lease from receipt": Hunt(unheard, 1, Parts(follower=LeasesFromReceipt)),
    "begins before all are fenced": Hunt(seeded, 1, Parts(lead=BeginsEarly)),
    "counts no margin": Hunt(unheard, 1, Parts(lead=CountsNoMargin)),
    "forgets a join while breaking": Hunt(seeded, 1, Parts(lead=ForgetsJoinsWhileBreaking)),
    "leads for ever": Hunt(flapping, 2, Parts(lead=LeadsForEver)),
    "takes up a term it has given up": Hunt(seeded, 2, Parts(candidate=TakesUpOldTerms)),
    "sets without comparing": Hunt(flapping, 2, Parts(register=TakesWithoutLooking)),
}
