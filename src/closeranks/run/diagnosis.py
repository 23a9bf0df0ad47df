"""Reads what the doctor needs to know of a run from its folder. Starts without torch.

Invariant: a file that is truncated or damaged costs what it held, never the diagnosis: readers skip such lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from closeranks.core.events import Event, Resources, Warned
from closeranks.core.system.regular_file import open_binary
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.diagnosis_text import findings_markdown
from closeranks.doctor.nccl_log import NcclLog, parse_nccl_log
from closeranks.doctor.run_facts import RunFacts, collect_facts
from closeranks.telemetry.run_log.phase_history import PhaseHistory, load_phases
from closeranks.telemetry.run_log.resource_history import ResourceHistory, load_resources
from closeranks.telemetry.run_log.run_folder import ResolvedSettings, RunFolder
from closeranks.telemetry.run_log.run_history import RunHistory, load_history
from closeranks.telemetry.traces.device_use import device_busy_s

_LOGS_READ = 64
_LOG_BYTES = 4 << 20
"""Of each log, from its beginning: NCCL prints how it is connected when a run starts."""


def load_facts(folder: Path) -> RunFacts:
    """The facts of a run that has ended or still goes on."""
    run = RunFolder(folder)
    history, phases, resources = load_history(folder), load_phases(folder), load_resources(folder)
    nccl = parse_nccl_log(_first_lines(run.worker_logs()[:_LOGS_READ]))
    return _facts(run.resolved(), history, phases, resources, device_busy_s(folder), nccl)


def findings_section(
    settings: ResolvedSettings, history: RunHistory, phases: PhaseHistory, resources: ResourceHistory
) -> str:
    """The findings about a run, as a section of its report; empty if there are none."""
    facts = _facts(settings, history, phases, resources)
    return findings_markdown(facts, diagnose(facts))


def _facts(
    settings: ResolvedSettings,
    history: RunHistory,
    phases: PhaseHistory,
    resources: ResourceHistory,
    idle: Mapping[int, float] | None = None,
    nccl: NcclLog | None = None,
) -> RunFacts:
    used: dict[int, list[Resources]] = {}
    for record in resources.records:
        used.setdefault(record.rank, []).append(record.used)
    steps, events = history.steps, _events(history)
    facts = collect_facts(settings.values, steps, phases.steps, history.first_steps, events, used, idle, nccl)
    unset = () if settings.values else ("config.json is missing or damaged: the settings of the run are not known",)
    return replace(facts, notes=(*history.notes, *phases.gaps(len(history.starts)), *unset))


def _first_lines(paths: Iterable[Path]) -> Iterator[str]:
    """A log that cannot be read has none."""
    for path in paths:
        with suppress(OSError), open_binary(path) as file:
            yield from file.read(_LOG_BYTES).decode(errors="replace").splitlines()


def _events(history: RunHistory) -> Iterator[Event]:
    yield from (start.started for start in history.starts)
    yield from history.evals
    yield from history.saves
    yield from (fault.lost for fault in history.fault_history.faults)
    yield from (timed.event for timed in history.fault_history.others if timed.event is not None)
    yield from (Warned(warning.what, warning.first_step) for warning in history.warnings)
