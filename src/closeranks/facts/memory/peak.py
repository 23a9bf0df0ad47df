"""When in a step does a rank hold the most, and what does it hold then?

Gradients appear as activations are freed, buckets and gathered weights come and go, so the largest of all of these are
never there at once. The moments compared are the loss, the backward of the head, of the last and the first block and
of the embedding, and the next forward. Invariant: the parts of the peak are there at one moment, and add up to it.

What is held when was read off the code that trains, run without data (``closeranks plan dry-run``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.facts.memory.state_bytes import NamedBytes


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """A rank's whole weights by part, as wide as their gradients."""

    whole: float
    head: float
    """Of the output projection, whose gradient comes first; 0 where another rank has it."""
    embedding: float
    """Whose gradient comes last."""
    is_tied: bool
    """Whether head and embedding are one weight, whose gradient is complete only at the end."""
    block: float
    """The largest one."""
    matrix: float
    """The largest single weight of a block."""


@dataclass(frozen=True, slots=True)
class ReducerBytes:
    """What the reducer of gradients holds besides weights and optimizer state."""

    zero: int
    holds_step: bool
    """Whether gradients stay whole until the end of the step, and with ZeRO-3 gathered weights do too."""
    kept: float
    """Gradients that are allocated all the time: buckets of ZeRO-0, slices of ZeRO-1 and 2."""
    num_shards: int = 1
    first_bucket: float = 0.0
    last_buckets: tuple[float, float] = (0.0, 0.0)
    """The last bucket that is filled, and the one before it."""
    block_bucket: float = 0.0
    """A bucket of a block's weights."""
    rest: float = 0.0
    """ZeRO-3: what is gathered in one call besides the blocks, and stays from forward to backward."""
    last_unit: float = 0.0
    """ZeRO-3: the unit that stays gathered because its backward follows its forward."""
    ahead: float = 0.0
    """ZeRO-3: what an all-gather ahead of a block's backward takes."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """What forward keeps for backward, of all micro-batches in flight, and what backward needs on top."""

    blocks: float = 0.0
    ends: float = 0.0
    """Of embedding, head and loss."""
    casts: float = 0.0
    """Half-precision copies of weights."""
    borders: float = 0.0
    """Hidden states at the ends of stages."""
    head: float = 0.0
    """What one micro-batch keeps in head and loss: freed first."""
    logits: float = 0.0
    """Working memory of the loss."""
    logits_gradient: float = 0.0
    """What of it the head's backward reads."""
    again: float = 0.0
    """Working memory of a block that is computed again."""
    block_gradients: float = 0.0
    """Gradients of a block's activations while its backward runs."""
    deferred: float = 0.0
    """Gradients that are kept for weight gradients which a schedule puts off."""
    is_late: bool = False
    """Whether weight gradients come although activations stay ([Note: how a backward is split])."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """One moment, in bytes without weights and optimizer state."""

    moment: str
    gradients: float
    buffers: tuple[NamedBytes, ...]
    activations: tuple[NamedBytes, ...]

    @property
    def total(self) -> float:
        parts = (*self.buffers, *self.activations)
        return self.gradients + sum(part.num_bytes for part in parts)


Parts = list[tuple[str, float]]
_AT_WORK = "gradients of the weights at work"
_SCATTERED = "gradients being scattered"
_TRAVELLING = "gradients in flight"


def peak_bytes(
    weights: WeightBytes, reducer: ReducerBytes, activations: ActivationBytes, num_micro: int, in_flight: float
) -> PeakBytes:
    """``in_flight``: micro-batches whose activations the rank holds at most."""
    keeps_whole = reducer.zero < 2 or reducer.holds_step
    if num_micro > in_flight or activations.is_late:
        steps = [_Step(weights, reducer, activations, num_micro, keeps_whole, 1.0)]
    else:
        # Until the first backward there are no gradients, and then one micro-batch less.
        steps = [_Step(weights, reducer, activations, num_micro, False, 1.0)]
        if in_flight > 1:
            steps.append(_Step(weights, reducer, activations, num_micro, keeps_whole, 1 - 1 / in_flight))
    left = max(0.0, 1 - 1 / in_flight)
    found = [moment for step in steps for moment in step.moments()] + list(steps[-1].last_moments(left))
    return max(found, key=_Moment.total_bytes).peak(activations)


@dataclass(frozen=True, slots=True)
class _Moment:
    name: str
    gradients: float
    buffers: Parts
    working: Parts
    share: float
    """Of all activations that are held."""
    freed: float
    """Of what the ends kept."""
    kept_bytes: float

    def total_bytes(self) -> float:
        parts = sum(size for _, size in self.buffers) + sum(size for _, size in self.working)
        return self.gradients + parts + self.share * self.kept_bytes - self.freed

    def peak(self, own: ActivationBytes) -> PeakBytes:
        held = [
            ("activations of blocks", self.share * own.blocks),
            ("activations of embedding, head and loss", self.share * own.ends - self.freed),
            ("weights cast for products", self.share * own.casts),
            ("hidden states at the ends of stages", self.share * own.borders),
            ("gradients kept for weight gradients", self.share * own.deferred),
        ]
        return PeakBytes(self.name, self.gradients, _named(self.buffers), _named([*held, *self.working]))


@dataclass(frozen=True, slots=True)
class _Step:
    """The backward of one micro-batch."""

    weights: WeightBytes
    reducer: ReducerBytes
    activations: ActivationBytes
    num_micro: int
    has_whole: bool
    """Whether whole gradients of earlier micro-batches are there."""
    share: float
    """Of the most activations, what is there as it begins."""

    @property
    def gathers(self) -> bool:
        return self.reducer.zero == 3 and not self.reducer.holds_step

    @property
    def scatters(self) -> bool:
        return self.reducer.zero == 2 and not self.reducer.holds_step

    def moments(self) -> Iterator[_Moment]:
        own = self.activations
        if own.logits:
            yield self._moment("loss", self._standing(), [("logits and their gradient", own.logits)])
            yield self._head()
        yield from self._block("last block", self.share, self._accumulated(), min(own.head, self.share * own.ends))

    def last_moments(self, left: float) -> Iterator[_Moment]:
        """Of the end of a backward, when only micro-batches behind it hold activations."""
        weights, reducer = self.weights, self.reducer
        gradients = weights.whole / reducer.num_shards if self.gathers else reducer.kept
        if not (self.gathers or self.scatters or (reducer.zero == 0 and reducer.kept and self.num_micro == 1)):
            gradients += weights.whole
        # In the first micro-batch of a step the embedding's gradient is still to come.
        is_late = not (self.has_whole or self.gathers or self.scatters or reducer.kept)
        coming = weights.embedding + (0.0 if weights.is_tied else weights.head) if is_late else 0.0
        yield from self._block("first block", left, gradients - coming, 0.0)
        yield self._embedding(left, gradients)
        if self.gathers and self.num_micro > 1:
            rest = [("gathered weights", 2 * reducer.rest), (_SCATTERED, reducer.rest)]
            yield self._moment("next forward", rest, [], share=0.0)

    def _head(self) -> _Moment:
        """The gradient of the output projection is there, and moves into its bucket."""
        own, new = self.activations, self.weights.head
        if self.reducer.zero in (1, 2) and not self.weights.is_tied:
            # A gradient that was accumulated before is the same tensor.
            new = max(new, self.reducer.first_bucket) if self.has_whole else new + self.reducer.first_bucket
        working = [("logits and their gradient", own.logits_gradient)]
        return self._moment("head", [*self._standing(), (_AT_WORK, new)], working, freed=own.head)

    def _block(self, name: str, share: float, gradients: float, freed: float) -> Iterator[_Moment]:
        weights, reducer, own = self.weights, self.reducer, self.activations
        buffers, waiting = self._standing(), 0.0 if self.has_whole and not weights.is_tied else weights.head
        if self.gathers:
            buffers.append(("gathered weights of units ahead", reducer.ahead))
            if self.num_micro == 1 or not share:  # of the block after this one
                buffers = [part for part in buffers if part[0] != _SCATTERED] + [(_SCATTERED, weights.block)]
            waiting = weights.head
        elif self.scatters:
            buffers = [(_TRAVELLING, min(weights.whole, reducer.first_bucket + 2 * reducer.block_bucket))]
            waiting = weights.head if weights.is_tied else 0.0
        elif reducer.zero in (1, 2):
            buffers.append(("bucket that is being filled", reducer.block_bucket))
        keeps_block = self.gathers or not (self.has_whole or reducer.kept)
        # Its feed-forward comes first, with the most activations and the fewest gradients.
        for matrices, again in ((weights.matrix, 1.0), (weights.block if keeps_block else weights.matrix, 0.5)):
            working = [("one block computed again", again * own.again)]
            if again == 1:
                working.append(("gradients of a block's activations", own.block_gradients))
            found = [*buffers, (_AT_WORK, waiting + matrices)]
            yield self._moment(name, found, working, gradients=gradients, share=share, freed=freed)

    def _embedding(self, left: float, gradients: float) -> _Moment:
        weights, reducer = self.weights, self.reducer
        new = weights.embedding or weights.matrix
        if self.gathers:
            buffers = [("gathered weights", reducer.rest), (_SCATTERED, weights.block)]
            new = max(weights.head + weights.embedding, reducer.rest)
        elif self.scatters:
            buffers = [(_TRAVELLING, min(weights.whole, sum(reducer.last_buckets) + reducer.block_bucket))]
        else:
            buffers = self._standing()
            # Without buckets the first gradient of a step stays where it is.
            new = 0.0 if reducer.zero == 0 and not reducer.kept and not self.has_whole else new
            new += weights.embedding if weights.is_tied else 0.0
        return self._moment("embedding", [*buffers, (_AT_WORK, new)], [], gradients=gradients, share=left)

    def _accumulated(self) -> float:
        if self.has_whole:
            return self.reducer.kept + self.weights.whole
        if self.gathers and self.num_micro > 1:
            return self.weights.whole / self.reducer.num_shards
        return self.reducer.kept

    def _standing(self) -> Parts:
        """What the reducer holds from the last forward on."""
        reducer = self.reducer
        if self.gathers:
            found = [("gathered weights", reducer.rest + reducer.last_unit)]
            return [*found, (_SCATTERED, reducer.rest)] if self.num_micro > 1 else found
        if reducer.zero == 3:
            return [("gathered weights of the stage", self.weights.whole)]
        if self.scatters and self.num_micro > 1:
            in_flight = sum(reducer.last_buckets)
            arriving = in_flight / reducer.num_shards if self.num_micro > 2 else 0.0
            return [(_TRAVELLING, in_flight), ("slices arriving", arriving)]
        return []

    def _moment(
        self,
        name: str,
        buffers: Parts,
        working: Parts,
        *,
        gradients: float | None = None,
        share: float | None = None,
        freed: float = 0.0,
    ) -> _Moment:
        own, share = self.activations, self.share if share is None else share
        kept = own.blocks + own.ends + own.casts + own.borders + own.deferred
        gradients = self._accumulated() if gradients is None else gradients
        return _Moment(name, gradients, buffers, working, share, freed, kept)


def _named(parts: Parts) -> tuple[NamedBytes, ...]:
    sums: dict[str, float] = {}
    for name, num_bytes in parts:
        sums[name] = sums.get(name, 0.0) + num_bytes
    return tuple(NamedBytes(name, round(size)) for name, size in sums.items() if round(size))
