"""Does training wait for batches to reach the device?"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.phases import HOST_TO_DEVICE
from closeranks.doctor.finding import LEAST_GAIN, Finding, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts


def find(facts: RunFacts) -> Iterator[Finding]:
    spent = facts.mean_s(HOST_TO_DEVICE)
    if (share := facts.share(spent)) < LEAST_GAIN:
        return
    yield Finding(
        "host-to-device",
        f"Copying batches to the device takes {percent(share)} of the time.",
        (f"a step of {milliseconds(facts.step_s)} waits {milliseconds(spent)} for its batch to be copied",),
        "Send fewer bytes: keep images as uint8 and convert them on the device, send token ids instead of one-hot "
        "vectors, and leave out tensors that the model does not read.",
        gain=share,
    )
