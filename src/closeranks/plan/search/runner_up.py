"""What would another plan need to win? One sentence, which names a change that a user can make.

A change is tried before it is named: the other plan is estimated with it beside the winner, with it too where it is one
of the job or of the cluster. Invariant: a sentence ends with a change under which the estimates say that the plan is no
slower, or with how to train the plan although it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from closeranks.facts.cluster import Cluster
from closeranks.plan.search.changes import is_legal
from closeranks.plan.search.search import Plan, PlanEstimator, PlanQuestion, with_batch

_GROWTH = (2, 4, 8, 16)
"""Of the global batch: more changes the training too much to be a remedy for a layout."""
_FASTEST_LINK = 4.0
"""Times as fast: between two generations of links lies a factor of two."""
_INSIDE = frozenset({"tensor communication"})
_LINKED = _INSIDE | {"data communication", "context communication", "expert communication", "pipeline sends"}
_GIB = 1 << 30


def runner_up_needs(plan: Plan, winner: Plan, question: PlanQuestion, estimator: PlanEstimator) -> str:
    """What it loses, where, and with which change it would not."""
    gap = plan.step.seconds - winner.step.seconds
    anyway = f'to train it, set layout="{plan.choice.layout}" and --keep layout'
    if gap <= 0:
        return _ahead(winner.step.seconds / plan.step.seconds - 1) or f"as fast, and no simpler; {anyway}"
    behind = f"{100 * gap / winner.step.seconds:.1f}% slower"
    mine, theirs = _seconds_by_part(plan), _seconds_by_part(winner)
    name = max(mine, key=lambda part: mine[part] - theirs.get(part, 0.0))
    more = f"{behind}, mostly {name} ({mine[name]:.3g} s against {theirs.get(name, 0.0):.3g} s)"
    found = list(_remedies(plan, winner, question, estimator, name, gap))
    if found:
        return f"{more}; it needs {', or '.join(found)}"
    return f"{more}; no larger batch, faster link or more memory changes that: {anyway}"


def _ahead(gain: float) -> str:
    if not gain:
        return ""
    margin = 0.99 * gain  # which leaves the winner outside
    return f"{100 * gain:.1f}% faster, and has more moving parts: with --margin {margin:.3g} the winner no longer wins"


def _remedies(
    plan: Plan, winner: Plan, question: PlanQuestion, estimator: PlanEstimator, name: str, gap: float
) -> Iterator[str]:
    if batch := _larger_batch(plan, winner, question, estimator):
        yield f"train.global_batch={batch} or more"
    if name in _LINKED and (link := _faster_link(plan, winner, question.cluster, name, gap)):
        yield link
    if memory := _more_memory(plan, winner, question, estimator):
        yield memory


def _larger_batch(plan: Plan, winner: Plan, question: PlanQuestion, estimator: PlanEstimator) -> int:
    """With which both take as long for a sample, or the plan less; 0: with none that is tried."""
    for times in _GROWTH:
        asked = with_batch(question, times * question.workload.global_batch)
        steps = PlanEstimator(asked, estimator).steps
        if steps.estimate(plan.choice).seconds <= steps.estimate(winner.choice).seconds:
            return asked.workload.global_batch
    return 0


def _faster_link(plan: Plan, winner: Plan, cluster: Cluster, name: str, gap: float) -> str:
    """With a link that is faster for both, or that much more of their communication hidden."""
    excess = _seconds_by_part(plan)[name] - _seconds_by_part(winner).get(name, 0.0)
    if excess <= gap or (factor := excess / (excess - gap)) > _FASTEST_LINK:
        return ""
    is_inside = name in _INSIDE or cluster.num_hosts == 1
    key, where = ("intra_host", "inside a host") if is_inside else ("inter_host", "between hosts")
    return f"a link {where} that is {factor:.2g} times as fast ({key} of a cluster file)"


def _more_memory(plan: Plan, winner: Plan, question: PlanQuestion, estimator: PlanEstimator) -> str:
    """With the settings of least memory that make it as fast as the winner, whether these devices have it or not."""
    space, best = question.space, None
    for size, recompute in product(space.micro_batches, space.recompute):
        choice = replace(plan.choice, micro_batch=size, recompute=recompute)
        if not is_legal(choice, question):
            continue
        step = estimator.steps.estimate(choice)
        if step.seconds <= winner.step.seconds:
            tried = estimator.plan(choice, step)
            best = tried if best is None or tried.memory.total_bytes < best.memory.total_bytes else best
    if best is None:
        return ""
    settings = f"micro_batch={best.choice.micro_batch} recompute={best.choice.recompute}"
    more = (best.memory.total_bytes + best.memory.margin_bytes - best.memory.capacity_bytes) / _GIB
    return settings if best.fits else f"{more:,.1f} GiB more on a device, for {settings}"


def _seconds_by_part(plan: Plan) -> Mapping[str, float]:
    return {part.name: part.seconds for part in plan.step.parts}
