"""What does a plan cost? Goodput, days and money to a number of tokens.

Goodput is the closed form of ``plan.goodput`` for a run that resumes from the last step in memory; days are wall time
with that goodput. Invariant: what is not known (a price, a number of tokens) gives None, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.cluster import Cluster
from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.plan.goodput.closed_form import closed_form_goodput
from closeranks.plan.goodput.scenario import CLOSING_RANKS, GoodputScenario
from closeranks.plan.search.search import Plan

DAY_S = 86400.0
_STATE_BYTES = 12
"""Of a parameter in a snapshot or checkpoint: float32 weights and two moments."""
_COPY_BYTES_PER_S = 10e9
"""Of a device to its host's memory; as ``closeranks plan goodput`` assumes."""


@dataclass(frozen=True, slots=True)
class CostBasis:
    """What the costs of all plans of a search have in common."""

    num_params: float
    samples_per_step: int
    seq_len: int
    """1 for models without a sequence: samples count as tokens."""
    budget: float | None = None
    """Tokens to train on (samples for models without a sequence)."""
    failures: FailureTable | None = None

    @property
    def noun(self) -> str:
        return "tokens" if self.seq_len > 1 else "samples"


@dataclass(frozen=True, slots=True)
class PlanCosts:
    goodput: float
    tokens_per_s: float
    """Without interruptions."""
    days: float | None
    device_hours: float | None
    money: float | None


def plan_costs(plan: Plan, cluster: Cluster, basis: CostBasis) -> PlanCosts:
    num_devices = plan.choice.layout.num_ranks
    goodput = _goodput(plan, cluster, basis)
    rate = basis.samples_per_step * basis.seq_len / plan.step.seconds
    if basis.budget is None or goodput <= 0:
        return PlanCosts(goodput, rate, None, None, None)
    seconds = basis.budget / rate / goodput
    hours = seconds / 3600 * num_devices
    price = cluster.price_per_hour
    return PlanCosts(goodput, rate, seconds / DAY_S, hours, None if not price else hours * price)


def _goodput(plan: Plan, cluster: Cluster, basis: CostBasis) -> float:
    if basis.failures is None:
        return 1.0
    num_devices = plan.choice.layout.num_ranks
    per_host = min(cluster.devices_per_host, num_devices)
    state_bytes = _STATE_BYTES * basis.num_params
    stall_s = state_bytes / num_devices / _COPY_BYTES_PER_S
    scenario = GoodputScenario(
        num_devices=num_devices,
        per_host=per_host,
        step_s=plan.step.seconds,
        stall_s=stall_s,
        durable_s=stall_s + state_bytes / max(num_devices // per_host, 1) / cluster.disk_bytes_per_s,
    )
    return closed_form_goodput(scenario, CLOSING_RANKS, basis.failures)
