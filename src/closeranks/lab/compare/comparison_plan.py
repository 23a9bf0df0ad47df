"""Decides which runs a comparison consists of, and checks that each is possible.

Invariants: every setting's job is loaded and checked before the first run starts; all runs of a comparison have the
same seeds and the same budget, which no setting may change; a run that would come out the same has the same key, so
that it is found again. Settings are interleaved, and every other round is in reverse order, so that a machine that
becomes slower affects all of them alike. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from closeranks import __version__
from closeranks.core.config.origin import COMMAND_LINE
from closeranks.core.config.overrides import Override, parse_overrides
from closeranks.core.config.toml.writer import Parts, dotted_key, format_value
from closeranks.core.errors import ConfigError, Problem, UserError
from closeranks.elastic.faults.fault import check_faults
from closeranks.elastic.faults.grammar import ParsedFaults, parse_faults
from closeranks.lab.compare.config import Changes, CompareConfig, ComparisonCondition, ComparisonSetting, as_user_error
from closeranks.run.job.job import Job, check_workers, load_job
from closeranks.run.job.launch import num_workers_for

DEFAULT_OVERRIDES = ("checkpoint.save=false", "telemetry.report=false", "elastic.second_copies=off")
"""A comparison needs none of these; a setting that measures one turns it on. By default, second copies would be sent
over the network under some settings and not under others."""
_RESERVED = {
    "run.seed": "It has its own seeds: write seeds = [0, 1, 2].",
    "run.folder": "Each run gets a folder of its own: write folder at the top for all of them.",
    "train.steps": "All settings have one budget: write [budget] steps.",
    "train.epochs": "All settings have one budget: write [budget] epochs.",
}
_RANK_FROM_THE_END = re.compile(r"\b(rank|other)\s*=\s*-\s*(\d+)")


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One setting under one condition, ready to run."""

    name: str
    overrides: tuple[str, ...]
    """All overrides on the command line of a run, except its seed and folder."""
    num_workers: int
    job: Job
    condition: ComparisonCondition
    faults: ParsedFaults
    """Those of the condition, with the ranks of this setting."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.condition.name}" if self.condition.name else self.name


@dataclass(frozen=True, slots=True)
class ComparisonRun:
    case: ComparisonCase
    seed: int
    repeat: int
    key: str
    """A short digest of everything that identifies the run."""

    @property
    def name(self) -> str:
        again = f"-{self.repeat + 1}" if self.repeat else ""
        slug = re.sub(r"[^\w.]+", "-", self.case.label).strip("-.") or "setting"
        return f"{slug}-seed{self.seed}{again}-{self.key}"


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    compare: CompareConfig
    job_file: Path
    cases: tuple[ComparisonCase, ...]
    runs: tuple[ComparisonRun, ...]
    """In the order in which they run."""
    folder: Path


def make_plan(compare: CompareConfig, path: Path) -> ComparisonPlan:
    """Refuses everything that can be refused before hours are spent on the first run."""
    job_file = find_job(compare.job, path)
    cases = tuple(
        _case(compare, setting, condition, job_file) for condition in compare.conditions for setting in compare.setting
    )
    folder = Path(compare.folder or Path("runs") / f"compare-{path.stem}").expanduser()
    return ComparisonPlan(compare, job_file, cases, tuple(_interleaved(compare, cases)), folder)


def find_job(name: str, beside: Path) -> Path:
    candidates = [beside.parent / name, Path(name)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    shown = " nor at ".join(dict.fromkeys(str(candidate) for candidate in candidates))
    raise UserError(f"there is no job file at {shown}", f"Set job in {beside.name} to the file to train.")


def override_texts(changes: Changes) -> list[str]:
    """Changes in the form of overrides on the command line."""
    if not isinstance(changes, Mapping):
        return list(changes)
    return [f"{dotted_key(parts)}={format_value(value)}" for parts, value in _leaves(changes, ())]


def _leaves(values: Mapping[str, Any], parts: Parts) -> Iterator[tuple[Parts, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*parts, key))
        else:
            yield (*parts, key), value


def _case(
    compare: CompareConfig, setting: ComparisonSetting, condition: ComparisonCondition, job_file: Path
) -> ComparisonCase:
    where = f"setting '{setting.name}'"
    own = [*override_texts(compare.set), *override_texts(setting.set)]
    overrides = (*DEFAULT_OVERRIDES, *own, *_budget(compare))
    try:
        if problems := list(_reserved_problems(own)):
            raise ConfigError(problems)
        job = load_job(job_file, overrides).value
        num_workers = _workers(compare, setting, condition, job)
        if problems := check_workers(job, num_workers):
            raise ConfigError(problems)
    except ConfigError as error:
        raise as_user_error(ConfigError([_without_origin(problem) for problem in error.problems]), where) from None
    faults = _faults(condition, setting.name, num_workers, job.train.steps)
    return ComparisonCase(setting.name, overrides, num_workers, job, condition, faults)


def _faults(condition: ComparisonCondition, setting: str, num_workers: int, num_steps: int | None) -> ParsedFaults:
    """The faults of a condition for a setting with so many workers; whatever cannot be injected is refused."""
    if not condition.faults.strip():
        return ParsedFaults()
    place = f"condition '{condition.name}', setting '{setting}'"
    text = _RANK_FROM_THE_END.sub(lambda found: f"{found[1]}={num_workers - int(found[2])}", condition.faults)
    try:
        found = parse_faults(text)
        check_faults(found.faults, num_workers, num_steps)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    if found.kinds:
        raise UserError(f"{place}: `{found.kinds[0]}` does not say when", f"Write {found.kinds[0]}(rank=-1, step=20).")
    num_here = num_workers // (condition.network.hosts if condition.network else 1)
    for fault in found.faults:
        if far := [rank for rank in fault.victims if rank >= num_here]:
            what = f"{place}: {fault} cannot be injected, because rank {far[0]} is not on the first host"
            raise UserError(what, f"Ranks 0 to {num_here - 1} are; or remove the condition's network.")
    return found


def _without_origin(problem: Problem) -> Problem:
    """Without "command line" as its origin: a setting is parsed like the command line, but was not typed there."""
    return replace(problem, origin="") if problem.origin == str(COMMAND_LINE) else problem


def _workers(compare: CompareConfig, setting: ComparisonSetting, condition: ComparisonCondition, job: Job) -> int:
    wanted = setting.workers or compare.workers
    if condition.network is not None:
        return wanted or condition.network.hosts
    return num_workers_for(job, wanted)


def _budget(compare: CompareConfig) -> list[str]:
    budget = compare.budget
    given = {"train.steps": budget.steps, "train.epochs": budget.epochs}
    return [f"{key}={format_value(value)}" for key, value in given.items() if value is not None]


def _reserved_problems(overrides: Sequence[str]) -> Iterator[Problem]:
    """Problems for values that a setting may not change, since the runs could not be compared."""
    known: list[Override] = parse_overrides(Job, overrides)[0]
    for override in known:
        for parts in _set_by(override):
            if (key := dotted_key(parts)) in _RESERVED:
                yield Problem(key, "a comparison sets this itself", _RESERVED[key])


def _set_by(override: Override) -> list[Parts]:
    """The keys that an override sets, also if it gives a whole table: ``train={steps=5}``."""
    if not isinstance(override.value, Mapping):
        return [override.parts]
    return [parts for parts, _ in _leaves(override.value, override.parts)]


def _interleaved(compare: CompareConfig, cases: Sequence[ComparisonCase]) -> Iterator[ComparisonRun]:
    rounds = [(seed, repeat) for repeat in range(compare.repeats) for seed in compare.seeds]
    for number, (seed, repeat) in enumerate(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            yield ComparisonRun(case, seed, repeat, _key(compare, case, seed, repeat))


def _key(compare: CompareConfig, case: ComparisonCase, seed: int, repeat: int) -> str:
    job = case.job.model_dump(mode="json")
    job["run"] |= {"seed": seed, "folder": "", "name": ""}
    network = case.condition.network.model_dump() if case.condition.network else None
    identity = [job, case.num_workers, seed, repeat, network, compare.budget.seconds, __version__]
    identity += [str(fault) for fault in case.faults.faults]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
