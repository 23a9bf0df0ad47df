"""Did the advice help? Compares a run with one whose settings follow it. Pure.

Speed is compared by items (tokens or samples) per second, so that a run with another batch size can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from closeranks.doctor.finding import Finding
from closeranks.doctor.run_facts import RunFacts

_IGNORED = frozenset({"run.folder", "run.name", "train.steps", "train.epochs"})


@dataclass(frozen=True, slots=True)
class FollowedAdvice:
    """A finding of the first run, and what became of it in the second."""

    finding: Finding
    is_followed: bool
    """Whether the second run changed what the finding says; findings without settings count as not followed."""
    is_gone: bool


@dataclass(frozen=True, slots=True)
class RunComparison:
    changed: tuple[str, ...]
    """Settings that differ: ``data.workers: 0 -> 2``."""
    advice: tuple[FollowedAdvice, ...]
    new: tuple[Finding, ...]
    """Found in the second run alone."""
    expected: float
    """Times as fast, by the gains of the advice that was followed; 1 if none was."""
    measured: float | None
    """Times as fast as the first run; None if one of them has no counted step."""


def compare_runs(
    before: RunFacts, after: RunFacts, found_before: Sequence[Finding], found_after: Sequence[Finding]
) -> RunComparison:
    old, new = _flat(before.settings), _flat(after.settings)
    changed = [key for key in sorted({*old, *new} - _IGNORED) if old.get(key) != new.get(key)]
    still = {finding.cause for finding in found_after}
    advice = tuple(
        FollowedAdvice(finding, any(change.key in changed for change in finding.changes), finding.cause not in still)
        for finding in found_before
    )
    left = 1.0
    for one in advice:
        left -= one.finding.gain if one.is_followed else 0.0
    known = {finding.cause for finding in found_before}
    return RunComparison(
        tuple(f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed),
        advice,
        tuple(finding for finding in found_after if finding.cause not in known),
        1 / max(left, 0.01),
        _speedup(before, after),
    )


def _speedup(before: RunFacts, after: RunFacts) -> float | None:
    first, second = _items_per_s(before), _items_per_s(after)
    return second / first if first and second else None


def _items_per_s(facts: RunFacts) -> float:
    taken = [step for step in facts.steps if step.taken]
    return sum(step.items for step in taken) / len(facts.steps) / facts.step_s if facts.steps and facts.step_s else 0.0


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def comparison_text(names: tuple[str, str], compared: RunComparison) -> str:
    return "\n".join(_comparison_lines(names, compared))


def _comparison_lines(names: tuple[str, str], compared: RunComparison) -> Iterator[str]:
    first, second = names
    if compared.measured is None:
        yield f"{second} beside {first}: too few steps to compare their speed"
    else:
        yield f"{second} is {compared.measured:.2f} times as fast as {first}"
    if compared.expected > 1:
        yield f"   expected {compared.expected:.2f} times, by the findings whose advice was followed"
    yield from (f"   changed   {line}" for line in compared.changed)
    for one in compared.advice:
        outcome = "gone" if one.is_gone else "still there"
        followed = "advice followed" if one.is_followed else "advice not followed"
        yield f"   {outcome:<12}{one.finding.cause} ({followed})"
    yield from (f"   {'new':<12}{finding.cause}: {finding.what}" for finding in compared.new)
