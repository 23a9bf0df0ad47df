"""Parses a line of faults:

    kill(rank=1, step=3), slow(rank=2, step=5, share=0.1), hang

A bare word requests that kind, at a step and rank that the campaign chooses. Invariant: the printed form of a fault
parses to the same fault, and text that cannot be parsed is answered with one sentence that says where and what to write
instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from closeranks.core.errors import UserError
from closeranks.elastic.faults.fault import DEFAULTS, KINDS, FaultKind, InjectedFault

_FAULT = re.compile(r"\s*([^\s()=,;]+)\s*(?:\(([^()]*)\))?\s*")
_GAP = re.compile(r"[\s,;]*")
_EXAMPLE = "Write it like kill(rank=1, step=3)."


@dataclass(frozen=True, slots=True)
class ParsedFaults:
    """The parsed line of faults."""

    faults: tuple[InjectedFault, ...] = ()
    """Faults with their arguments."""
    kinds: tuple[str, ...] = ()
    """Bare kinds, for which a campaign chooses step and rank; each once."""


def parse_faults(text: str) -> ParsedFaults:
    """Everything the line asks for, in order; an empty line is an error."""
    faults: list[InjectedFault] = []
    kinds: list[str] = []
    place = _after_gap(text, 0)
    while place < len(text):
        found = _FAULT.match(text, place)
        if found is None or text[found.end() : found.end() + 1] not in ("", ",", ";", *_words_ahead(text, found)):
            raise UserError(f"`{text[place:].strip()}` cannot be read as a fault", _EXAMPLE)
        kind = _kind(found[1])
        if found[2] is None:
            kinds.append(kind.name)
        else:
            faults.append(_fault(kind, found[0].strip(), found[2]))
        place = _after_gap(text, found.end())
    if not faults and not kinds:
        raise UserError("no fault is named", f"Kinds are {', '.join(KINDS)}. {_EXAMPLE}")
    return ParsedFaults(tuple(faults), tuple(dict.fromkeys(kinds)))


def _after_gap(text: str, place: int) -> int:
    gap = _GAP.match(text, place)
    return gap.end() if gap else place


def _words_ahead(text: str, found: re.Match[str]) -> Sequence[str]:
    """Blanks separate faults as commas do; the match has already consumed them."""
    return (text[found.end()],) if found[0][-1:].isspace() and found.end() < len(text) else ()


def _kind(name: str) -> FaultKind:
    if name in KINDS:
        return KINDS[name]
    near = get_close_matches(name, KINDS, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}? " if near else ""
    raise UserError(f"there is no fault `{name}`", f"{advice}Kinds are {', '.join(KINDS)}.")


def _fault(kind: FaultKind, text: str, inside: str) -> InjectedFault:
    names = ("step", *kind.takes, "at")
    given: dict[str, int | float] = {}
    for part in [part.strip() for part in inside.split(",") if part.strip()]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in names:
            raise UserError(f"{text}: `{part}` is not an argument of {kind.name}", f"It takes {', '.join(names)}.")
        if name in given:
            raise UserError(f"{text}: {name} is given twice", "Remove one.")
        given[name] = _value(text, name, value)
    if missing := [name for name in names if name not in given and name not in (*DEFAULTS, "at")]:
        raise UserError(f"{text}: {missing[0]} is missing", f"Write {kind.name}({_all(names)}).")
    if "other" in given and given["other"] == given["rank"]:
        raise UserError(f"{text}: rank and other are the same worker", "Name two, or use kill.")
    return InjectedFault(kind.name, **given)  # type: ignore[arg-type]


def _all(names: Sequence[str]) -> str:
    return ", ".join(f"{name}={number}" for number, name in enumerate(names, 1) if name not in (*DEFAULTS, "at"))


_BOUNDS = {"step": 1, "rank": 0, "other": 0, "steps": 1}


def _value(text: str, name: str, value: str) -> int | float:
    if name in _BOUNDS:
        if not re.fullmatch(r"[0-9]{1,12}", value) or int(value) < _BOUNDS[name]:
            raise UserError(f"{text}: {name}={value} is not a whole number from {_BOUNDS[name]} on", _EXAMPLE)
        return int(value)
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if name == "share" and not 0.001 <= number <= 1.0:
        raise UserError(f"{text}: share={value} is not a share of a processor", "Write a number like 0.2, up to 1.")
    if name == "at" and not 0.0 <= number < 1.0:
        raise UserError(f"{text}: at={value} is not a share of a step", "Write a number from 0 to below 1, like 0.5.")
    return number
