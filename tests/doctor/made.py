"""Facts of runs that never ran: steps whose phases are given, for the tests of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.core.events import Event, Resources, RunStarted, StepDone, StepPhases
from closeranks.doctor.nccl_log import parse_nccl_log
from closeranks.doctor.run_facts import RunFacts, collect_facts

BASE = {"forward": 0.03, "backward": 0.06, "optimizer": 0.005, "vote": 0.002, "other": 0.003}
"""The phases of a healthy step of 100 ms."""
NUM = 20


def facts(
    *ranks: Mapping[str, float] | Sequence[Mapping[str, float]],
    settings: Mapping[str, Any] | None = None,
    done: Mapping[str, Any] | None = None,
    started: Mapping[str, Any] | None = None,
    events: Sequence[Event] = (),
    used: Mapping[int, Resources] | None = None,
    busy: Mapping[int, float] | None = None,
    nccl: str = "",
) -> RunFacts:
    """``ranks``: for each, the phases that differ from ``BASE`` in every step, or in each of the steps. ``used``: what
    each rank used, in two intervals alike. ``nccl``: what NCCL printed."""
    rows = [list(rank) if isinstance(rank, Sequence) else [rank] * NUM for rank in ranks or ({},)]
    times = {rank: {step: _phases(step, extra) for step, extra in enumerate(own, 2)} for rank, own in enumerate(rows)}
    steps = [StepDone(step=step, loss=2.0, items=64, grad_norm=1.0, **(done or {})) for step in times[0]]
    usual = {"world_size": len(rows), "device": "Test CPU", "global_batch": 32, "micro_batch": 4}
    about = RunStarted(**{**usual, **(started or {})})
    resources = {rank: [one, one] for rank, one in (used or {}).items()}
    log = parse_nccl_log(nccl.splitlines())
    return collect_facts(
        settings or {}, steps, times, events=[about, *events], resources=resources, device_busy_s=busy, nccl=log
    )


def _phases(step: int, extra: Mapping[str, float]) -> StepPhases:
    phases = {**BASE, **extra}
    return StepPhases(step, sum(phases.values()), phases)


def even(phases: Mapping[str, float], num_ranks: int = 2) -> list[Mapping[str, float]]:
    return [phases] * num_ranks
