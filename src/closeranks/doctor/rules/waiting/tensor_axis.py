"""Does the tensor axis cross hosts, so that every layer waits for the network?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, percent
from closeranks.doctor.run_facts import RunFacts
from closeranks.facts.mesh import tensor_axis_warning


def find(facts: RunFacts) -> Iterator[Finding]:
    hosts = [used[0].host_number for _, used in sorted(facts.resources.items()) if used]
    if facts.layout.tensor == 1 or len(hosts) != facts.started.world_size:
        return
    warning = tensor_axis_warning(facts.layout, hosts)
    waited = facts.share(sum(spent for name, spent in facts.exposed_s.items() if name.startswith("tensor.")))
    if not warning or waited < LEAST_GAIN:
        return
    what, _, advice = warning.partition(". ")
    yield Finding(
        "tensor-across-hosts",
        f"{what[:1].upper()}{what[1:]}.",
        (f"ranks wait {percent(waited)} of the time for the collectives of the tensor axis",),
        advice,
        gain=waited,
        explains=frozenset({"exposed-communication"}),
    )
