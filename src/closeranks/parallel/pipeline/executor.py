"""Executes this rank's part of a pipeline program.

Runs the instructions exactly as ``facts.pipeline.programs`` lowered and validated them. Hidden states and gradients are
sent between ranks (``p2p``) and passed directly between two stages of one rank. Invariants: gradients are the sums that
a single process would compute, micro-batch by micro-batch in the same order; a stage holds the activations of a
micro-batch from its forward to the end of its backward, no longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from closeranks.core.phases import BACKWARD, phase
from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.programs import PipelineInstruction, PipelineProgram, program_for
from closeranks.parallel.pipeline.fsdp_split_backward import finish_fsdp_backward, suspend_fsdp_hooks, unshard
from closeranks.parallel.pipeline.p2p import HiddenStateMeta, MessageKey, P2PChannel
from closeranks.parallel.pipeline.split_backward import (
    BackwardSplit,
    WeightBackward,
    backward_input,
    backward_weight,
    plan_split,
)
from closeranks.parallel.process_group import RankGroup


@cache
def forward_only_program(
    placement: tuple[tuple[int, ...], ...], num_micro: int
) -> tuple[tuple[PipelineInstruction, ...], ...]:
    """The instructions of every rank; ``placement`` lists the stages of each."""
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    rows: list[list[PipelineInstruction]] = [[] for _ in placement]
    for wave in range(len(rank_of) + num_micro - 1):
        busy = [(stage, wave - stage) for stage in sorted(rank_of) if 0 <= wave - stage < num_micro]
        for stage, micro in busy:
            rows[rank_of[stage]].append(PipelineInstruction("F", stage, micro))
        for stage, micro in busy:
            sender, receiver = rank_of[stage], rank_of.get(stage + 1)
            if receiver is not None and receiver != sender:
                rows[sender].append(PipelineInstruction("SEND_F", stage, micro, receiver))
                rows[receiver].append(PipelineInstruction("RECV_F", stage + 1, micro, sender))
    return tuple(map(tuple, rows))


StageMicro = tuple[int, int]
"""A global stage number and a micro-batch."""


class PipelineCallbacks(Protocol):
    """Callbacks with which a step or an evaluation supplies micro-batches to a pipeline and takes their losses.

    Call sequence, by the executor, for every micro-batch and each stage of this rank: ``before_forward``, in the first
    stage ``first_input``, in all of them ``shared_inputs``, the stage, in the last one ``loss_from_output``, all inside
    ``context``. Later, outside of it, around every backward that adds to gradients of a stage: ``begin_backward`` and
    ``end_backward``. Stage numbers here index this rank's own stages.
    """

    num_micro: int

    def signature(self, micro: int) -> Hashable:
        """The same for micro-batches whose hidden states have the same shapes; every rank of the pipeline knows it."""
        ...

    def context(self) -> AbstractContextManager[Any]:
        """Autocast."""
        ...

    def before_forward(self, stage: int, micro: int) -> None:
        """Seed the random streams, count."""
        ...

    def first_input(self, module: nn.Module, micro: int) -> Tensor:
        """The input of the first stage."""
        ...

    def shared_inputs(self, module: nn.Module, micro: int) -> Any:
        """Further inputs that the units of every stage read."""
        ...

    def loss_from_output(self, module: nn.Module, micro: int, output: Tensor) -> Tensor:
        """The loss of the last stage's output, scaled for backward."""
        ...

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        """``is_last``: no other backward of this step adds to gradients of the stage."""
        ...

    def end_backward(self, stage: int) -> None: ...


class Pipeline:
    """This rank's stages and the programs that drive them.

    ``splits`` False: where a program splits a backward into two halves, the first half does all of it and the second
    nothing; the result is the same, and the other ranks wait longer. Right for recomputed blocks, which a split
    backward would recompute twice. Compiled blocks and Python autograd functions fall back by themselves
    (``split_backward``).
    """

    def __init__(
        self,
        program_of: Callable[[int], PipelineProgram],
        stages: Mapping[int, nn.Module],
        group: RankGroup,
        device: torch.device,
        *,
        splits: bool = True,
    ) -> None:
        self.program_of = program_of
        self.stages = dict(sorted(stages.items()))
        self.group = group
        self.splits = splits
        self.channel = P2PChannel(group, device)
        self.peak_in_flight: Counter[int] = Counter()
        """For each stage, the largest number of micro-batches whose activations it has held at once."""
        self.peak_held = 0
        """The same over all stages of this rank together; defined as in ``facts.pipeline.timeline.peak_in_flight``."""
        self.channel.open()

    def run(self, callbacks: PipelineCallbacks) -> None:
        """Forward and backward of all micro-batches of a step. All ranks of the pipeline call it together."""
        program = self.program_of(callbacks.num_micro)
        _Run(self, callbacks, program.num_stages).follow(program.ranks[self.group.rank])

    def forward_only(self, callbacks: PipelineCallbacks) -> None:
        """The losses alone, for evaluation: no activations are held, and stages take micro-batches as they arrive."""
        program = self.program_of(1)  # only for its placement, which is the same for any number of micro-batches
        rows = forward_only_program(program.placement, callbacks.num_micro)
        with torch.no_grad():
            _Run(self, callbacks, program.num_stages).follow(rows[self.group.rank])


def open_pipeline(
    layout: Layout, stages: Mapping[int, nn.Module], group: RankGroup, device: torch.device, *, splits: bool = True
) -> Pipeline | None:
    """None without a pipeline axis. A collective of the pipeline's ranks."""
    if layout.pipeline == 1:
        return None
    return Pipeline(partial(program_for, layout.schedule, layout.pipeline), stages, group, device, splits=splits)


def last_gradients(
    instructions: Sequence[PipelineInstruction], *, splits: bool = True
) -> Mapping[int, PipelineInstruction]:
    """For each stage of a rank, the last instruction of a step that adds to its gradients."""
    return {at.stage: at for at in instructions if at.kind in ("BW" if splits else "BI")}


class _Identity(torch.autograd.Function):
    """Identity on a stage's input: a unit may modify its input in place, which autograd forbids on a leaf."""

    @staticmethod
    def forward(ctx: Any, stage_input: Tensor) -> Tensor:
        return stage_input.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a micro-batch until its backward is done; the values of its output are not kept."""

    stage_input: Tensor | None
    """The stage's input, which accumulates the gradient for the previous stage; None where that needs none."""
    output: GradientEdge | None
    """None where no gradient comes back: nothing in this stage or before it is trained."""
    meta: HiddenStateMeta
    rest: WeightBackward | None = None

    def input_gradient(self) -> Tensor | None:
        """Returned once. Zeros where the output does not depend on the input: the previous stage still waits for it."""
        stage_input, self.stage_input = self.stage_input, None
        if stage_input is None:
            return None
        return torch.zeros_like(stage_input) if stage_input.grad is None else stage_input.grad


class _Run:
    """One step, or one wave of an evaluation, in progress."""

    def __init__(self, pipeline: Pipeline, callbacks: PipelineCallbacks, num_stages: int) -> None:
        self._pipeline, self._callbacks = pipeline, callbacks
        self._stages, self._channel = pipeline.stages, pipeline.channel
        self._local = {stage: number for number, stage in enumerate(pipeline.stages)}
        self._last_stage = num_stages - 1
        self._last: Mapping[int, PipelineInstruction] = {}
        self._held: dict[StageMicro, _Held] = {}
        self._outputs: dict[StageMicro, Tensor] = {}
        """By the stage that computed them: to be sent, or to be read by the next stage on this rank."""
        self._gradients: dict[StageMicro, Tensor] = {}
        """By the stage whose output they belong to: to be sent, or to be used by that stage on this rank."""
        self._acts: dict[str, Callable[[PipelineInstruction], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input if pipeline.splits else self._backward,
            "W": self._backward_weight if pipeline.splits else _nothing,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }

    def follow(self, instructions: Sequence[PipelineInstruction]) -> None:
        self._last = last_gradients(instructions, splits=self._pipeline.splits)
        for instruction in instructions:
            self._acts[instruction.kind](instruction)
        self._channel.wait_all()

    # Forward

    def _forward(self, at: PipelineInstruction) -> None:
        module, callbacks = self._stages[at.stage], self._callbacks
        stage_input = self._stage_input(at)
        with callbacks.context():
            callbacks.before_forward(self._local[at.stage], at.micro)
            hidden = callbacks.first_input(module, at.micro) if stage_input is None else _non_leaf(stage_input)
            output = module(hidden, callbacks.shared_inputs(module, at.micro))
            if at.stage == self._last_stage:
                output = callbacks.loss_from_output(module, at.micro, output)
        if at.stage != self._last_stage:
            self._outputs[at.stage, at.micro] = output
        if torch.is_grad_enabled():
            self._hold(at, stage_input, output)

    def _stage_input(self, at: PipelineInstruction) -> Tensor | None:
        """The stage's input, detached from the graph that computed it; None: the first stage fetches its own input."""
        if at.stage == 0:
            return None
        if at.stage - 1 in self._stages:
            given = self._outputs.pop((at.stage - 1, at.micro))
            return given.detach().requires_grad_(given.requires_grad)
        return self._channel.wait_receive(MessageKey("forward", at.stage - 1, at.micro))

    def _hold(self, at: PipelineInstruction, stage_input: Tensor | None, output: Tensor) -> None:
        wants_gradient = stage_input is not None and stage_input.requires_grad
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._held[at.stage, at.micro] = _Held(
            stage_input if wants_gradient else None, edge, HiddenStateMeta.of(output)
        )
        pipeline, num_held = self._pipeline, sum(stage == at.stage for stage, _ in self._held)
        pipeline.peak_in_flight[at.stage] = max(pipeline.peak_in_flight[at.stage], num_held)
        pipeline.peak_held = max(pipeline.peak_held, len(self._held))

    # Backward

    def _backward(self, at: PipelineInstruction) -> None:
        held = self._held.pop((at.stage, at.micro))
        gradient = self._gradient(at, held)
        with self._reducing(at):
            if held.output is not None:
                torch.autograd.backward([held.output], [gradient])
        self._hand_back(at, held)

    def _backward_input(self, at: PipelineInstruction) -> None:
        held, module = self._held[at.stage, at.micro], self._stages[at.stage]
        gradient = self._gradient(at, held)
        split = BackwardSplit() if held.output is None else plan_split(held.output, held.stage_input)
        held.rest = WeightBackward()
        if held.output is not None:
            with self._reducing(at) if split.has_gradients_now else nullcontext(), suspend_fsdp_hooks(module):
                held.rest = backward_input(held.output, gradient, held.stage_input, split)
        held.output = None
        self._hand_back(at, held)

    def _backward_weight(self, at: PipelineInstruction) -> None:
        rest, module = self._held.pop((at.stage, at.micro)).rest, self._stages[at.stage]
        assert rest is not None
        with self._reducing(at):
            if rest.whole is not None:  # FSDP2's own hooks fire, as in any backward
                backward_weight(rest)
                return
            unshard(module)
            with suspend_fsdp_hooks(module):
                backward_weight(rest)
            finish_fsdp_backward(module)

    def _gradient(self, at: PipelineInstruction, held: _Held) -> Tensor | None:
        """The gradient of the stage's output; None: the output is a loss, or no gradient comes back."""
        if at.stage == self._last_stage or not held.meta.wants_gradient:
            return None
        if at.stage + 1 in self._stages:
            return self._gradients.pop((at.stage, at.micro))
        return self._channel.wait_receive(MessageKey("backward", at.stage, at.micro))

    def _hand_back(self, at: PipelineInstruction, held: _Held) -> None:
        gradient = held.input_gradient()
        if gradient is not None:
            self._gradients[at.stage - 1, at.micro] = gradient

    @contextmanager
    def _reducing(self, at: PipelineInstruction) -> Iterator[None]:
        """Wraps every computation that adds to gradients of a stage."""
        local = self._local[at.stage]
        with phase(BACKWARD):
            self._callbacks.begin_backward(local, is_last=at == self._last[at.stage])
            yield
            self._callbacks.end_backward(local)

    # Messages; a boundary between stages has the number of the stage before it

    def _send_forward(self, at: PipelineInstruction) -> None:
        assert at.peer is not None
        output = self._outputs.pop((at.stage, at.micro))
        self._channel.send_meta(at.stage, self._kind(at), HiddenStateMeta.of(output), at.peer)
        self._channel.send(MessageKey("forward", at.stage, at.micro), output, at.peer)

    def _receive_forward(self, at: PipelineInstruction) -> None:
        assert at.peer is not None
        meta = self._channel.receive_meta(at.stage - 1, self._kind(at), at.peer)
        self._channel.post_receive(MessageKey("forward", at.stage - 1, at.micro), meta, at.peer)

    def _send_backward(self, at: PipelineInstruction) -> None:
        assert at.peer is not None
        gradient = self._gradients.pop((at.stage - 1, at.micro), None)
        if gradient is not None:  # the previous stage also knows that it needs none
            self._channel.send(MessageKey("backward", at.stage - 1, at.micro), gradient, at.peer)

    def _receive_backward(self, at: PipelineInstruction) -> None:
        assert at.peer is not None
        meta = self._held[at.stage, at.micro].meta
        if meta.wants_gradient:
            self._channel.post_receive(
                MessageKey("backward", at.stage, at.micro), replace(meta, wants_gradient=False), at.peer
            )

    def _kind(self, at: PipelineInstruction) -> Hashable:
        """Hidden states of one kind have the same metadata. Evaluation is a kind of its own: it needs no gradients."""
        return self._callbacks.signature(at.micro), torch.is_grad_enabled()


def _non_leaf(stage_input: Tensor) -> Tensor:
    return _Identity.apply(stage_input) if stage_input.requires_grad else stage_input  # type: ignore[no-untyped-call]


def _nothing(at: PipelineInstruction) -> None:
    """The second half of a backward that was not split."""
