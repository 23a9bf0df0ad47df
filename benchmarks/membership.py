"""How does the membership grow with the number of hosts?

The same machines that run a job, with thousands of agents in virtual time: how many messages and rounds (message
delays, one after another) it takes to form the first generation, to go on after one lost host, after a hundred at once
and after a split that heals, how many messages a second keep it up; and how long the lead takes for a message.

    python benchmarks/membership.py
    python benchmarks/membership.py --hosts 1000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from membership_fleet import Episode, Fleet
from results import conclude, say

from closeranks.agent.membership.lease_timing import MAX_BEATS_PER_S, ORPHAN_S, lease_timing_for
from closeranks.agent.membership.messages import Envelope, Heartbeat, RankProgress

GOAL = (
    "rounds to form and to recover are the same for a hundredth of the hosts, at most 4 messages per host in each, "
    "at most 4,000 messages a second in steady state, and the lead could take twice the beats that it gets"
)
_ROUNDS = ("form", "one_lost", "many_lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000, help="simulated agents (default: 10000)")
    args = parser.parse_args()
    small, large = (figures_of(num) for num in (max(20, args.hosts // 100), args.hosts))
    figures = {"small": small, "large": large, "wire": wire_figures()}
    for size in (small, large):
        tell(size)
    say(f"  a beat of 8 workers: {figures['wire']['bytes']} bytes, {figures['wire']['us']} us to encode and decode")
    conclude("membership", figures, GOAL, judge(figures))


def figures_of(num_hosts: int) -> dict[str, Any]:
    """All episodes of one fleet, one after another."""
    fleet = Fleet(num_hosts)
    timing = lease_timing_for(num_hosts)
    num_many = min(100, num_hosts // 4)
    episodes = {"form": fleet.until(lambda: fleet.is_running(num_hosts))}
    names = list(fleet.followers)
    episodes["one_lost"] = _lose(fleet, names[:1])
    episodes["many_lost"] = _lose(fleet, names[1 : 1 + num_many])
    episodes |= _split(fleet, set(names[-num_hosts // 10 :]))
    rate = _steady(fleet, 4 * timing.beat_s)
    return {
        "hosts": num_hosts,
        "beat_s": timing.beat_s,
        "lease_s": timing.lease_s,
        **{name: _figures(episode, num_hosts, name in _ROUNDS) for name, episode in episodes.items()},
        "many": num_many,
        "messages_per_s": round(rate, 1),
        "lead_us_per_message": round(1e6 * fleet.handled_s / fleet.num_handled, 2),
    }


def _figures(episode: Episode, num_hosts: int, has_rounds: bool) -> dict[str, Any]:
    """Where leases or beats are waited for, rounds say nothing."""
    return {
        "messages": episode.num_messages,
        "per_host": round(episode.num_messages / num_hosts, 2),
        "rounds": episode.num_rounds if has_rounds else None,
        "seconds": round(episode.seconds, 3),
        "beats": episode.num_beats,
    }


def _lose(fleet: Fleet, names: list[str]) -> Episode:
    num_left = len(fleet.followers) - len(names)
    fleet.start_episode()
    fleet.kill(names)
    fleet.episode.waited_s = ORPHAN_S
    return fleet.until(lambda: fleet.is_running(num_left))


def _split(fleet: Fleet, far: set[str]) -> dict[str, Episode]:
    """A tenth of the hosts fall silent: their leases must run out; later they are back and are taken in again."""
    num_all = len(fleet.followers)
    fleet.start_episode()
    fleet.cut = far
    split = fleet.until(lambda: fleet.is_running(num_all - len(far)))
    fleet.start_episode()
    fleet.cut = set()
    num_joined = fleet.num_joined + len(far)
    fleet.until(lambda: fleet.num_joined == num_joined)
    fleet.regroup()
    return {"split": split, "healed": fleet.until(lambda: fleet.is_running(num_all))}


def _steady(fleet: Fleet, seconds: float) -> float:
    fleet.start_episode()
    end = fleet.now + seconds
    episode = fleet.until(lambda: fleet.now >= end)
    return (episode.num_messages + episode.num_beats) / episode.seconds


def wire_figures() -> dict[str, Any]:
    """A beat as it travels, without the channel around it."""
    rows = tuple(RankProgress(rank, 1000, 2, 0.125, compute_sum_s=12.5, num_timed=100) for rank in range(8))
    letter = Envelope(1, "host-00042", time.time_ns(), 1, Heartbeat(12345, 3, True, 0, rows))
    text, num = json.dumps(letter.to_fields()), 2000
    began_at = time.thread_time()
    for _ in range(num):
        assert Envelope.from_fields(json.loads(json.dumps(letter.to_fields()))) == letter
    return {"bytes": len(text), "us": round(1e6 * (time.thread_time() - began_at) / num, 1)}


def tell(figures: Mapping[str, Any]) -> None:
    say(f"  {figures['hosts']:,} hosts: a beat every {figures['beat_s']:g} s, leases of {figures['lease_s']:g} s")
    for name in (*_ROUNDS, "split", "healed"):
        told = figures[name]
        rounds = "" if told["rounds"] is None else f", {told['rounds']} rounds"
        messages = f"{told['messages']:>7,} messages ({told['per_host']:.1f} per host)"
        say(f"    {name:<9} {messages}, {told['seconds']:.3f} s{rounds}")
    say(f"    steady    {figures['messages_per_s']:,.0f} messages/s, {figures['lead_us_per_message']:.1f} us each")


def judge(figures: Mapping[str, Any]) -> bool:
    return judge_growth(figures["small"], figures["large"]) and judge_speed(figures["large"], figures["wire"])


def judge_growth(small: Mapping[str, Any], large: Mapping[str, Any]) -> bool:
    """What does not depend on the machine."""
    same_rounds = all(small[name]["rounds"] == large[name]["rounds"] for name in _ROUNDS)
    is_linear = all(large[name]["per_host"] <= 4 for name in (*_ROUNDS, "split", "healed"))
    return same_rounds and is_linear and bool(large["messages_per_s"] <= 2 * MAX_BEATS_PER_S)


def judge_speed(large: Mapping[str, Any], wire: Mapping[str, Any]) -> bool:
    beat_us = large["lead_us_per_message"] + wire["us"]
    return bool(1e6 / beat_us >= 2 * large["hosts"] / large["beat_s"])


if __name__ == "__main__":
    main()
