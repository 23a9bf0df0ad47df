"""Parameter servers, as a component: the vote of ranks that do not wait for each other, and updates by single pushes.

``sync.server`` moves gradients and weights. With ``mode = "sync"`` every step is one of all ranks, and this component
only describes it. Else the vote of a step is held among the servers, from the ballots that workers send them, and all
ranks learn its result at the next synchronization, as replicas do under Local SGD.

The staleness of a step is the mean over the workers' pushes: how many steps of updates the weights lacked that a push
was computed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core.errors import ConfigError, Problem
from closeranks.core.protocols import Reducer
from closeranks.elastic.local_sgd_vote import LocalSgdVote
from closeranks.elastic.vote import Ballot, Verdict, Vote, settle
from closeranks.facts.layout import pluralize
from closeranks.optim.optimizer import Optimizer
from closeranks.parallel.process_group import RankGroup
from closeranks.run.builder.context import RunContext
from closeranks.run.builder.reduction_choice import describe_compressed_sync, push_compression
from closeranks.run.components.component import Component
from closeranks.run.components.model import Model
from closeranks.sync.config import ServerConfig
from closeranks.sync.server.asynchronous import AsynchronousReducer, PushHeader
from closeranks.sync.server.ballots import BallotExchange
from closeranks.sync.server.roles import Roles, roles
from closeranks.sync.server.stale import StaleReducer

_NAME = "staleness"


class ParameterServers(Component):
    """``vote``: the vote of this run; ``owners``: the ranks of this one's role."""

    replica = None
    """No rank has state of its own."""

    def __init__(
        self, context: RunContext, model: Model, reducer: Reducer, optimizer: Optimizer, owners: RankGroup
    ) -> None:
        groups, self._config = context.groups, context.job.sync.server
        self._context, self._optimizer = context, optimizer
        self._roles = roles(context.job.sync, groups.data.size)
        self._server = self._roles.server_rank(groups.data.rank)
        self._clip = context.job.optim.clip
        is_stale = self._config.mode != "sync"
        self._reducer = cast("StaleReducer", reducer) if is_stale else None
        self._asynchronous = cast("AsynchronousReducer", reducer) if self._config.mode == "async" else None
        self.vote = self._make_vote(model.spec.metrics, owners)
        if self._asynchronous is not None:
            self._asynchronous.apply = self._apply
        if context.device.type != "cpu":
            what = "pushes to parameter servers travel through Gloo, from the memory of the CPU"
            raise ConfigError([Problem("sync.server.count", what, 'Set it to 0, or run.device = "cpu".')])
        if not self._config.waits_for_all and any(model.statistics):
            what = "batch norm's running statistics are averaged over all ranks in every step"
            place, fix = ("mode", 'Set it to "sync".') if is_stale else ("backup", "Set it to 0.")
            raise ConfigError([Problem(f"sync.server.{place}", what, fix)])

    @property
    def _vote_options(self) -> dict[str, Any]:
        """Of a vote that is held among the servers."""
        return {"clip": self._clip, "num_replica_groups": 1, "contributes": self._server == 0}

    def _make_vote(self, metrics: Sequence[str], owners: RankGroup) -> Vote:
        groups = self._context.groups
        if self._config.waits_for_all:
            return Vote(groups.world, metrics, clip=self._clip)
        exchange = BallotExchange(groups.data, self._roles, owners, self._config.bound)
        return LocalSgdVote(exchange, groups.world, metrics, **self._vote_options)

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if self._reducer is None:
            return
        staleness = float(self._reducer.staleness)
        if self._asynchronous is not None:
            if self._server is None:
                norm = (ballot.norm_squared + 0.0 * ballot.loss).item()
                self._asynchronous.send_header(ballot.weight.item(), norm)
            staleness = sum(self._asynchronous.stalenesses) if self._server == 0 else 0.0
        ballot.extra[_NAME] = torch.tensor([staleness], dtype=torch.float64)

    def after_vote(self, index: int, verdict: Verdict) -> None:
        if self._config.staleness_lr and self._reducer is not None and self._asynchronous is None:
            staleness = verdict.extra[_NAME].item() / self._roles.num_workers
            self._optimizer.rate_scale = 1.0 / (1.0 + staleness)

    def after_update(self, index: int, verdict: Verdict) -> None:
        self._context.step_timer.enter_phase(WorkerPhase.OUTER_STEP)  # workers wait for others in it

    def voted_figures(self, extra: Mapping[str, Sequence[float]]) -> Mapping[str, Any]:
        return {_NAME: extra[_NAME][0] / self._roles.num_workers} if _NAME in extra else {}

    def started(self) -> Mapping[str, Any]:
        said = describe_servers(self._config, self._roles)
        if pushes := push_compression(self._context.job.sync, self._context.schedule.num_steps):
            said += f"; {describe_compressed_sync(pushes.config, pushes.schedule)}"
        return {"sync": said}

    def _apply(self, header: PushHeader, staleness: float) -> None:
        """Update by one push, at a rate that makes the pushes of all workers together one step."""
        assert self._asynchronous is not None
        settled = settle(header.weight, header.norm_squared, 0.0, 1.0, self._clip)
        taken, factor = torch.tensor(settled[:2], dtype=torch.float64)
        stale = 1.0 + staleness if self._config.staleness_lr else 1.0
        self._optimizer.rate_scale = 1.0 / (self._roles.num_workers * stale)
        self._optimizer.step(header.step, self._asynchronous.gradients(), factor, taken)


def describe_servers(config: ServerConfig, of: Roles) -> str:
    who = f"{pluralize(of.num_workers, 'worker')} and {pluralize(of.num_servers, 'parameter server')}"
    if config.waits_for_all:
        return f"{who}, synchronous"
    if config.backup:
        num_taken = of.num_workers - config.backup
        taken = f"a step takes the first {pluralize(num_taken, 'push', 'es')}"
        return f"{who}, {taken}, synchronized every {pluralize(config.every, 'step')}"
    what = f"at most {pluralize(config.bound, 'step')} stale" if config.mode == "stale" else "asynchronous"
    return f"{who}, {what}, synchronized every {pluralize(config.every, 'step')}"
