"""Hostile cases as values: which kinds there are, and which case a seed and a number stand for.

A kind is a function with the choices of its parameters, registered by ``@kind``. Drawing is pure: ``draw(seed, index)``
is the same case in every process, and a case prints as the command that repeats it. Kinds take turns in an order that
the seed shuffles anew each round, so that a campaign of any length holds nearly as many of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Choice = Callable[[random.Random], Any]
COMBINED = "two at once"
NUM_COMBINED = 4
"""Slots of a round that combine two kinds."""
STEPS = 30
"""Of every run of the campaign."""


def one_of(*values: Any) -> Choice:
    return lambda rng: rng.choice(values)


def between(first: int, last: int) -> Choice:
    return lambda rng: rng.randint(first, last)


def seconds(longest: float) -> Choice:
    """Short spans are as likely as long ones: most of what can go wrong lies close together."""
    return lambda rng: round(longest * rng.random() ** 3, 3)


def step(first: int = 3, last: int = STEPS - 10) -> Choice:
    return between(first, last)


@dataclass(frozen=True)
class Kind:
    """One way to be hostile."""

    family: str
    name: str
    act: Callable[..., Any]
    choices: dict[str, Choice]
    is_live: bool
    """It disturbs a run that trains; else it does all by itself."""
    combines: bool = True
    """It means the same while the run is disturbed in another way."""
    shapes: tuple[str, ...] = ()
    needs: Callable[[], str] = field(default=lambda: "")
    """Why it is not possible on this machine; empty where it is."""


KINDS: dict[str, Kind] = {}


def kind(
    family: str,
    *,
    is_live: bool = True,
    combines: bool = True,
    shapes: Sequence[str] = ("pair", "zero3"),
    needs: Callable[[], str] = lambda: "",
    **choices: Choice,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a kind, under its own name. Parameters are drawn from ``choices`` in their order.

    A live kind is a generator: before its first ``yield`` it prepares the run, after it the run is under way, and after
    a second one it is over. Another kind is a plain function of the lab that does and checks everything itself.
    """

    def register(act: Callable[..., Any]) -> Callable[..., Any]:
        name = act.__name__.replace("_", " ")
        KINDS[name] = Kind(family, name, act, choices, is_live, combines and is_live, tuple(shapes), needs)
        return act

    return register


@dataclass(frozen=True)
class Blow:
    """A kind with its parameters."""

    kind: str
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"


@dataclass(frozen=True)
class Case:
    seed: int
    index: int
    shape: str
    """How the run is spread over workers."""
    blows: tuple[Blow, ...]

    @property
    def kind(self) -> str:
        return self.blows[0].kind if len(self.blows) == 1 else COMBINED

    @property
    def family(self) -> str:
        return KINDS[self.kind].family if len(self.blows) == 1 else COMBINED

    @property
    def command(self) -> str:
        return f"make hostile SEED={self.seed} CASE={self.index}"

    def __str__(self) -> str:
        return f"{self.shape}: {' + '.join(map(str, self.blows))}"


def draw(seed: int, index: int) -> Case:
    names = [*sorted(KINDS), *[COMBINED] * NUM_COMBINED]
    number, place = divmod(index, len(names))
    random.Random(f"{seed} round {number}").shuffle(names)
    rng = random.Random(f"{seed} case {index}")
    chosen = [names[place]]
    if chosen == [COMBINED]:
        chosen = rng.sample(sorted(name for name, one in KINDS.items() if one.combines), 2)
    shapes = [shape for shape in KINDS[chosen[0]].shapes if all(shape in KINDS[name].shapes for name in chosen)]
    shape = rng.choice(shapes)
    return Case(seed, index, shape, tuple(_blow(KINDS[name], rng) for name in chosen))


def _blow(one: Kind, rng: random.Random) -> Blow:
    return Blow(one.name, {name: choose(rng) for name, choose in one.choices.items()})


def reduced(seed: int, count: int) -> list[Case]:
    """The first case of every family, then the first of every other kind, up to ``count``: what CI has time for."""
    cases = [draw(seed, index) for index in range(2 * (len(KINDS) + NUM_COMBINED))]
    first = {case.family: case for case in reversed(cases)}
    others = {case.kind: case for case in reversed(cases) if case not in first.values()}
    return [*sorted(first.values(), key=lambda case: case.index), *others.values()][:count]
