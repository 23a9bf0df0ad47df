"""Finds unused parameters: those that no rank had a gradient for in a step, and those that never got one.

[Note: parameters without a gradient] torch's optimizers skip a parameter whose ``.grad`` is None: no decay, no
momentum, and its step count does not advance. With several ranks a parameter is skipped only if no rank had a gradient
for it, so the ranks must agree. Each rank adds to the vote, for every parameter of the model, whether it had a
gradient: a few counters packed into each float64, so that hundreds of parameters are a handful of numbers in a message
that is sent anyway. A parameter that this rank had a gradient for is updated, whatever the others report. For the rest
the sum decides: on the CPU the host reads it, on an accelerator a flag on the device gates the update, and the host
waits only if there are many such parameters.

Invariants: every rank skips the same parameters; if each rank has a gradient for all parameters it holds, a step
performs the same operations on the same bits as without this component.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from closeranks.core.events import Event, Warned
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.facts.packed_counters import PackedCounters
from closeranks.run.components.component import Component
from closeranks.run.state.saved_state import SavedState

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

_NAME = "usage"
_WARN_AFTER = 5
"""Updates before the warning about parameters without a gradient: a branch may be taken in some steps only."""
_MAX_GATES = 16
"""Maximum number of parameters that are updated one by one, each gated by a flag on the device; with more of them the
host waits for the vote."""


class SkippedUpdates(NamedTuple):
    """The parameters that the optimizer skips in a step: by name, or by a flag on the device that is 1 if the parameter
    is updated."""

    names: Collection[str] = ()
    gates: Mapping[str, Tensor] | None = None


class UnusedParameters(Component):
    """The optimizer calls ``skipped_updates`` after the vote."""

    def __init__(
        self,
        names: Sequence[str],
        held: Iterable[str],
        *,
        num_voters: int,
        num_ranks: int,
        device: torch.device,
        can_gate: bool,
        num_steps: int,
        absent: Callable[[], Collection[str]],
    ) -> None:
        """``names``: all trained parameters, in the same order on every rank; ``held``: those of this rank;
        ``num_voters``: ranks whose gradients make one update, of ``num_ranks`` in the run; ``absent``: the parameters
        that this rank had no gradient for, once gradients are complete."""
        self._names, self._held = tuple(names), frozenset(held)
        self._counters = PackedCounters(self._names, num_ranks)
        self._is_alone, self._device, self._can_gate = num_voters == 1, device, can_gate
        self._num_steps, self._absent = num_steps, absent
        self._lacking: frozenset[str] = frozenset()
        """Parameters that this rank had no gradient for when ``_counts`` was made."""
        self._counts = self._make_counts()
        self._where: tuple[Tensor, Tensor] | None = None
        self._never, self._num_taken = set(self._names), 0
        self._num_warned = 0
        """Number of parameters in the last warning of this process."""

    def before_vote(self, index: int, ballot: Ballot) -> None:
        ballot.extra[_NAME] = self.ballot_counts(self._absent())

    def ballot_counts(self, absent: Collection[str]) -> Tensor:
        """1 if this rank lacks any gradient (else 0), then the counters. Made anew only if the set of missing gradients
        has changed."""
        if self._lacking != absent:
            self._lacking = frozenset(absent)
            self._counts = self._make_counts()
            self._where = None
        return self._counts

    def skipped_updates(self, verdict: Verdict) -> SkippedUpdates:
        """Parameters that no rank had a gradient for. No host sync on an accelerator, up to ``_MAX_GATES`` of them."""
        if not self._lacking:
            return SkippedUpdates()
        if self._is_alone:
            return SkippedUpdates(self._lacking)
        if self._device.type == "cpu" or not self._can_gate or len(self._lacking) > _MAX_GATES:
            return SkippedUpdates(self._counters.zero_names(verdict.extra[_NAME][1:].tolist(), self._lacking))
        return SkippedUpdates(gates=self._gates(verdict.extra[_NAME][1:]))

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        """Warns about parameters that never got a gradient, early in the run and at its end."""
        done, sums = entry.done, entry.extra[_NAME]
        if not done.taken:
            return
        self._num_taken += 1
        if self._never:
            self._never = self._counters.zero_names(sums[1:], self._never) if sums[0] else set()
        should_warn = self._num_taken == _WARN_AFTER or (
            done.step == self._num_steps and self._num_warned != len(self._never)
        )
        if self._never and should_warn:
            self._num_warned = len(self._never)
            emit(
                Warned(
                    unused_warning([name for name in self._names if name in self._never], self._num_taken), done.step
                )
            )

    def tree(self) -> dict[str, Any]:
        """Empty if every parameter got a gradient."""
        never = {"never": sorted(self._never), "num_taken": self._num_taken}
        return {"usage": never if self._never else {}}

    def restore(self, saved: SavedState) -> None:
        """States of earlier versions do not have it."""
        state = saved.tree.get("usage")
        if not isinstance(state, dict):
            return
        never, num_taken = state.get("never"), state.get("num_taken")
        self._never = {name for name in self._names if isinstance(never, list) and name in never}
        self._num_taken = num_taken if isinstance(num_taken, int) else 0

    def _make_counts(self) -> Tensor:
        values = [float(bool(self._lacking)), *self._counters.encode(self._held - self._lacking)]
        return torch.tensor(values, dtype=torch.float64).to(self._device, non_blocking=True)

    def _gates(self, sums: Tensor) -> dict[str, Tensor]:
        names = sorted(self._lacking)
        if self._where is None:
            index, digits = zip(*(self._counters.places[name] for name in names), strict=True)
            divisors = torch.tensor([self._counters.base**digit for digit in digits], dtype=torch.float64)
            self._where = torch.tensor(index).to(sums.device), divisors.to(sums.device)
        places, scales = self._where
        counts = (sums[places] / scales).floor() % self._counters.base
        return dict(zip(names, counts.clamp(max=1.0).unbind(), strict=True))


def unused_warning(names: Sequence[str], num_steps: int) -> str:
    """``no gradient reached 'a.weight' and 'a.bias' in 5 steps, so they were not updated. ...``"""
    shown = [f"'{name}'" for name in names[:3]]
    if len(names) > len(shown):
        shown = [*shown, f"{len(names) - len(shown)} more"]
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    steps = "the first step" if num_steps == 1 else f"{num_steps} steps"
    was, them = ("they were", "them") if len(names) > 1 else ("it was", "it")
    advice = f"Check that the forward uses {them}, or freeze {them} with optim.groups."
    return f"no gradient reached {listed} in {steps}, so {was} not updated. {advice}"
