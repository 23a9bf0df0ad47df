"""What the lead and a host do, letter by letter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.membership.effects import (
    ForwardRequest,
    ForwardStore,
    GenerationFormed,
    GenerationSettled,
    HostStatusChanged,
    JoinAccepted,
    KillWorkers,
    ParticipationEnded,
    RelayedMessage,
    SendMessage,
    SteppedDown,
)
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.lease_timing import DRIFT, KILL_S, MAX_BEATS_PER_S, ORPHAN_S, lease_timing_for
from closeranks.agent.membership.messages import (
    BeginGeneration,
    Dismiss,
    Envelope,
    Fence,
    Fenced,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leaving,
    StoreAddress,
    Welcome,
    WorkerEvent,
    WorkerFailed,
    WorkerRequest,
    WorkersDone,
)
from closeranks.core.errors import CloseranksError
from closeranks.core.requests import REGROUP, SAVE

from .cluster import Parts
from .scenes import Court, Talk, bodies


def of(kind: type, effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


# --- leases


@given(st.integers(1, 100_000))
def test_a_host_is_dead_before_the_lead_says_so(num_hosts: int) -> None:
    timing = lease_timing_for(num_hosts)
    slowest_host = timing.lease_s / (1 - DRIFT) + KILL_S
    fastest_lead = timing.dead_after_s / (1 + DRIFT)
    assert slowest_host <= fastest_lead + 1e-9
    assert num_hosts / timing.beat_s <= MAX_BEATS_PER_S + 1e-6
    assert timing.lease_s >= 4 * timing.beat_s


def test_a_lease_that_grew_is_not_cut_short_when_hosts_leave() -> None:
    lease_times = iter([10.0, 10.0, 10.0, 3.0])
    lead = Leader(1, timing=lambda num: replace(lease_timing_for(1), lease_s=next(lease_times), margin_s=0.5))
    for seq, body in enumerate([Join(1), Heartbeat(1), Heartbeat(2), Heartbeat(3)]):
        lead.handle(Envelope(int(seq > 0), "a", 1, 1, body), float(seq))
    assert lead.tick(12.4) == []
    assert of(HostStatusChanged, lead.tick(12.5)) == [HostStatusChanged("a", "lost", "no heartbeat arrived in time", 1)]


# --- the lead


def test_a_generation_from_its_begin_to_its_end() -> None:
    court = Court(Parts(), "a", "b")
    begun = bodies(court.begin("b", "a"))
    assert begun == [BeginGeneration(0, 0, (2, 2)), BeginGeneration(0, 1, (2, 2))]
    assert of(GenerationFormed, court.say("a", Heartbeat(2, 0), 0.2)) == []
    assert of(GenerationFormed, court.say("b", Heartbeat(2, 0), 0.2)) == [GenerationFormed(0)]
    assert bodies(court.say("b", StoreAddress(0, "b:1"), 0.3)) == [StoreAddress(0, "b:1")] * 2
    assert bodies(court.say("b", StoreAddress(0, "b:2"), 0.3)) == [StoreAddress(0, "b:1")]
    assert of(RelayedMessage, court.say("a", WorkerEvent(0, 2, {"event": "step"}), 0.4)) == [
        RelayedMessage("a", WorkerEvent(0, 2, {"event": "step"}))
    ]
    assert court.say("a", WorkersDone(0, {"x": 1}), 0.5) == []
    (settled,) = court.say("b", WorkersDone(0, {"x": 2}), 0.6)
    assert settled.cause.why == "done"
    assert settled.facts == {"a": {"x": 1}, "b": {"x": 2}}
    assert court.say("a", WorkerEvent(0, 2, {}), 0.7) != []


def test_a_fault_fences_everybody_and_the_first_cause_counts() -> None:
    court = Court(Parts(), "a", "b")
    court.begin("a", "b")
    assert bodies(court.say("b", WorkerFailed(0, {"rank": 3}), 0.5)) == [Fence(0), Fence(0)]
    assert court.say("a", WorkerFailed(0, {"rank": 1}), 0.6) == []
    court.say("b", Fenced(0), 0.7)
    (settled,) = of(GenerationSettled, court.say("a", Fenced(0, {"late": True}), 0.8))
    assert (settled.cause.why, settled.cause.host, settled.cause.facts) == ("fault", "b", {"rank": 3})
    assert court.begin("a", "b", now=0.9) != []
    assert court.say("a", WorkerFailed(0), 1.0) == court.say("a", Fenced(0), 1.0) == []
    assert court.lead.phase == "forming"


def test_a_closed_connection_counts_when_its_workers_are_surely_dead() -> None:
    court = Court(Parts(), "a", "b")
    court.begin("a", "b")
    assert court.lead.on_disconnected("b", 2, 0.5) == []
    assert [body for body in bodies(court.lead.on_disconnected("b", 1, 0.5)) if isinstance(body, Fence)] != []
    court.say("a", Fenced(0), 0.5)
    assert court.lead.deadline(0.5) == 0.5 + ORPHAN_S
    assert of(GenerationSettled, court.lead.tick(0.5 + ORPHAN_S))[0].cause.why == "lost"
    assert [host.name for host in court.lead.available] == ["a"]


def test_a_silent_host_counts_when_its_lease_is_over() -> None:
    court = Court(Parts(), "a", "b")
    court.begin("a", "b")
    patience_s = lease_timing_for(2).dead_after_s
    court.say("a", Heartbeat(2, 0), 2.0)
    assert of(GenerationSettled, court.lead.tick(patience_s)) == []
    assert court.lead.phase == "breaking"
    assert of(GenerationSettled, court.say("a", Fenced(0), patience_s)) != []


def test_what_is_not_confirmed_is_said_again() -> None:
    court = Court(Parts(), "a")
    court.begin("a")
    assert bodies(court.say("a", Heartbeat(2), 0.2)) == [HeartbeatAck(2, 0.25, 3.0)]
    assert bodies(court.say("a", Heartbeat(3), 0.4))[1:] == [BeginGeneration(0, 0, (2,))]
    court.say("a", Heartbeat(4, 0), 0.5)
    court.say("a", StoreAddress(0, "x:1"), 0.5)
    court.lead.send_request(SAVE, 0.5)
    court.lead.send_request(REGROUP, 0.5)
    asks = [WorkerRequest(0, 1, SAVE), WorkerRequest(0, 2, REGROUP)]
    assert bodies(court.say("a", Heartbeat(5, 0, False, 0), 0.8))[1:] == [*asks, StoreAddress(0, "x:1")]
    assert bodies(court.say("a", Heartbeat(6, 0, True, 1), 1.2))[1:] == asks[1:]
    court.lead.fence("a hang", 1.3)
    assert bodies(court.say("a", Heartbeat(7, 0, True, 2), 1.6))[1:] == [Fence(0)]


def test_an_agent_that_started_anew_waits_for_the_workers_of_its_last_life() -> None:
    court = Court(Parts(), "a", "b")
    court.begin("a", "b")
    effects = court.say("b", Join(2), 0.5, incarnation=2)
    assert [type(body) for body in bodies(effects)] == [Fence, Fence, Dismiss, Welcome]
    court.say("a", Fenced(0), 0.6)
    assert court.lead.phase == "breaking"
    assert of(GenerationSettled, court.lead.on_disconnected("b", 1, 0.7)) == []
    assert of(GenerationSettled, court.lead.tick(0.7 + ORPHAN_S)) != []
    assert court.say("b", Heartbeat(9), 0.9) == []
    assert of(HostStatusChanged, court.say("b", Heartbeat(1), 0.9, incarnation=2)) == [
        HostStatusChanged("b", "joined", "", 2)
    ]


def test_a_clock_that_was_set_back_does_not_lock_a_host_out() -> None:
    court = Court(Parts(), "a")
    assert court.say("a", Join(2), 1.0, incarnation=0) == []
    court.lead.tick(10.0)
    assert bodies(court.say("a", Join(2), 10.1, incarnation=0)) != []


def test_a_host_that_leaves_stays_until_its_generation_is_over() -> None:
    court = Court(Parts(), "a", "b")
    court.begin("a", "b")
    assert court.say("b", Leaving("preempted"), 0.5) == [HostStatusChanged("b", "leaving", "preempted", 2)]
    assert [host.name for host in court.lead.available] == ["a"]
    court.say("a", WorkersDone(0), 0.6)
    effects = court.say("b", WorkersDone(0), 0.6)
    assert [type(body) for body in bodies(effects)] == [Dismiss]
    assert of(GenerationSettled, effects)[0].available[0].name == "a"
    assert len(of(GenerationSettled, effects)[0].available) == 1


def test_a_generation_begins_only_with_hosts_that_are_here() -> None:
    court = Court(Parts(), "a")
    with pytest.raises(CloseranksError, match="cannot begin: not available: b"):
        court.begin("a", "b")


def test_a_lead_without_authority_says_nothing() -> None:
    lead = Leader(3, until=5.0)
    lead.handle(Envelope(0, "a", 1, 1, Join(1)), 4.0)
    assert lead.handle(Envelope(3, "a", 1, 1, Heartbeat(1)), 5.0) == []
    assert lead.tick(5.0) == [SteppedDown(3)]
    assert lead.tick(6.0) == lead.dismiss("over", 6.0) == []
    assert not lead.may_begin(4.0)


def test_a_new_lead_waits_and_counts_on() -> None:
    lead = Leader(2, quiet_until=4.0)
    lead.handle(Envelope(1, "a", 1, 1, Join(1, generation=7)), 1.0)
    lead.handle(Envelope(2, "a", 1, 1, Heartbeat(1)), 1.0)
    assert not lead.may_begin(3.9)
    (send,) = lead.begin([("a", 1)], {}, 4.0)
    assert send.envelope.body.generation == 8


def test_whoever_speaks_after_the_end_is_sent_home() -> None:
    court = Court(Parts(), "a")
    assert bodies(court.lead.dismiss("finished", 1.0)) == [Dismiss("finished")]
    assert bodies(court.say("a", Heartbeat(2), 1.1)) == [Dismiss("finished")]
    assert bodies(court.say("b", Join(1), 1.2, term=0)) == [Dismiss("finished")]


# --- a host


def test_orders_reach_the_workers_once_and_in_turn() -> None:
    talk = Talk(Parts())
    talk.hear(BeginGeneration(1, 0, (2,)), 0.2)
    assert talk.hear(WorkerRequest(1, 2, REGROUP), 0.3) == []
    assert talk.hear(WorkerRequest(1, 1, SAVE), 0.3) == [ForwardRequest(WorkerRequest(1, 1, SAVE))]
    assert talk.hear(WorkerRequest(1, 1, SAVE), 0.3) == []
    assert talk.hear(WorkerRequest(1, 2, REGROUP), 0.4) == [ForwardRequest(WorkerRequest(1, 2, REGROUP))]
    assert talk.hear(StoreAddress(1, "x:1"), 0.4) == [ForwardStore("x:1")]
    assert talk.hear(StoreAddress(1, "x:1"), 0.4) == []
    assert talk.hear(StoreAddress(0, "x:0"), 0.4) == []


def test_news_are_repeated_with_every_beat() -> None:
    talk = Talk(Parts())
    talk.hear(BeginGeneration(1, 0, (2,)), 0.2)
    assert bodies(talk.follower.on_store_opened("x:1")) == [StoreAddress(1, "x:1")]
    assert bodies(talk.follower.on_worker_failed({"rank": 0})) == [WorkerFailed(1, {"rank": 0})]
    for now in (0.5, 0.8):
        assert bodies(talk.follower.tick(now))[1:] == [StoreAddress(1, "x:1"), WorkerFailed(1, {"rank": 0})]
    talk.hear(StoreAddress(1, "x:1"), 0.9)
    assert bodies(talk.follower.tick(1.2))[1:] == [WorkerFailed(1, {"rank": 0})]
    assert of(KillWorkers, talk.hear(Fence(1), 1.3)) != []
    assert talk.hear(Fence(1), 1.4) == []
    assert bodies(talk.follower.on_fenced({"dead": 2}, 1.5)) == [Fenced(1, {"dead": 2})]
    assert bodies(talk.hear(Fence(1), 1.6)) == [Fenced(1, {"dead": 2})]


def test_joining_is_tried_again_ever_more_patiently_until_it_gives_up() -> None:
    follower = Parts().follower("a", 7, 2, now=0.0, give_up_s=20.0)
    sessions, now = [], 0.0
    while not follower.is_over:
        effects = follower.tick(now)
        sessions += [(now, effect.envelope.session) for effect in of(SendMessage, effects)]
        now = follower.deadline(now) or now
    assert sessions == [(0.0, 1), (0.5, 2), (1.5, 3), (3.5, 4), (7.5, 5), (15.5, 6)]
    assert effects == [ParticipationEnded("no leader was found within 20 s", is_lost=True)]


def test_a_late_welcome_is_none() -> None:
    follower = Parts().follower("a", 7, 2, now=0.0)
    follower.tick(0.0)
    assert follower.handle(Envelope(1, "a", 7, 1, Welcome(0.25, 3.0)), 3.0) == []
    assert of(JoinAccepted, follower.handle(Envelope(1, "a", 7, 1, Welcome(0.25, 3.0)), 2.9)) != []


def test_the_end_waits_for_the_workers() -> None:
    talk = Talk(Parts())
    talk.hear(BeginGeneration(1, 0, (2,)), 0.2)
    assert talk.hear(Dismiss("finished"), 0.5) == [KillWorkers(1, "finished")]
    assert not talk.follower.is_over
    assert talk.follower.on_fenced({}, 0.6) == [ParticipationEnded("finished")]
    assert talk.follower.is_over
    assert talk.follower.tick(9.0) == []


def test_a_newer_lead_ends_the_old_ones_generation() -> None:
    talk = Talk(Parts())
    talk.hear(BeginGeneration(1, 0, (2,)), 0.2)
    assert of(KillWorkers, talk.hear(Welcome(0.25, 3.0), 0.5, term=3)) != []
    talk.follower.on_fenced({}, 0.6)
    assert [(s.envelope.term, s.envelope.body) for s in of(SendMessage, talk.follower.tick(0.6))] == [(3, Join(2, 1))]


def test_who_leaves_does_not_come_back() -> None:
    talk = Talk(Parts())
    talk.hear(BeginGeneration(1, 0, (2,)), 0.2)
    assert bodies(talk.follower.leave("preempted")) == [Leaving("preempted")]
    assert bodies(talk.follower.tick(0.5))[1:] == [Leaving("preempted")]
    assert of(KillWorkers, talk.follower.tick(3.0)) != []
    assert talk.follower.on_fenced({}, 3.1) == [ParticipationEnded("preempted")]
