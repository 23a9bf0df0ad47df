"""Which parameters had no gradient on any rank: packed counters, what is skipped, what is said about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from closeranks.core.events import Event, StepDone, Warned
from closeranks.elastic.vote import Ballot, Verdict, Vote
from closeranks.parallel.process_group import RankGroup
from closeranks.run.components.component import Component
from closeranks.run.components.unused_parameters import SkippedUpdates, UnusedParameters, unused_warning
from closeranks.run.step.step_results import StepResult
from tests.run.small import open_session

CPU = torch.device("cpu")


def usage(names: str, held: str, *, voters: int = 2, can_gate: bool = True, num_steps: int = 100) -> UnusedParameters:
    kwargs = {"num_voters": voters, "num_ranks": voters, "device": CPU, "can_gate": can_gate, "num_steps": num_steps}
    return UnusedParameters(list(names), list(held), absent=tuple, **kwargs)


def verdict(sums: torch.Tensor) -> Verdict:
    zero = torch.zeros((), dtype=torch.float64)
    vote = Vote(RankGroup(0, 1), (), clip=0.0)
    return vote.cast(Ballot(zero, zero + 1, zero, {}, extra={"usage": sums}), torch.ones(()))


def test_a_parameter_is_left_where_no_rank_had_a_gradient_for_it() -> None:
    """Rank 0 holds all, rank 1 a pipeline stage of them."""
    first, second = usage("abcd", "abcd"), usage("abcd", "cd")
    summed = verdict(first.ballot_counts({"a", "c", "d"}).clone() + second.ballot_counts({"d"}))
    assert set(first.skipped_updates(summed).names) == {"a", "d"}
    assert set(second.skipped_updates(summed).names) == {"d"}
    gates = first._gates(summed.extra["usage"][1:])
    assert {name: flag.item() for name, flag in gates.items()} == {"a": 0.0, "c": 1.0, "d": 0.0}


def test_where_all_have_gradients_nothing_is_made_or_read() -> None:
    full = usage("abc", "abc")
    votes = full.ballot_counts(())
    assert full.ballot_counts(set()) is votes
    assert full.skipped_updates(verdict(votes)) == ((), None)
    lacking = full.ballot_counts({"b"})
    assert full.ballot_counts({"b"}) is lacking
    assert full.ballot_counts(()) is not lacking


class Tree(SimpleNamespace):
    """A saved state without tensors."""

    def __init__(self, tree: Any) -> None:
        super().__init__(tree=tree)


def settle(counted: UnusedParameters, absent: list[str], *, first: int = 1) -> list[Warned]:
    told: list[Event] = []
    for number, names in enumerate(absent, start=first):
        sums = verdict(counted.ballot_counts(set(names))).read().extra
        counted.settled(StepResult(StepDone(step=number, taken=True), frozenset(), sums), told.append)
    return [event for event in told if isinstance(event, Warned)]


def test_names_what_had_none_early_on_and_again_at_the_end_if_that_changed() -> None:
    steady = settle(usage("abc", "abc", voters=1, num_steps=7), ["c"] * 7)
    assert [event.step for event in steady] == [5]
    changed = settle(usage("abc", "abc", voters=1, num_steps=7), ["bc"] * 6 + ["c"])
    assert [event.step for event in changed] == [5, 7]
    assert "'b' and 'c'" in changed[0].what
    assert "reached 'c' in" in changed[1].what
    assert [event.step for event in settle(usage("abc", "abc", voters=1, num_steps=2), ["c"] * 2)] == [2]
    assert settle(usage("abc", "abc", voters=1, num_steps=7), ["bc"] * 3 + ["a"] * 4) == []


def test_whoever_goes_on_does_not_say_it_again() -> None:
    before = usage("abc", "abc", voters=1, num_steps=20)
    settle(before, ["c"] * 6)
    after = usage("abc", "abc", voters=1, num_steps=20)
    after.restore(Tree(before.tree()))
    assert settle(after, ["c"] * 6, first=7) == []
    full = usage("abc", "abc", voters=1)
    settle(full, ["", ""])
    assert full.tree() == {"usage": {}}


def test_words() -> None:
    assert unused_warning(["a"], 1).startswith("no gradient reached 'a' in the first step, so it was not updated. ")
    assert "reached 'a', 'b', 'c' and 2 more in 5 steps, so they were" in unused_warning(list("abcde"), 5)


class _Operations(TorchDispatchMode):
    """Names every operation that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Unasked(UnusedParameters):
    """As if nobody had asked for gradients."""

    def before_vote(self, index: int, ballot: Ballot) -> None:
        return None

    def skips(self, verdict: object) -> SkippedUpdates:
        return SkippedUpdates()

    def settled(self, *args: object) -> None:
        return None


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_where_all_have_gradients_a_step_takes_the_same_operations(tmp_path: Path, rule: str) -> None:
    def operations(name: str, *, asks: bool) -> list[str]:
        session = open_session(tmp_path / name, optim={"name": rule}, checkpoint={"save": False})
        if not asks:
            session.engine.components.get(UnusedParameters).__class__ = _Unasked
            session.engine.components.add(Component())  # looks at all of them anew
        seen = _Operations()
        for step in session:
            step.run()
            with seen:
                verdict = step.commit()
            step.commit = lambda requests: verdict  # type: ignore[method-assign]  # noqa: B023
        return seen.names

    asked = operations("asked", asks=True)
    assert asked == operations("unasked", asks=False)
    assert len(asked) > 20
