"""Applies all rules to the facts of a run. To add a rule, write a file in ``doctor.rules`` and name it here.

Pure. Invariants: errors come first, then findings by the gain to expect; two findings about the same seconds are
reported once, by the one that explains the other; a rule that fails on unusual facts is reported and
stops no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.doctor.finding import Finding, Rule
from closeranks.doctor.rules.between_steps import evaluation, saves, snapshots, user_code
from closeranks.doctor.rules.computing import (
    compilation,
    device_clocks,
    garbage_collection,
    idle_device,
    processors,
    recompute,
    small_micro_batch,
    swap,
)
from closeranks.doctor.rules.outcome import interruptions, loss_scale, loss_values
from closeranks.doctor.rules.waiting import (
    data_wait,
    device_copy,
    exposed_communication,
    many_collectives,
    nccl_transport,
    pipeline_bubble,
    slow_link,
    small_buckets,
    tensor_axis,
    uneven_ranks,
)
from closeranks.doctor.run_facts import RunFacts
from closeranks.facts.layout import pluralize

LEAST_STEPS = 5
"""Fewer counted steps than these say nothing about speed."""

RULES: Mapping[str, Rule] = {
    "interruptions": interruptions.find,
    "loss-values": loss_values.find,
    "loss-scale": loss_scale.find,
    "data-wait": data_wait.find,
    "device-copy": device_copy.find,
    "exposed-communication": exposed_communication.find,
    "nccl-transport": nccl_transport.find,
    "slow-link": slow_link.find,
    "small-buckets": small_buckets.find,
    "many-collectives": many_collectives.find,
    "pipeline-bubble": pipeline_bubble.find,
    "tensor-axis": tensor_axis.find,
    "idle-device": idle_device.find,
    "processors": processors.find,
    "device-clocks": device_clocks.find,
    "swap": swap.find,
    "uneven-ranks": uneven_ranks.find,
    "small-micro-batch": small_micro_batch.find,
    "recompute": recompute.find,
    "compilation": compilation.find,
    "saves": saves.find,
    "snapshots": snapshots.find,
    "evaluation": evaluation.find,
    "garbage-collection": garbage_collection.find,
    "user-code": user_code.find,
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    """Worst first."""
    failed_rules: tuple[str, ...] = ()
    """Rules that raised, each with its error."""
    missing: tuple[str, ...] = ()
    """What the run did not record, so that nothing could be said of it."""


def diagnose(facts: RunFacts, own_rules: Mapping[str, Rule] | None = None) -> Diagnosis:
    """``own_rules``: rules of the user, by name, beside the built-in ones."""
    found: list[Finding] = []
    failed: list[str] = []
    for name, rule in {**RULES, **(own_rules or {})}.items():
        try:
            found += rule(facts)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return Diagnosis(_ranked(found), tuple(failed), tuple(_missing(facts)))


def _ranked(found: Sequence[Finding]) -> tuple[Finding, ...]:
    redundant = frozenset[str]().union(*(one.explains for one in found))
    kept = (one for one in found if one.cause not in redundant)
    return tuple(sorted(kept, key=lambda one: (not one.is_error, -one.gain)))


def _missing(facts: RunFacts) -> list[str]:
    if not facts.times:
        return ["no rank recorded where the time of its steps went"]
    if facts.num_steps < LEAST_STEPS:
        counted = pluralize(facts.num_steps, "step")
        return [f"how fast it is: only {counted} can be counted (the first of each process cannot), too few to judge"]
    missing = []
    if (unread := facts.started.world_size - len(facts.times)) > 0:
        missing.append(f"{unread} of {facts.started.world_size} ranks were not read")
    if facts.nccl is None and not facts.is_cpu and facts.started.world_size > 1:
        missing.append("which transports NCCL uses: with NCCL_DEBUG=INFO it prints them")
    return missing
