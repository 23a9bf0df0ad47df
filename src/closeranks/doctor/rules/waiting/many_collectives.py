"""Do ranks wait for many collectives that are so small that each takes the latency of the link, whatever it carries?

Gradients in small buckets have a rule and a setting of their own (``small_buckets``); these are others, such as those
of the user's loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import Finding, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_MANY = 16
"""Collectives of one kind in a step,"""
_SMALL_BYTES = 16 << 10
"""and what each sends: at 1 GB/s less than the latency of most links."""
_LEAST_SHARE = 0.15
_BUCKETS_MIB = 1.0
"""Below this, ``small_buckets`` looks at what the data axis sends."""


def find(facts: RunFacts) -> Iterator[Finding]:
    has_small_buckets = 0 < facts.started.bucket_mib < _BUCKETS_MIB
    for name, exposed_s in facts.exposed_s.items():
        axis, dot, collective = name.partition(".")
        num, sent = facts.sent_each_step(name)
        if not dot or num < _MANY or sent > num * _SMALL_BYTES or (has_small_buckets and axis == "data"):
            continue
        if (share := facts.share(exposed_s)) < _LEAST_SHARE:
            continue
        yield Finding(
            "small-collectives",
            f"Ranks wait {percent(share)} of the time for small collectives ({collective.replace('_', '-')}, {axis} "
            "axis), each of which takes the latency of the link.",
            (
                f"{num:.4g} in a step, with {sent / num:.4g} bytes each",
                f"ranks wait {milliseconds(exposed_s)} of a step of {milliseconds(facts.step_s)} for them, "
                f"{milliseconds(exposed_s / num)} for each",
            ),
            _advice(axis),
            gain=share * (1 - 1 / num),
            explains=frozenset({"exposed-communication"}),
        )


def _advice(axis: str) -> str:
    if axis == "tensor":
        return "Larger micro-batches exchange more at a time; fewer ranks along the tensor axis exchange less often."
    return (
        "If your code calls them: put what they carry into one tensor and exchange it once, or only in some of the "
        "steps. closeranks profile shows where they are called."
    )
