"""Why did a plan win, and why is none legal? One sentence each.

Invariant: a reason names a part of the estimated time or a number of bytes; nothing is claimed that the estimates do
not say.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.plan.search.search import Plan, PlanQuestion, SearchResult
from closeranks.plan.search.space import candidate_layouts_in

_GIB = 1 << 30


def why_winner(result: SearchResult) -> str:
    winner, fastest = result.winner, result.fastest
    if winner is None or fastest is None:
        return ""
    layout = winner.choice.layout
    if winner is fastest:
        text = f"{layout} is the fastest of the layouts that fit"
    else:
        gain = 1 - fastest.step.seconds / winner.step.seconds
        other = str(fastest.choice.layout)
        other += f" with {_settings(fastest)}" if fastest.choice.layout == layout else ""
        text = (
            f"{layout} is the simplest within {100 * result.question.margin:g}% of the fastest: "
            f"{other} would gain {100 * gain:.1f}% and has more moving parts"
        )
    return ". ".join(filter(None, (text, _largest_parts(winner), _faster_misses(result, fastest)))) + "."


def _largest_parts(plan: Plan) -> str:
    parts = sorted(plan.step.parts, key=lambda part: -part.seconds)[:3]
    named = (f"{part.name} {100 * part.seconds / plan.step.seconds:.0f}%" for part in parts if part.seconds > 0)
    return f"Its time: {', '.join(named)}"


def _faster_misses(result: SearchResult, best: Plan) -> str:
    if not result.misses:
        return ""
    miss = result.misses[0]
    faster = 100 * (1 - miss.step.seconds / best.step.seconds)
    missing = miss.memory.missing_bytes
    by = f"misses by {missing / _GIB:,.1f} GiB" if missing else "leaves too little memory free to be sure"
    return (
        f"Of the faster ones {miss.choice.layout} with {_settings(miss)} comes nearest: {faster:.1f}% faster, it {by}"
    )


def _settings(plan: Plan) -> str:
    return f"micro_batch={plan.choice.micro_batch} recompute={plan.choice.recompute}"


def nothing_legal(question: PlanQuestion) -> tuple[str, str]:
    """Why a search without any legal choice has none, and what to change."""
    needs, count, kept = question.constraints, question.cluster.num_devices, question.space.layout
    if kept is not None:
        what = f"the layout that is kept, {kept}, does not run on {count:,} devices with this model and batch"
        return what, "Leave out --keep layout, or change the table [layout]."
    ample = replace(needs, global_batch=count, micro_batch=1)
    layouts = list(candidate_layouts_in(question.space, ample, count, question.cluster.domain_size))
    least = min((layout.data for layout in layouts), default=0)
    what = f"no layout of {count:,} devices is legal with a global batch of {needs.global_batch:,}"
    if least <= needs.global_batch:
        return what, "Use fewer devices, or another number of them."
    most = ", ".join(f"{axis}={max(getattr(one, axis) for one in layouts)}" for axis in ("tensor", "pipeline"))
    return f"{what}: the model allows {most} at most", f"Use train.global_batch={least} or more, or fewer devices."
