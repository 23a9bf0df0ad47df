"""Do hooks or the user's own loop take too much of the time?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import USER_CODE
from closeranks.doctor.finding import LEAST_GAIN, Finding, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts


def find(facts: RunFacts) -> Iterator[Finding]:
    spent = max((facts.rank_s(rank, USER_CODE) for rank in facts.ranks), default=0.0)
    if (share := facts.share(spent)) < LEAST_GAIN:
        return
    hooks = facts.setting("run.hooks") or ()
    yield Finding(
        "user-code",
        f"Hooks and the user's own loop take {percent(share)} of the time.",
        (
            f"{milliseconds(spent)} of a step of {milliseconds(facts.step_s)}",
            *([f"hooks: {', '.join(map(str, hooks))}"] if hooks else []),
        ),
        "Do less in every step there, or move it to a thread.",
        gain=share,
    )
