"""Short scenes that a machine of the membership must get right, each a function of the machines: the same scenes are
played with machines that were broken on purpose."""

from __future__ import annotations

from typing import Any

from closeranks.agent.membership.effects import GenerationSettled, KillWorkers, SendMessage, StartWorkers
from closeranks.agent.membership.election import Elected, LeaseRecord, Resigned, apply_request
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.lease_timing import lease_margin_s
from closeranks.agent.membership.messages import (
    BeginGeneration,
    Dismiss,
    Envelope,
    Fence,
    Fenced,
    Heartbeat,
    HeartbeatAck,
    Join,
    MessageBody,
    Welcome,
)

from .cluster import Parts

LEASE_S = 3.0


def bodies(effects: list[Any]) -> list[MessageBody]:
    return [effect.envelope.body for effect in effects if isinstance(effect, SendMessage)]


def started(effects: list[Any]) -> list[int]:
    return [effect.begin.generation for effect in effects if isinstance(effect, StartWorkers)]


class Talk:
    """A follower ``a``, spoken to by hand."""

    def __init__(self, parts: Parts, term: int = 2) -> None:
        self.follower: Follower = parts.follower("a", 7, 2, now=0.0)
        self.follower.tick(0.0)
        self.hear(Welcome(0.25, LEASE_S), 0.1, term=term)
        self.term = term

    def hear(self, body: MessageBody, now: float, *, term: int | None = None, session: int | None = None) -> list[Any]:
        self_term = self.term if term is None else term
        envelope = Envelope(self_term, "a", 7, self.follower.session if session is None else session, body)
        return self.follower.handle(envelope, now)


def orders_of_an_old_term_are_ignored(parts: Parts) -> None:
    talk = Talk(parts)
    assert started(talk.hear(BeginGeneration(5, 0, (2,)), 0.2, term=1)) == []
    assert started(talk.hear(BeginGeneration(5, 0, (2,)), 0.2)) == [5]
    assert talk.hear(Fence(5), 0.3, term=1) == []
    assert talk.hear(Dismiss("go"), 0.3, term=1) == []
    assert [type(effect) for effect in talk.hear(Fence(5), 0.3)] == [KillWorkers]


def orders_of_an_old_session_are_ignored(parts: Parts) -> None:
    talk = Talk(parts)
    assert started(talk.hear(BeginGeneration(5, 0, (2,)), 0.2, session=0)) == []


def a_fence_that_overtakes_its_begin_is_remembered(parts: Parts) -> None:
    talk = Talk(parts)
    assert bodies(talk.hear(Fence(5), 0.2)) == [Fenced(5)]
    assert started(talk.hear(BeginGeneration(5, 0, (2,)), 0.3)) == []
    assert started(talk.hear(BeginGeneration(6, 0, (2,)), 0.4)) == [6]


def a_lease_runs_from_when_the_beat_was_sent(parts: Parts) -> None:
    talk = Talk(parts)
    talk.hear(BeginGeneration(5, 0, (2,)), 0.2)
    talk.follower.tick(0.6)
    assert talk.follower.lease_until == LEASE_S
    talk.hear(HeartbeatAck(3, 0.25, LEASE_S), 2.9)
    assert talk.follower.lease_until == 0.6 + LEASE_S
    assert not any(isinstance(effect, KillWorkers) for effect in talk.follower.tick(3.55))
    assert any(isinstance(effect, KillWorkers) for effect in talk.follower.tick(3.6))


def no_worker_lives_when_it_joins_again(parts: Parts) -> None:
    talk = Talk(parts)
    talk.hear(BeginGeneration(5, 0, (2,)), 0.2)
    assert [type(effect) for effect in talk.follower.on_disconnected(1.0)] == [KillWorkers]
    assert talk.follower.tick(1.5) == []
    talk.follower.on_fenced({}, 1.6)
    assert bodies(talk.follower.tick(1.6)) == [Join(2, 5)]


class Court:
    """A lead, and hosts that are played by hand."""

    def __init__(self, parts: Parts, *names: str) -> None:
        self.lead: Leader = parts.lead(1)
        self.session = dict.fromkeys(names, 1)
        for name in names:
            self.arrive(name, 0.0)

    def say(self, name: str, body: MessageBody, now: float, *, term: int = 1, incarnation: int = 1) -> list[Any]:
        return self.lead.handle(Envelope(term, name, incarnation, self.session.setdefault(name, 1), body), now)

    def arrive(self, name: str, now: float) -> None:
        self.say(name, Join(2), now, term=0)
        self.say(name, Heartbeat(1), now)

    def begin(self, *names: str, now: float = 0.1) -> list[Any]:
        return self.lead.begin([(name, 2) for name in names], {}, now)


def nothing_begins_before_all_are_fenced(parts: Parts) -> None:
    court = Court(parts, "a", "b")
    court.begin("a", "b")
    court.lead.fence("a hang", 0.5)
    assert not court.lead.may_begin(0.5)
    court.say("a", Fenced(0), 0.6)
    assert not court.lead.may_begin(0.6)
    court.say("b", Fenced(0), 0.7)
    assert court.lead.may_begin(0.7)


def who_joins_while_a_generation_breaks_is_available_after(parts: Parts) -> None:
    court = Court(parts, "a", "b")
    court.begin("a", "b")
    court.lead.fence("a hang", 0.5)
    court.arrive("c", 0.6)
    court.say("a", Fenced(0), 0.7)
    effects = court.say("b", Fenced(0), 0.7)
    offered = [host.name for effect in effects if isinstance(effect, GenerationSettled) for host in effect.available]
    assert offered == ["a", "b", "c"]


def who_was_given_up_is_not_answered(parts: Parts) -> None:
    court = Court(parts, "a", "b")
    court.begin("a", "b")
    court.lead.tick(10.0)
    assert court.say("a", Heartbeat(2), 10.1) == []


def a_term_is_held_from_when_it_was_asked_for(parts: Parts) -> None:
    register, candidate = parts.register(LEASE_S), parts.candidate("a", now=0.0, lease_s=LEASE_S, poll_s=9.0)
    (read,) = candidate.tick(0.0)
    (take,) = candidate.on_answer(read.request.number, apply_request(register, read.request, 0.0), 0.0)
    (elected,) = candidate.on_answer(take.request.number, apply_request(register, take.request, 1.9), 2.0)
    assert elected == Elected(1, LEASE_S - lease_margin_s(LEASE_S))
    assert candidate.tick(2.1) == []
    assert candidate.tick(2.9) == [Resigned(1)]


def a_term_is_taken_once(parts: Parts) -> None:
    register = parts.register(LEASE_S)
    assert register.acquire(0, "a", 0.0) == LeaseRecord(1, "a")
    assert register.acquire(0, "b", 1.0) == LeaseRecord(1, "a")
    assert register.acquire(1, "b", 1.0) == LeaseRecord(1, "a")
    assert register.renew(1, "b", 1.0) == LeaseRecord(1, "a")
    assert register.read(3.0) == LeaseRecord(1)
    assert register.renew(1, "a", 3.0) == LeaseRecord(1)
    assert register.acquire(1, "b", 3.0) == LeaseRecord(2, "b")


def a_term_that_was_given_up_is_given_back(parts: Parts) -> None:
    register, candidate = parts.register(LEASE_S), parts.candidate("a", now=0.0, lease_s=LEASE_S)
    (read,) = candidate.tick(0.0)
    (take,) = candidate.on_answer(read.request.number, apply_request(register, read.request, 0.0), 0.0)
    candidate.on_answer(take.request.number, apply_request(register, take.request, 0.0), 0.0)
    register.renew(1, "a", 2.0)
    assert candidate.tick(2.9) == [Resigned(1)]
    (read,) = candidate.tick(3.4)
    (leave,) = candidate.on_answer(read.request.number, apply_request(register, read.request, 3.4), 3.4)
    assert leave.request.verb == "leave"
    assert apply_request(register, leave.request, 3.5) == LeaseRecord(1)


SCENES = (
    a_term_is_held_from_when_it_was_asked_for,
    a_term_is_taken_once,
    a_term_that_was_given_up_is_given_back,
    orders_of_an_old_term_are_ignored,
    orders_of_an_old_session_are_ignored,
    a_fence_that_overtakes_its_begin_is_remembered,
    a_lease_runs_from_when_the_beat_was_sent,
    no_worker_lives_when_it_joins_again,
    nothing_begins_before_all_are_fenced,
    who_joins_while_a_generation_breaks_is_available_after,
    who_was_given_up_is_not_answered,
)
