"""How do replicas that trained apart become one again?

[Note: the outer step] At a meeting each replica says how far it went from where all stood last, the anchor: its delta,
anchor minus weights. The mean of all deltas is a gradient for the anchor, and SGD with (Nesterov) momentum steps along
it; then every replica goes on from the anchor. That is DiLoCo (Douillard et al., 2023). With a rate of 1 and no
momentum the anchor becomes the mean of the weights, which is local SGD; one fragment at a time, streaming DiLoCo.

What meets is what a rank updates, its leaves, whole or shards: ranks of different replicas with the same place in them
hold the same leaves. All leaves of a fragment lie in one flat tensor, which travels by a way of its own: as it is, or
compressed, with what that leaves unsent remembered for the next meeting.

Invariants: every replica computes the same bits, from the same sums; between meetings nothing here is touched; where
replicas worked off different numbers of samples, each counts by its share of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from closeranks.core.protocols import Leaf, Remembered
from closeranks.sync.held import view_of
from closeranks.sync.journeys import travel
from closeranks.sync.places import Load, Place, in_memory_order, memory_order
from closeranks.sync.ways import WayMaker


@dataclass(frozen=True, slots=True)
class OuterRule:
    """SGD on the anchor, as the table ``[sync.local]`` has it."""

    lr: float
    momentum: float
    nesterov: bool

    def update(self, anchor: Tensor, momentum: Tensor | None, delta: Tensor) -> None:
        """In place; as ``torch.optim.SGD`` does it with ``delta`` for a gradient."""
        if momentum is None:
            anchor.sub_(delta, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(delta)
        ahead = delta.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(ahead, alpha=self.lr)


class Kept(NamedTuple):
    """What is remembered of one leaf between meetings: views of the flat tensors."""

    leaf: Leaf
    anchor: Tensor
    momentum: Tensor | None
    """None where the rule has none."""


class _Fragment:
    """Leaves of one type that meet together, the flat tensors that they lie in, and the way these travel."""

    def __init__(self, leaves: Sequence[Leaf], num_replicas: int, ways: WayMaker, *, has_momentum: bool) -> None:
        self.leaves = leaves
        load = _load_of(leaves, num_replicas)
        self.anchor = torch.zeros(load.numel, dtype=load.dtype, device=load.device)
        self.momentum = torch.zeros_like(self.anchor) if has_momentum else None
        self.way = ways(load)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        offset = 0
        for leaf in self.leaves:
            yield view_of(flat, offset, leaf.tensor)
            offset += leaf.tensor.numel()


def _load_of(leaves: Sequence[Leaf], num_replicas: int) -> Load:
    """One after the other, and as long as it takes to be cut evenly."""
    places, offset = list[Place](), 0
    for leaf in leaves:
        piece, (begin, end) = replace(leaf.piece, flat=None), leaf.piece.flat or (0, leaf.piece.numel)
        if leaf.piece.flat is None:
            piece = in_memory_order(piece, memory_order(leaf.tensor))
        places.append(Place(piece, offset, begin, end))
        offset += end - begin
    first = leaves[0].tensor
    return Load(tuple(places), -(-offset // num_replicas) * num_replicas, first.dtype, first.device)


class Outer:
    """``ways``: how deltas travel between replicas; ``exact_ways``: those that must not be compressed.

    Call sequence: ``meet`` after the inner update of each meeting's step, with what meets there; ``restart`` after the
    weights were put there by somebody else.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        fragment_of: Mapping[str, int],
        rule: OuterRule,
        num_replicas: int,
        ways: WayMaker,
        exact_ways: WayMaker,
        exact: Collection[str] = (),
        alone: Collection[str] = (),
    ) -> None:
        """``fragment_of``: by parameter. ``exact``: those that must not be compressed. ``alone``: those of which a rank
        of the same replica holds a copy that must come to the same bits. A backend may add up a long tensor in an order
        that depends on the place in it, so each of these travels by itself."""
        self._rule, self._num_replicas = rule, num_replicas
        self._fragments = dict[int, list[_Fragment]]()
        grouped = dict[tuple[int, torch.dtype, bool, str], list[Leaf]]()
        for leaf in leaves:
            name = leaf.piece.name
            key = (fragment_of[name], leaf.tensor.dtype, name in exact, name if name in alone else "")
            grouped.setdefault(key, []).append(leaf)
        for (number, _, is_exact, _), members in grouped.items():
            chosen = exact_ways if is_exact else ways
            made = _Fragment(members, num_replicas, chosen, has_momentum=rule.momentum > 0)
            self._fragments.setdefault(number, []).append(made)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """All replicas stand where the weights are, and remember nothing."""
        for part in self._parts():
            if part.momentum is not None:
                part.momentum.zero_()
            for leaf, anchor in zip(part.leaves, part.views(part.anchor), strict=True):
                anchor.copy_(leaf.tensor)

    @torch.no_grad()
    def meet(self, step: int, fragments: Iterable[int], share: float | None = None) -> None:
        """A collective of the replicas. ``share``: what this one's delta counts for; None: all count alike."""
        for number in fragments:
            for part in self._fragments.get(number, ()):
                part.way.begin(step)
                self._meet(part, share)

    def memory(self) -> Iterator[Remembered]:
        """What deltas left unsent."""
        for part in self._parts():
            yield from part.way.memory()

    def losses(self) -> list[Tensor]:
        """As a reducer's."""
        return [found for part in self._parts() if (found := part.way.losses()) is not None]

    def kept(self) -> Iterator[Kept]:
        for part in self._parts():
            momenta = repeat(None) if part.momentum is None else part.views(part.momentum)
            yield from map(Kept, part.leaves, part.views(part.anchor), momenta)

    def _meet(self, part: _Fragment, share: float | None) -> None:
        delta = torch.zeros_like(part.anchor)  # for the time of a meeting alone
        for leaf, own, anchor in zip(part.leaves, part.views(delta), part.views(part.anchor), strict=True):
            torch.sub(anchor, leaf.tensor, out=own)
        delta.mul_(1.0 / self._num_replicas if share is None else share)
        travel(part.way.sum(delta))
        part.way.settle(torch.ones((), device=delta.device))
        self._rule.update(part.anchor, part.momentum, delta)
        for leaf, anchor in zip(part.leaves, part.views(part.anchor), strict=True):
            leaf.tensor.copy_(anchor)

    def _parts(self) -> Iterator[_Fragment]:
        for number in sorted(self._fragments):
            yield from self._fragments[number]
