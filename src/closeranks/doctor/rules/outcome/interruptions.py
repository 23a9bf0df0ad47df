"""Did workers hang, stop or fail during the run, and do their collectives match?

A standstill that was explained while it lasted (``Standstill``) says more than the loss of a rank that followed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from closeranks.core.events import Standstill
from closeranks.doctor.finding import FAULT, Finding
from closeranks.doctor.run_facts import RunFacts

_PLANNED = frozenset({"resize", "preempted"})
_HUNG = frozenset({"hang", "stopped", "exception"})
"""What a standstill, or collectives that do not match, may end in."""
_ADVICE = {
    "branch": "Let every rank call the same collectives: a condition that differs between ranks must not surround one.",
    "order": "Let every rank call its collectives in the same order.",
    "shape": "Let every rank pass tensors of one shape: pad them, or gather their sizes first.",
    "dtype": "Let every rank pass tensors of one dtype.",
    "loader": "Look at the line of the dataset that does not return: a lock held at a fork is the usual cause.",
    "link": "Look at the network between these hosts.",
    "disk": "Look at the disk or the file system that this rank writes to.",
    "user_code": "Look at the line of the hook or the loop that does not return.",
    "hang": "The cause says where the ranks stood; see docs/hangs.md.",
    "stopped": "Something stopped the process or froze its cgroup: look at the host's job control.",
    "oom": "Use a smaller train.micro_batch, train.recompute = 'selective', or a layout that shards more.",
    "exception": "The worker's log in logs/ has the traceback.",
}


def find(facts: RunFacts) -> Iterator[Finding]:
    lost = [one for one in facts.lost if one.kind not in _PLANNED]
    explained = [one for one in facts.standstills if one.kind in _ADVICE and not _is_over(facts, one)]
    if explained:
        first = explained[0]
        yield Finding(
            f"{FAULT}{first.kind}",
            f"Ranks stood still: {first.cause}.",
            tuple(one.cause for one in explained[:2]) + tuple(first.lines[:4]),
            _ADVICE[first.kind],
            is_error=True,
        )
    unexplained = [one for one in lost if not (explained and one.kind in _HUNG)]
    if unexplained:
        kind, times = Counter(one.kind for one in unexplained).most_common(1)[0]
        of_kind = [one for one in unexplained if one.kind == kind]
        often = f" {len(unexplained)} times, mostly like this" if len(unexplained) > 1 else ""
        yield Finding(
            f"{FAULT}{kind}",
            f"The run was interrupted{often}: {of_kind[0].cause or kind}.",
            tuple(f"rank {one.rank} at step {one.step}: {one.cause or one.kind}" for one in of_kind[:3]),
            _ADVICE.get(kind, f"Find out what ended {times} of the workers; the host's log may say."),
            is_error=True,
        )


def _is_over(facts: RunFacts, one: Standstill) -> bool:
    """Whether the ranks went on by themselves: no worker of that generation was lost, and later steps were taken."""
    was_lost = any(lost.generation == one.generation for lost in facts.lost)
    return not was_lost and any(step.step > (one.step or 0) for step in facts.steps[-1:])
