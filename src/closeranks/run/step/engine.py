"""Everything that a step is computed with: the model, the reducer, the batches, the vote and all components."""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.core.protocols import Reducer
from closeranks.elastic.vote import Vote
from closeranks.optim.loss_scale import LossScale
from closeranks.run.builder.context import RunContext
from closeranks.run.components.batches import Batches
from closeranks.run.components.component import Components
from closeranks.run.components.model import Model


@dataclass(frozen=True, slots=True)
class Engine:
    context: RunContext
    model: Model
    reducer: Reducer
    loss_scale: LossScale
    batches: Batches
    vote: Vote
    components: Components
