"""Runs checks across tables while some of the tables are invalid.

Invariant: a check sees only tables that validated; one that accesses an invalid table is skipped, and no other error of
a check is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from closeranks.core.config.table import ConfigTable
from closeranks.core.config.toml.scanner import split_key
from closeranks.core.config.validation.schema_tree import node_at
from closeranks.core.errors import Problem

T = TypeVar("T", bound=ConfigTable)


def run_partial_checks(
    model: type[T],
    values: Mapping[str, Any],
    checks: Sequence[Callable[[T], Iterable[Problem]]],
    problems: Iterable[Problem],
) -> list[Problem]:
    """The problems found by the checks that need none of the invalid tables."""
    if not checks:
        return []
    broken = {problem.place.partition(".")[0] for problem in problems}
    job = _valid_part(model, values, broken)
    found: list[Problem] = []
    for check in checks:
        try:
            found += check(job)
        except AttributeError as error:
            if error.obj is not job:
                raise
    return found


def without_follow_on_problems(
    model: type[ConfigTable], problems: Iterable[Problem], broken: set[str]
) -> list[Problem]:
    """Drop problems that merely follow from skipped lines that were not valid TOML.

    A key on such a line is not missing, its table as a whole cannot be judged, and if the key selects the kind of a
    table, nothing can be said about the other keys.
    """
    vague = {place for place in broken if _chooses_kind(model, place)}
    tables = {place.rpartition(".")[0] for place in vague}
    return [
        problem
        for problem in problems
        if problem.place not in broken
        and not any(place.startswith(f"{problem.place}.") for place in broken)
        and not any(problem.place.startswith(f"{table}.") for table in tables)
    ]


def _chooses_kind(model: type[ConfigTable], place: str) -> bool:
    *around, key = split_key(place) or ("",)
    owner = node_at(model, tuple(around))
    return len(owner.tables) > 1 and key == owner.tag_key


def _valid_part(model: type[T], values: Mapping[str, Any], broken: set[str]) -> T:
    """A job without its invalid tables: accessing one of those is an AttributeError on the job itself."""
    valid: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in broken:
            continue
        try:
            if name in values:
                adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
                valid[name] = adapter.validate_python(values[name])
            elif not field.is_required():
                valid[name] = field.get_default(call_default_factory=True, validated_data=valid)
        except ValidationError:
            continue
    job = model.model_construct(**valid)
    for name in set(model.model_fields) - set(valid):
        vars(job).pop(name, None)
    return job
