"""What do TraceML and ``closeranks doctor`` say about the same planted cause?

The same data, model and cause, once in a plain loop with TraceML and once as a job of closeranks: those causes of
``doctor.py`` that a plain loop can have. A tool names the cause if that is its first finding; "later" means among its
others, since on a busy machine something else may weigh more. TraceML names the place if its finding holds of the cause
and of others, too: ``RESIDUAL_HEAVY`` is all that is neither data nor computing.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from doctor_causes import OWN, PLANTED, Planted
from results import say
from telemetry_peers_lane import send_signal, start, tail

from closeranks.core.errors import UserError
from closeranks.doctor.finding import Finding
from doctor import run_job

NUM_STEPS = 60
"""As in ``doctor.toml``; TraceML asks for 20."""
BATCH = 32
_TIMEOUT_S = 240.0
RESIDUAL = ("RESIDUAL_HEAVY",)
INPUT = ("INPUT_BOUND",)
STRAGGLER = ("COMPUTE_STRAGGLER", "STRAGGLER")
SILENT = ("COMPUTE_BOUND", "BALANCED")
"""What TraceML says of a healthy run."""


@dataclass(frozen=True, slots=True)
class PlantedLoop:
    """A cause of ``doctor.PLANTED`` in the plain loop, and the diagnoses of TraceML that name it."""

    name: str
    plan: Mapping[str, Any]
    causes: Sequence[str] = ()
    places: Sequence[str] = ()


LOOPS = (
    PlantedLoop("slow-store", {"data": {"fetch_s": 0.002}}, INPUT),
    PlantedLoop("slow-decode", {"data": {"decode": 60}}, INPUT),
    PlantedLoop("slow-collate", {"collate": "slow_collate"}, INPUT),
    PlantedLoop("slow-rank", {"slow_rank_share": 0.3}, STRAGGLER),
    PlantedLoop("tiny-buckets", {"bucket_mib": 0.002, "hidden": 64, "layers": 60}),
    PlantedLoop("blocking-saves", {"after_step": "save"}, (), RESIDUAL),
    PlantedLoop("garbage", {"after_step": "garbage"}, (), RESIDUAL),
    PlantedLoop("slow-hook", {"after_step": "slow"}, (), RESIDUAL),
    PlantedLoop("uneven-batches", {"unequal": True, "collate": "pad", "shuffle": False}, (), STRAGGLER),
    PlantedLoop("small-micro-batches", {"batch": 64, "micro_batch": 1}),
)
HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class Named:
    """What a tool says of a run: ``found`` is "cause", "later", "place" or "no"."""

    found: str
    kind: str
    words: str
    gain: float | None
    """The share of a step that its advice should save; None if it predicts none."""
    fields: Mapping[str, Any] = field(default_factory=dict)


def our_job(name: str) -> Planted:
    """As in ``doctor.py``, but all with the model and the data that the plain loop has."""
    if name == HEALTHY:
        return Planted(HEALTHY, "", OWN)
    planted = next(one for one in PLANTED if one.name == name)
    return replace(planted, job=OWN)


def find(name: str, seed: int, folder: Path, *, with_peer: bool) -> dict[str, Named]:
    planted = our_job(name)
    loop = next((one for one in LOOPS if one.name == name), PlantedLoop(HEALTHY, {}, SILENT))
    arguments = [*planted.job, *planted.overrides, f"run.seed={seed}"]
    diagnosis = run_job(folder / f"{name}-{seed}", arguments, planted.num_workers, planted.faults)
    found = {"closeranks": judge_ours(planted.cause, diagnosis.findings)}
    if with_peer:
        summary = run_traceml(loop, planted.num_workers, seed, folder / f"{name}-{seed}-traceml")
        found["traceml"] = judge_theirs(loop, summary)
    for tool, named in found.items():
        gain = "" if named.gain is None else f", to gain {named.gain:.0%}"
        say(f"  {name:<20} {tool:<10} {named.found:<6} {named.kind}{gain}: {named.words}")
    return found


def judge_ours(cause: str, findings: Sequence[Finding]) -> Named:
    if not findings:
        return Named("no" if cause else "cause", "nothing", "", None)
    first, *others = findings
    found = "cause" if first.cause == cause else "later" if cause in {one.cause for one in others} else "no"
    return Named(found, first.cause, first.what, first.gain or None)


def judge_theirs(loop: PlantedLoop, summary: Mapping[str, Any]) -> Named:
    """By its diagnoses of the time of a step, in ``final_summary.json``; a straggler counts if the rank is right."""
    first, *others = summary["step_time"]["issues"]
    found = _place_of(loop, first)
    if found == "no" and any(_place_of(loop, other) == "cause" for other in others):
        found = "later"
    words = f"{first.get('summary', '')} {first.get('action', '')}".strip()
    told = {key: first.get(key) for key in ("severity", "share_pct", "score", "ranks")}
    return Named(found, first["kind"], words, predicted_gain(first), told)


def _place_of(loop: PlantedLoop, issue: Mapping[str, Any]) -> str:
    kind = issue["kind"]
    if kind in STRAGGLER and loop.name == "slow-rank" and 1 not in (issue.get("ranks") or ()):
        return "no"
    return "cause" if kind in loop.causes else "place" if kind in loop.places else "no"


def predicted_gain(diagnosis: Mapping[str, Any]) -> float | None:
    """TraceML 0.5 has no such field; one of these names would be it."""
    for key in ("predicted_gain", "expected_gain", "potential_speedup", "savings"):
        if isinstance(diagnosis.get(key), int | float):
            return float(diagnosis[key])
    return None


def run_traceml(loop: PlantedLoop, num_ranks: int, seed: int, folder: Path) -> dict[str, Any]:
    plan = {"closeranks": False, "traceml": True, "socket": "", "num_steps": NUM_STEPS, "seed": seed, "batch": BATCH}
    folder.mkdir()
    log = folder / "log"
    process = start({**plan, **loop.plan}, num_ranks, folder / "lane", log)
    try:
        process.wait(_TIMEOUT_S)
    finally:
        send_signal(process, signal.SIGKILL)  # what is left of it
    path = folder / "lane" / "traceml" / "final_summary.json"
    if not path.is_file():
        raise UserError(f"TraceML wrote no summary of {loop.name}: {tail(log)}", "Run it by hand.")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary
