"""Assigns parameters to optimizer groups that share learning rate and weight decay.

A pure function of names and shapes. Invariant: every parameter is frozen or in exactly one group, however often it is
tied; a pattern that has no effect is an error, since it is probably misspelt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.registry import did_you_mean
from closeranks.optim.config import GroupConfig, OptimConfig

_UNDECAYED = re.compile(r"(^|[._])bias$|norm\d*\.[^.]+$")


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The facts about a parameter that grouping needs; ``aliases`` are the other names of a tied one."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    def matches(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in (self.name, *self.aliases))

    @property
    def decays(self) -> bool:
        """Whether weight decay applies. It pulls weights to zero: right for matrices, wrong for scales and offsets."""
        return len(self.shape) >= 2 and not _UNDECAYED.search(self.name)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share learning rate and weight decay."""

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    groups: tuple[ParameterGroup, ...]
    frozen: tuple[str, ...]


def assign(parameters: Sequence[ParameterFacts], config: OptimConfig) -> GroupAssignment:
    """Group the parameters. The first matching pattern decides; few groups mean few kernel launches."""
    taken = [_first_match(facts, config.groups) for facts in parameters]
    problems = _ineffective(parameters, config.groups, taken)
    if problems:
        raise ConfigError(problems)
    members: dict[tuple[float, float], list[str]] = {}
    frozen: list[str] = []
    for facts, number in zip(parameters, taken, strict=True):
        group = config.groups[number] if number is not None else None
        if group is not None and group.frozen:
            frozen.append(facts.name)
        else:
            members.setdefault(_treatment(facts, group, config), []).append(facts.name)
    groups = (ParameterGroup(tuple(names), scale, decay) for (scale, decay), names in members.items())
    return GroupAssignment(tuple(groups), tuple(frozen))


def _treatment(facts: ParameterFacts, group: GroupConfig | None, config: OptimConfig) -> tuple[float, float]:
    """(lr_scale, weight_decay) of a parameter that is trained."""
    usual = config.weight_decay if facts.decays else 0.0
    if group is None:
        return 1.0, usual
    return group.lr_scale, usual if group.weight_decay is None else group.weight_decay


def _first_match(facts: ParameterFacts, groups: Sequence[GroupConfig]) -> int | None:
    return next((number for number, group in enumerate(groups) if facts.matches(group.pattern)), None)


def _ineffective(
    parameters: Sequence[ParameterFacts], groups: Sequence[GroupConfig], taken: Sequence[int | None]
) -> list[Problem]:
    problems = []
    for number, group in enumerate(groups):
        place = f"optim.groups.{number}.pattern"
        if not any(facts.matches(group.pattern) for facts in parameters):
            names = (name for facts in parameters for name in (facts.name, *facts.aliases))
            problems.append(Problem(place, f"'{group.pattern}' matches no parameter", _nearest(group.pattern, names)))
        elif number not in taken:
            what = f"'{group.pattern}' matches only parameters that earlier patterns take"
            problems.append(Problem(place, what, "Put the narrower pattern first."))
    return problems


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """The nearest name; where none is near, a few examples of names, not all of hundreds."""
    known = list(names)
    hint = did_you_mean(pattern, known)
    if hint.startswith("Did") or len(known) <= 8:
        return hint
    return f"Names are like {', '.join(known[:4])}, ..., {known[-1]}."
