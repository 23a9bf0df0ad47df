"""Are gradients reduced in many small collectives, whose latency and whose start take time?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from closeranks.core.phases import BACKWARD, FORWARD
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
    starting_s = _starting_s(facts)
    gain = facts.share(exposed_s + starting_s) * (1 - usual / num)
    if num < _MANY * usual or gain < LEAST_GAIN:
        return
    yield Finding(
        "small-collectives",
        f"Gradients are reduced in small pieces, whose latency takes {percent(facts.share(exposed_s))} of the time.",
        (
            f"buckets of {bucket_mib:g} MiB make up to {num} collectives a step; {_USUAL_MIB:g} MiB would make {usual}",
            f"ranks wait {milliseconds(exposed_s)} of a step of {milliseconds(facts.step_s)} for them",
            *(
                [f"backward takes {milliseconds(starting_s)} more than twice a forward: it starts them"]
                if starting_s
                else ()
            ),
        ),
        "Use larger buckets.",
        (
            SettingChange("sync.bucket_mib", _USUAL_MIB, facts.setting("sync.bucket_mib")),
            SettingChange("sync.first_bucket_mib", 1.0, facts.setting("sync.first_bucket_mib")),
        ),
        gain,
        frozenset({"exposed-communication"}),
    )


def _starting_s(facts: RunFacts) -> float:
    """What backward takes beyond twice a forward, which is what its arithmetic takes: it starts the collectives."""
    if facts.layout.pipeline > 1 or facts.setting("train.recompute") not in (None, "none"):
        return 0.0
    return max(0.0, facts.mean_s(BACKWARD) - 2 * facts.mean_s(FORWARD))
