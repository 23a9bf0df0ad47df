"""Everything that a step is computed with: the model, the reducer, the batches, the vote and all components."""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.core.protocols import Reducer
from closeranks.elastic.vote import Vote
from closeranks.optim.scaler import LossScale
from closeranks.run.component import Components
from closeranks.run.context import RunContext
from closeranks.run.model import Model
from closeranks.run.supply import Batches


@dataclass(frozen=True, slots=True)
class Engine:
    context: RunContext
    model: Model
    reducer: Reducer
    loss_scale: LossScale
    batches: Batches
    vote: Vote
    components: Components
