"""Merges a job file, values from Python and the command line into one validated job.

Order: defaults < file < Python < command line. Invariant: the result is either a frozen job in which every value knows
its origin, or one ``ConfigError`` with all problems at once; nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from closeranks.core.config.job_file import read_job_file
from closeranks.core.config.merge import ConfigTree
from closeranks.core.config.origin import COMMAND_LINE, DEFAULT, PYTHON, ValueOrigin
from closeranks.core.config.overrides import Override, parse_overrides
from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.parser import JobText
from closeranks.core.config.toml.writer import dotted_key
from closeranks.core.config.validation.partial_checks import run_partial_checks, without_follow_on_problems
from closeranks.core.config.validation.problems import problems_of
from closeranks.core.config.values import config_values
from closeranks.core.errors import ConfigError, Problem, UserError

T = TypeVar("T", bound=ConfigTable)
Check = Callable[[T], Iterable[Problem]]


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[T]):
    """A job, the origin of each of its values (by dotted key), and its file."""

    value: T
    origins: Mapping[str, ValueOrigin]
    path: Path | None = None


def load(
    model: type[T],
    path: Path | None,
    overrides: Sequence[str],
    *,
    extra: Mapping[str, Any] | None = None,
    checks: Sequence[Check[T]] = (),
) -> LoadedConfig[T]:
    """Read, merge and validate a job. ``checks`` span several tables and run on whichever tables are valid."""
    try:
        return _load(model, path, overrides, extra or {}, checks)
    except RecursionError:
        what, fix = "it nests tables or arrays too deeply", "No key of a job needs more than a few levels."
        raise ConfigError([Problem(str(path or "job"), what, fix)]) from None


def _load(
    model: type[T], path: Path | None, overrides: Sequence[str], extra: Mapping[str, Any], checks: Sequence[Check[T]]
) -> LoadedConfig[T]:
    job = read_job_file(path) if path is not None else JobText("")
    settings, bad_overrides = parse_overrides(model, overrides)
    problems = [*job.problems, *bad_overrides]
    tree = _tree(job, extra)
    problems += _apply(tree, settings)
    if not job.is_whole:
        raise ConfigError(_in_order(problems))
    value, invalid = _validate(model, tree)
    problems += without_follow_on_problems(model, invalid, broken={problem.place for problem in job.problems})
    is_sound = value is not None and not problems
    found = _run_checks(checks, value) if is_sound else run_partial_checks(model, tree.values, checks, problems)
    problems += [_with_origin(problem, tree) for problem in found]
    if problems or value is None:
        raise ConfigError(_in_order(problems))
    origins = {leaf.place: tree.origins.get(leaf.place, DEFAULT) for leaf in config_values(value)}
    return LoadedConfig(value, origins, path)


def _tree(job: JobText, extra: Mapping[str, Any]) -> ConfigTree:
    lines = {place: ValueOrigin("file", f"{job.name}:{line}") for place, line in job.lines.items()}
    tree = ConfigTree(lines=lines)
    tree.add(job.values, lambda place: _line_near(place, lines, job.name))
    tree.add(extra, lambda place: PYTHON)
    return tree


def _line_near(place: str, lines: Mapping[str, ValueOrigin], name: str) -> ValueOrigin:
    """The line of a key, or of the enclosing inline table or array."""
    while place:
        if place in lines:
            return lines[place]
        place = place.rpartition(".")[0]
    return ValueOrigin("file", name)


def _apply(tree: ConfigTree, settings: Sequence[Override]) -> list[Problem]:
    problems = []
    for setting in settings:
        try:
            if setting.is_unset:
                tree.unset(setting.parts)
            else:
                tree.set(setting.parts, setting.value, COMMAND_LINE)
        except UserError as error:
            problems.append(Problem(dotted_key(setting.parts), error.what, error.fix, str(COMMAND_LINE)))
    return problems


def _validate(model: type[T], tree: ConfigTree) -> tuple[T | None, list[Problem]]:
    try:
        return model.model_validate(tree.values), []
    except ValidationError as error:
        return None, problems_of(model, error.errors(include_url=False), tree)


def _run_checks(checks: Sequence[Check[T]], value: T | None) -> list[Problem]:
    return [problem for check in checks for problem in check(value)] if value is not None else []


def _with_origin(problem: Problem, tree: ConfigTree) -> Problem:
    return problem if problem.origin else replace(problem, origin=str(tree.origin_near(problem.place) or ""))


def _in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Problems of the file first, by line; then the rest in the order they were found."""
    return sorted(dict.fromkeys(problems), key=_line_of)


def _line_of(problem: Problem) -> float:
    _, colon, line = problem.origin.rpartition(":")
    return int(line) if colon and line.isdecimal() else float("inf")
