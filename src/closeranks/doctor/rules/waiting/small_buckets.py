"""Are gradients reduced in many small collectives, each of which costs its latency?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_USUAL_MIB = 25.0
_MANY = 8
"""Times as many collectives as with the usual buckets."""


def find(facts: RunFacts) -> Iterator[Finding]:
    bucket_mib = facts.started.bucket_mib
    if bucket_mib <= 0 or bucket_mib >= 1.0:
        return
    mib = 4.0 * facts.started.num_trainable / max(1, facts.layout.tensor * facts.layout.pipeline) / 2**20
    num, usual = math.ceil(mib / bucket_mib), 1 + math.ceil(mib / _USUAL_MIB)
    exposed_s = sum(spent for name, spent in facts.exposed_s.items() if name.startswith("data."))
    gain = facts.share(exposed_s) * (1 - usual / num)
    if num < _MANY * usual or gain < LEAST_GAIN:
        return
    yield Finding(
        "small-collectives",
        f"Gradients are reduced in small pieces, whose latency takes {percent(facts.share(exposed_s))} of the time.",
        (
            f"buckets of {bucket_mib:g} MiB make up to {num} collectives a step; {_USUAL_MIB:g} MiB would make {usual}",
            f"ranks wait {milliseconds(exposed_s)} of a step of {milliseconds(facts.step_s)} for them",
        ),
        "Use larger buckets.",
        (
            SettingChange("sync.bucket_mib", _USUAL_MIB, facts.setting("sync.bucket_mib")),
            SettingChange("sync.first_bucket_mib", 1.0, facts.setting("sync.first_bucket_mib")),
        ),
        gain,
        frozenset({"exposed-communication"}),
    )
