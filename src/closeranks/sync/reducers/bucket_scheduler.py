"""Schedules the reduction of gradient buckets: decides when each bucket's collective starts.

[Note: bucket scheduling] Autograd calls a hook as soon as a parameter's gradient is complete; the hook copies it into
its bucket, and a bucket's reduction starts when it and all before it are full. The reducer decides how to copy and
send.

Two timings. ``step``: all buckets of all stages are reduced once, in the last backward of the step or in ``finish``, in
one order that is the same on every rank whatever it computed; a rank without a micro-batch sends zeros. ``backward``:
the buckets of a stage are reduced in each of its backwards, so all ranks must have the same number of those. Gradients
of parameters that several stages share are complete only at the end of the step, and are reduced then.

Invariant: every rank sends the same buckets in the same order, and what no sample used counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import SEVERAL_STAGES
from closeranks.sync.reducers.buckets import GradientBucket

ReduceTiming = Literal["step", "backward"]
_ONCE = SEVERAL_STAGES


class BucketScheduler:
    """Tracks how far each bucket of a plan is filled. The callback ``load(bucket, index)`` copies the gradient of
    a member into its bucket; ``send(bucket)`` starts the reduction."""

    def __init__(
        self,
        plan: Sequence[GradientBucket],
        parameters: Sequence[nn.Parameter],
        *,
        load: Callable[[int, int], None],
        send: Callable[[int], None],
        timing: ReduceTiming,
        overlap: bool,
    ) -> None:
        self._load, self._send = load, send
        self._is_per_backward, self._overlaps = timing == "backward", overlap
        self._index_of = {parameters[m]: (b, i) for b, bucket in enumerate(plan) for i, m in enumerate(bucket.members)}
        self._stages = [bucket.stage for bucket in plan]
        self._sizes = [len(bucket.members) for bucket in plan]
        self._missing: list[set[int]] = [set() for _ in plan]
        self._armed: set[int] = set()
        """Stages whose gradients are moved into buckets in this backward."""
        self._queues: dict[int, list[int]] = {}
        """Buckets still to be reduced, in order: of a stage in its backward, or under ``_ONCE`` those of the step."""
        self.reset()
        if overlap:
            for parameter in self._index_of:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        if self._is_per_backward:
            self._expect(self._of(stage), stage)
        if self._is_per_backward or (is_last and self._overlaps):
            self._armed.add(stage)

    def end_backward(self, stage: int) -> None:
        """Reduce the remaining buckets of a stage, full or not, if its gradients were moved in this backward."""
        if stage in self._armed:
            self._fill(self._of(stage))
            self._send_full(stage)
        if self._is_per_backward:
            self._armed.discard(stage)

    def finish(self) -> None:
        """Reduce what is reduced once per step and has not been yet."""
        self._fill(self._queues[_ONCE])
        self._send_full(SEVERAL_STAGES)

    def reset(self) -> None:
        """Prepare for the next step."""
        self._armed.clear()
        self._queues.clear()
        everything = list(range(len(self._stages)))
        self._expect(self._of(SEVERAL_STAGES) if self._is_per_backward else everything, _ONCE)

    def _of(self, stage: int) -> list[int]:
        return [bucket for bucket, of in enumerate(self._stages) if of == stage]

    def _expect(self, buckets: list[int], queue: int) -> None:
        for bucket in buckets:
            self._missing[bucket] = set(range(self._sizes[bucket]))
        self._queues[queue] = buckets

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket, index = self._index_of[parameter]  # type: ignore[index]
        stage = self._stages[bucket]
        if stage not in self._armed:
            return
        if index not in self._missing[bucket]:
            what = "a parameter got its gradient twice in one backward, the second time after it had been sent"
            raise ModelError(what, "With torch.utils.checkpoint, set use_reentrant=False.")
        self._load(bucket, index)
        self._missing[bucket].discard(index)
        if not self._missing[bucket]:
            self._send_full(stage)

    def _fill(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            for index in sorted(self._missing[bucket]):
                self._load(bucket, index)
            self._missing[bucket].clear()

    def _send_full(self, stage: int) -> None:
        queue = self._queues[stage if self._is_per_backward and stage != SEVERAL_STAGES else _ONCE]
        while queue and not self._missing[queue[0]]:
            self._send(queue.pop(0))
