"""Prints a diagnosis for people, and as values for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from closeranks.doctor.diagnose import Diagnosis
from closeranks.doctor.finding import FAULT, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.nccl_log import nccl_json
from closeranks.doctor.run_facts import RunFacts
from closeranks.facts.layout import pluralize

_WIDTH = 110
_LABEL = 10
_SHOWN = 0.01


def diagnosis_text(name: str, facts: RunFacts, diagnosis: Diagnosis) -> str:
    lines = [_headline(name, facts)]
    lines += _labelled("transport", str(facts.nccl)) if facts.nccl else []
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", *_finding_lines(number, finding, facts)]
    if not diagnosis.findings and facts.num_steps:
        lines += ["", "Nothing found that is worth changing.", *_labelled("time", _shares(facts))]
    lines += ["", *(f"Not known: {what}." for what in diagnosis.missing)] if diagnosis.missing else []
    lines += ["", *(f"Note: {note}." for note in facts.notes)] if facts.notes else []
    lines += [f"A rule failed: {what}" for what in diagnosis.failed_rules]
    return "\n".join(lines)


def _headline(name: str, facts: RunFacts) -> str:
    started = facts.started
    if not facts.num_steps:
        return f"{name}: no step was recorded that could be judged"
    workers = f"{started.world_size} worker{'s' * (started.world_size != 1)}"
    layout = f" ({started.layout})" if started.layout else ""
    items = sum(step.items for step in facts.steps) / max(1, len(facts.steps))
    rate = f", {items / facts.step_s:,.0f} {started.item}s/s" if items and facts.step_s else ""
    return f"{name}: {pluralize(facts.num_steps, 'step')} of {milliseconds(facts.step_s)} on {workers}{layout}{rate}"


def _finding_lines(number: int, finding: Finding, facts: RunFacts) -> Iterator[str]:
    yield f"{number}. {finding.what}  [{finding.cause}]"
    for text in finding.evidence:
        yield from _labelled("seen", text)
    yield from _labelled("advice", finding.advice)
    for change in finding.changes:
        yield from _labelled("change", f"{change}{_now(change)}")
    if finding.gain:
        after = milliseconds(facts.step_s * (1 - finding.gain))
        yield from _labelled("expected", f"{finding.speedup:.2f} times as fast: a step of {after}")


def _now(change: SettingChange) -> str:
    return "" if change.now is None else f"    (now {change.now})"


def _labelled(label: str, text: str) -> Iterator[str]:
    for number, line in enumerate(wrap(text, _WIDTH, break_long_words=False)):
        yield f"   {label if number == 0 else '':<{_LABEL}}{line}"


def _shares(facts: RunFacts) -> str:
    shares = sorted(((facts.share(spent), name) for name, spent in facts.phases.items()), reverse=True)
    return ", ".join(f"{name} {percent(share)}" for share, name in shares if share >= _SHOWN)


def findings_markdown(facts: RunFacts, diagnosis: Diagnosis) -> str:
    """A section for the report of the run, which has another one about faults; empty if nothing was found."""
    shown = [one for one in diagnosis.findings if not one.cause.startswith(FAULT)]
    if not shown:
        return ""
    return "\n".join(["## What holds it back", "", *(_markdown_item(one, facts) for one in shown)])


def _markdown_item(finding: Finding, facts: RunFacts) -> str:
    after = milliseconds(facts.step_s * (1 - finding.gain))
    gain = f"Expected: {finding.speedup:.2f} times as fast, a step of {after}." if finding.gain else ""
    changes = ", ".join(f"`{change}`" for change in finding.changes)
    parts = (f"**{finding.what}**", _sentence(finding.evidence[0]) if finding.evidence else "", finding.advice)
    return "- " + " ".join(part for part in (*parts, f"Change: {changes}." if changes else "", gain) if part)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def diagnosis_json(name: str, facts: RunFacts, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "run": name,
        "num_steps": facts.num_steps,
        "step_s": facts.step_s,
        "nccl": nccl_json(facts.nccl),
        "findings": [_finding_json(finding) for finding in diagnosis.findings],
        "missing": list(diagnosis.missing),
        "notes": list(facts.notes),
        "failed_rules": list(diagnosis.failed_rules),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "what": finding.what,
        "evidence": list(finding.evidence),
        "advice": finding.advice,
        "changes": [{"key": one.key, "value": one.value, "now": one.now} for one in finding.changes],
        "gain": round(finding.gain, 4),
        "speedup": round(finding.speedup, 3),
        "is_error": finding.is_error,
    }
