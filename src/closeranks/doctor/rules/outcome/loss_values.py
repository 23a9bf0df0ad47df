"""Did the loss become NaN or infinite, grow, or jump?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from closeranks.core.events import StepDone
from closeranks.doctor.finding import Finding, SettingChange
from closeranks.doctor.run_facts import RunFacts

_BEFORE = 20
"""Steps that a loss is compared with."""
_FAR = 10.0
"""A jump: so many times the usual distance from the median of the steps before."""
_DIVERGED, _FEW = 1.2, 5
"""A loss that ends so many times as high as it began, in the median of at least so many steps, has diverged."""
_JUMP = 1.5
"""And at least so many times that median."""


def find(facts: RunFacts) -> Iterator[Finding]:
    steps = facts.steps
    broken = [step for step in steps if not math.isfinite(step.loss) or not math.isfinite(step.grad_norm)]
    is_scaled = facts.setting("train.precision") == "fp16"
    if broken and not (is_scaled and all(math.isfinite(step.loss) for step in broken)):
        yield _not_finite(facts, broken)
        return
    if (diverged := _diverged(taken := [step for step in steps if step.taken])) is not None:
        yield diverged if not facts.setting("optim.lr") else replace(diverged, changes=(_lower_rate(facts),))
    elif jumps := list(_jumps(taken)):
        yield _jumped(facts, jumps)


def _not_finite(facts: RunFacts, broken: Sequence[StepDone]) -> Finding:
    lr = float(facts.setting("optim.lr") or 0)
    return Finding(
        "loss-values",
        f"The loss or its gradient was not a number in {len(broken)} of {len(facts.steps)} steps.",
        (
            f"first at step {broken[0].step}: loss {broken[0].loss:g}, gradient norm {broken[0].grad_norm:g}",
            "closeranks skips the update of such a step on every rank",
        ),
        "Lower the learning rate, check the data of that step (data.log_samples = true), and divisions and logarithms "
        "in your loss.",
        (SettingChange("optim.lr", lr / 3, lr),) if lr else (),
        is_error=True,
    )


def _diverged(steps: Sequence[StepDone]) -> Finding | None:
    """The end of the run beside its beginning."""
    num = len(steps) // 5
    if num < _FEW:
        return None
    first, last = (median(step.loss for step in part) for part in (steps[:num], steps[-num:]))
    if last <= _DIVERGED * first:
        return None
    return Finding(
        "loss-diverged",
        f"The loss grows: from {first:.3g} in the first fifth of the steps to {last:.3g} in the last.",
        (f"the gradient norm grew from {steps[0].grad_norm:.3g} to {steps[-1].grad_norm:.3g}",),
        "Lower the learning rate, lengthen its warm-up, or clip gradients.",
        is_error=True,
    )


def _lower_rate(facts: RunFacts) -> SettingChange:
    lr = float(facts.setting("optim.lr"))
    return SettingChange("optim.lr", lr / 10, lr)


def _jumps(steps: Sequence[StepDone]) -> Iterator[StepDone]:
    for number in range(_BEFORE, len(steps)):
        before = [step.loss for step in steps[number - _BEFORE : number]]
        middle = median(before)
        usual = median(abs(loss - middle) for loss in before) + 1e-3 * abs(middle)
        loss = steps[number].loss
        if loss > _JUMP * abs(middle) and loss - middle > _FAR * usual:
            yield steps[number]


def _jumped(facts: RunFacts, jumps: Sequence[StepDone]) -> Finding:
    clip, lr = facts.setting("optim.clip"), float(facts.setting("optim.lr") or 0)
    worst = max(jumps, key=lambda step: step.loss)
    change = SettingChange("optim.clip", 1.0, clip) if not clip else SettingChange("optim.lr", lr / 3, lr)
    return Finding(
        "loss-spikes",
        f"The loss jumped in {len(jumps)} of {len(facts.steps)} steps.",
        (
            f"first at step {jumps[0].step}",
            f"highest at step {worst.step}: {worst.loss:.3g}, gradient norm {worst.grad_norm:.3g}",
        ),
        "Clip gradients, lower the learning rate or lengthen its warm-up, and look at the data of those steps.",
        (change,),
        is_error=True,
    )
