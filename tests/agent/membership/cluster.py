"""A cluster in virtual time: the membership's machines on hosts that crash, hang and return, with clocks that drift,
over a network that loses, delays, reorders and repeats, and workers that vote on every step.

Whatever breaks a law raises ``Violation``; so does a cluster that has not recovered when the faults have been over for
a while.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from closeranks.agent.membership.effects import (
    ForwardRequest,
    KillWorkers,
    LeaderEffect,
    ParticipationEnded,
    SendMessage,
    StartWorkers,
    SteppedDown,
)
from closeranks.agent.membership.election import (
    Candidate,
    Elected,
    EmbeddedRegister,
    Renewed,
    Resigned,
    SendRegisterRequest,
    apply_request,
)
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.generation import GenerationPhase
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.lease_timing import DRIFT, lease_timing_for
from closeranks.agent.membership.messages import Envelope, Join
from closeranks.core.requests import REGROUP

from .trouble import Chaos, Fault

LEASE_S = 3.0
_DYING_S = 0.3
_ORPHANED_S = 0.09
_LATENESS_S = 0.05
_REGISTER = -1


class Violation(AssertionError):
    """A law of the membership does not hold."""


@dataclass(frozen=True)
class Parts:
    """The machines under test: the real ones, or one that was broken on purpose."""

    lead: type[Leader] = Leader
    follower: type[Follower] = Follower
    candidate: type[Candidate] = Candidate
    register: type[EmbeddedRegister] = EmbeddedRegister


@dataclass
class Workers:
    """A host's workers of one generation, as one."""

    key: tuple[int, int]
    names: tuple[int, ...]
    step: int = 0
    votes: dict[int, set[int]] = field(default_factory=dict)
    ending: set[int] = field(default_factory=set)
    """Steps after which somebody wants to regroup."""
    wants_end: bool = False
    has_failed: bool = False


class Node:
    """One host: its clock, its agent's machines, and its workers."""

    def __init__(self, index: int, rng: random.Random) -> None:
        self.index = index
        self.offset = rng.uniform(0, 1000)
        self.rate = 1 + rng.choice((-1, 1)) * DRIFT * rng.choice((1.0, rng.random()))
        self.life = 0
        self.is_up = False
        self.is_hung = False
        self.is_cut = False
        self.is_deaf = False
        self.target = 0
        self.waiting: list[Callable[[], None]] = []
        self.alarm = 0
        self.follower: Follower
        self.candidate: Candidate | None = None
        self.lead: Leader | None = None
        self.workers: Workers | None = None
        self.lease_word = 0.0
        """What a worker looks at before it commits."""

    @property
    def name(self) -> str:
        return f"h{self.index}"


class Cluster:
    """Runs one chaos. ``commits`` and ``begun`` say what happened."""

    def __init__(self, chaos: Chaos, parts: Parts | None = None) -> None:
        self.chaos = chaos
        self.parts = parts or Parts()
        self.rng = random.Random(chaos.seed)
        self.now = 0.0
        self.commits: list[tuple[float, tuple[int, int], int]] = []
        self.begun: list[tuple[float, tuple[int, int], tuple[str, ...]]] = []
        self.acted = 0
        """The highest term in which a lead has acted."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.nodes = [Node(index, self.rng) for index in range(chaos.num_hosts)]
        self.register = self.parts.register(LEASE_S)
        self.register_rate = 1 + self.rng.choice((-1, 1)) * DRIFT
        for node in self.nodes:
            self.at(self.rng.uniform(0, 2), lambda node=node: self.boot(node))
        for fault in chaos.faults:
            self.at(fault.at, lambda fault=fault: self.strike(fault))

    # --- time

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, act))

    def after(self, longest_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + self.rng.uniform(0, longest_s), act)

    def local(self, node: Node) -> float:
        return node.offset + node.rate * self.now

    @property
    def is_calm(self) -> bool:
        return self.now > self.chaos.chaos_s

    def run(self) -> Cluster:
        end = self.chaos.chaos_s + self.chaos.calm_s
        while self._heap and self._heap[0][0] <= end:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.now = end
        self.check_recovered()
        return self

    # --- the network

    def send(self, source: int, target: int, act: Callable[[], None]) -> None:
        if source == target:
            self.at(self.now, act)
            return
        chaos, rng = self.chaos, self.rng
        is_lossy = not self.is_calm
        if self.parted(source, target) or self.unheard(source, target) or (is_lossy and rng.random() < chaos.loss):
            return
        for _ in range(1 + (is_lossy and rng.random() < chaos.repeat)):
            self.after(chaos.late_s if is_lossy and rng.random() < chaos.late else chaos.delay_s, act)

    def parted(self, source: int, target: int) -> bool:
        return any(index >= 0 and self.nodes[index].is_cut for index in (source, target))

    def unheard(self, source: int, target: int) -> bool:
        return any(index >= 0 and self.nodes[index].is_deaf for index in (source, target))

    def on(self, node: Node, life: int | None, act: Callable[[], None]) -> None:
        """Something for a host's agent: a stopped one finds it when it goes on, a dead one never."""
        if not node.is_up or (life is not None and life != node.life):
            return
        if node.is_hung:
            node.waiting.append(lambda: self.on(node, life, act))
            return
        act()
        self.settle(node)

    def settle(self, node: Node) -> None:
        """After any call of its machines: publish the lease, and set the alarm."""
        if not node.is_up:
            return
        node.lease_word = node.follower.lease_until if node.follower.is_joined else 0.0
        now = self.local(node)
        machines = (node.follower, node.candidate, node.lead)
        due = [at for machine in machines if machine is not None and (at := machine.deadline(now)) is not None]
        node.alarm += 1
        alarm, life = node.alarm, node.life
        if due:
            when = (min(due) - node.offset) / node.rate + self.rng.uniform(1e-6, _LATENESS_S)
            self.at(when, lambda: self.ring(node, life, alarm))

    def ring(self, node: Node, life: int, alarm: int) -> None:
        if alarm == node.alarm:
            self.on(node, life, lambda: self.wake(node))

    def wake(self, node: Node) -> None:
        now = self.local(node)
        if node.candidate is not None:
            self.campaign(node, node.candidate.tick(now))
        if node.lead is not None:
            self.led(node, node.lead.tick(self.local(node)))
        self.follow(node, node.follower.tick(self.local(node)))

    # --- lives

    def boot(self, node: Node) -> None:
        now = self.local(node)
        node.life += 1
        node.is_up, node.is_hung, node.waiting = True, False, []
        node.follower = self.parts.follower(node.name, node.life, 1, now=now, give_up_s=1e6)
        node.lead = None
        if node.index < self.chaos.num_contenders:
            holder = f"{node.name}/{node.life}"
            node.candidate = self.parts.candidate(holder, now=now, lease_s=LEASE_S)
            life = node.life
            self.after(0.3, lambda: self.policy(node, life))
        self.settle(node)

    def strike(self, fault: Fault) -> None:
        node = self.nodes[fault.host % len(self.nodes)]
        match fault.kind:
            case "crash" if node.is_up and not (node.index == 0 and self.chaos.num_contenders == 1):
                self.crash(node)
                self.at(self.now + 1 + fault.lasts, lambda: self.boot(node))
            case "hang" if node.is_up and not node.is_hung:
                node.is_hung = True
                self.at(self.now + fault.lasts, lambda: self.unhang(node, life=node.life))
            case "cut" if not node.is_cut:
                node.is_cut = True
                self.at(min(self.now + fault.lasts, self.chaos.chaos_s), lambda: setattr(node, "is_cut", False))
            case "deaf" if not node.is_deaf:
                node.is_deaf = True
                self.at(min(self.now + fault.lasts, self.chaos.chaos_s), lambda: setattr(node, "is_deaf", False))
            case "fault" if node.workers is not None:
                node.workers.has_failed = True
                self.on(node, node.life, lambda: self.follow(node, node.follower.on_worker_failed({"rank": 0})))
            case "leave" if node.is_up and node.index != 0:
                self.on(node, node.life, lambda: self.follow(node, node.follower.leave("preempted")))

    def unhang(self, node: Node, life: int) -> None:
        if node.life != life or not node.is_up:
            return
        node.is_hung = False
        waiting, node.waiting = node.waiting, []
        for act in waiting:
            act()
        self.settle(node)

    def crash(self, node: Node) -> None:
        """The agent dies, and the kernel kills its workers soon after; connections close where the network lives."""
        life, workers = node.life, node.workers
        node.is_up = False
        node.lead = node.candidate = None
        self.after(_ORPHANED_S, lambda: self.bury(node, workers))
        if self.rng.random() < 0.3:
            return
        for other in self.nodes:
            self.send(
                node.index, other.index, lambda other=other: self.on(other, None, lambda: self.gone(other, node, life))
            )

    def gone(self, other: Node, node: Node, life: int) -> None:
        now = self.local(other)
        if other.lead is not None:
            self.led(other, other.lead.on_disconnected(node.name, life, now))
        if other.target == node.index and other is not node:
            self.follow(other, other.follower.on_disconnected(now))

    def bury(self, node: Node, workers: Workers | None) -> None:
        if node.workers is workers:
            node.workers = None

    # --- leads

    def campaign(self, node: Node, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendRegisterRequest(request=request):
                    self.put(node, node.life, request)
                case Elected(term=term, until=until):
                    self.elect(node, term, until)
                case Renewed(until=until):
                    if node.lead is not None:
                        node.lead.renew(until)
                case Resigned():
                    node.lead = None

    def put(self, node: Node, life: int, request: Any) -> None:
        self.send(node.index, self.register_of(node), lambda: self.serve(node, life, request))

    def serve(self, node: Node, life: int, request: Any) -> None:
        holding = apply_request(self.register, request, self.register_rate * self.now)

        def answer() -> None:
            if node.candidate is not None:
                self.campaign(node, node.candidate.on_answer(request.number, holding, self.local(node)))

        self.send(self.register_of(node), node.index, lambda: self.on(node, life, answer))

    def register_of(self, node: Node) -> int:
        """A single contender has it in its own process."""
        return _REGISTER if self.chaos.num_contenders > 1 else node.index

    def elect(self, node: Node, term: int, until: float) -> None:
        for other in self.nodes:
            rival = other.candidate
            if other is not node and rival is not None and rival.term and self.local(other) < rival.until:
                raise Violation(f"{node.name} leads term {term} while {other.name} leads term {rival.term}")
        now = self.local(node)
        quiet_until = now + lease_timing_for(self.chaos.num_hosts).dead_after_s if term > 1 else now
        node.lead = self.parts.lead(term, until=until, quiet_until=quiet_until)

    def led(self, node: Node, effects: list[LeaderEffect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(envelope=envelope):
                    self.act(envelope.term)
                    host = self.nodes[int(envelope.host[1:])]
                    self.send(node.index, host.index, lambda host=host, envelope=envelope: self.deliver(host, envelope))
                case SteppedDown():
                    node.lead = None

    def act(self, term: int) -> None:
        if term < self.acted:
            raise Violation(f"the lead of term {term} acts after that of term {self.acted}")
        self.acted = term

    def deliver(self, host: Node, envelope: Envelope) -> None:
        self.on(host, None, lambda: self.follow(host, host.follower.handle(envelope, self.local(host))))

    def policy(self, node: Node, life: int) -> None:
        """Everybody who is here takes part: begin with them, or ask for a regroup when the members are others."""
        if node.life != life or not node.is_up:
            return
        if not node.is_hung and node.lead is not None:
            self.decide(node, node.lead)
            self.settle(node)
        self.after(0.5, lambda: self.policy(node, life))

    def decide(self, node: Node, lead: Leader) -> None:
        now, names = self.local(node), self.chosen(node, lead)
        if lead.may_begin(now) and names:
            effects = lead.begin([(name, 1) for name in names], {"names": list(names)}, now)
            assert lead.generation is not None
            key = (lead.term, lead.generation.number)
            if self.begun and key <= self.begun[-1][1]:
                raise Violation(f"generation {key} begins after {self.begun[-1][1]}")
            self.check_alone(key)
            self.begun.append((self.now, key, names))
            self.led(node, effects)
        elif lead.generation is not None and lead.phase == GenerationPhase.RUNNING and not lead.generation.requests:
            members = lead.generation.members.keys()
            if set(names) != set(members):
                self.led(node, lead.send_request(REGROUP, now))

    def check_alone(self, key: tuple[int, int]) -> None:
        """Where an agent is stopped its workers may live on, but their lease is over: they commit nothing."""
        for node in self.nodes:
            if node.workers is not None and self.local(node) < node.lease_word:
                raise Violation(f"{key} begins while workers of {node.workers.key} live on {node.name}")

    def chosen(self, node: Node, lead: Leader) -> tuple[str, ...]:
        """Members before spares, so that nothing regroups without need."""
        members = lead.generation.members.keys() if lead.generation is not None else ()
        names = [host.name for host in lead.available if self.takes_part(node, host.name)]
        return tuple(sorted(names, key=lambda name: name not in members)[: self.chaos.most_members])

    def takes_part(self, lead: Node, name: str) -> bool:
        return self.chaos.lead_works or name != lead.name

    # --- hosts

    def follow(self, node: Node, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(envelope=envelope):
                    if isinstance(envelope.body, Join):
                        node.target = self.find_lead(node)
                    lead = self.nodes[node.target]
                    self.send(node.index, lead.index, lambda lead=lead, envelope=envelope: self.reach(lead, envelope))
                case StartWorkers(begin=begin):
                    self.start(node, begin)
                case ForwardRequest(request=ask):
                    if ask.request == REGROUP and node.workers is not None:
                        node.workers.wants_end = True
                case KillWorkers():
                    self.kill(node, node.life, node.workers)
                case ParticipationEnded():
                    node.workers = None

    def reach(self, lead: Node, envelope: Envelope) -> None:
        self.on(lead, None, lambda: lead.lead and self.led(lead, lead.lead.handle(envelope, self.local(lead))))

    def find_lead(self, node: Node) -> int:
        """Who holds the register, or a stale idea of it."""
        holder = self.register.read(self.register_rate * self.now).holder
        if not holder or (not self.is_calm and self.rng.random() < 0.2):
            return self.rng.randrange(self.chaos.num_contenders)
        return int(holder.split("/")[0][1:])

    def kill(self, node: Node, life: int, workers: Workers | None) -> None:
        self.after(_DYING_S, lambda: self.killed(node, life, workers))

    def killed(self, node: Node, life: int, workers: Workers | None) -> None:
        self.bury(node, workers)
        self.on(node, life, lambda: self.follow(node, node.follower.on_fenced({}, self.local(node))))

    # --- workers

    def start(self, node: Node, begin: Any) -> None:
        key = (node.follower.term, begin.generation)
        if node.workers is not None:
            raise Violation(f"{node.name} starts {key} while workers of {node.workers.key} live")
        if self.begun[-1][1] > key:
            raise Violation(f"{node.name} starts {key} after {self.begun[-1][1]} began")
        node.workers = Workers(key, tuple(int(name[1:]) for name in begin.payload["names"]))
        self.compute(node, node.workers)

    def compute(self, node: Node, workers: Workers) -> None:
        self.at(self.now + self.rng.uniform(0.05, 0.3), lambda: self.vote(node, workers))

    def vote(self, node: Node, workers: Workers) -> None:
        if node.workers is workers and not workers.has_failed:
            for index in workers.names:
                self.carry(node, self.nodes[index], workers.key, workers.step, workers.wants_end)

    def carry(self, node: Node, other: Node, key: tuple[int, int], step: int, wants_end: bool) -> None:
        """A vote is on a stream: it arrives once the network lets it and its reader has started."""
        if node is not other and self.parted(node.index, other.index):
            self.after(0.4, lambda: self.carry(node, other, key, step, wants_end))
        else:
            self.after(0.05, lambda: self.count(node, other, key, step, wants_end))

    def count(self, node: Node, other: Node, key: tuple[int, int], step: int, wants_end: bool) -> None:
        workers = other.workers
        if workers is None or workers.key != key:
            if self.begun[-1][1] == key:
                self.after(0.4, lambda: self.carry(node, other, key, step, wants_end))
            return
        workers.votes.setdefault(step, set()).add(node.index)
        if wants_end:
            workers.ending.add(step)
        self.commit(other, workers)

    def commit(self, node: Node, workers: Workers) -> None:
        if node.workers is not workers or workers.has_failed:
            return
        if len(workers.votes.get(workers.step, ())) < len(workers.names):
            return
        if self.local(node) >= node.lease_word:
            self.after(0.2, lambda: self.commit(node, workers))
            return
        if self.begun[-1][1] != workers.key:
            raise Violation(f"{node.name} commits in {workers.key} after {self.begun[-1][1]} began")
        self.commits.append((self.now, workers.key, workers.step))
        del workers.votes[workers.step]
        workers.step += 1
        if workers.step - 1 in workers.ending:
            node.workers = None
            self.on(node, node.life, lambda: self.follow(node, node.follower.on_workers_done({"regrouped": True})))
        else:
            self.compute(node, workers)

    # --- the end

    def check_recovered(self) -> None:
        leading = [node for node in self.nodes if node.is_up and node.lead is not None]
        if len(leading) != 1:
            raise Violation(f"{len(leading)} leads after the calm")
        lead = leading[0].lead
        assert lead is not None
        wanted = {n.name for n in self.nodes if n.is_up and not n.follower.is_over}
        wanted = {name for name in wanted if self.takes_part(leading[0], name)}
        if not wanted:
            return
        if lead.phase != GenerationPhase.RUNNING:
            raise Violation(f"the generation is still {lead.phase} after the calm")
        assert lead.generation is not None
        members = set(lead.generation.members)
        if not members <= wanted or len(members) < min(len(wanted), self.chaos.most_members):
            raise Violation(f"members are {sorted(members)}, not {sorted(wanted)}")
        if not self.commits or self.commits[-1][0] < self.now - 3:
            raise Violation("no step was committed lately")
