"""Is communication between ranks exposed, that is, not hidden behind computation?

See [Note: exposed and uneven] in ``doctor.run_facts``: what is reported here is the transfer alone. Compression pays on
a link slower than the codec; elsewhere only fewer exchanges per sample help.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import Finding, SettingChange, milliseconds, percent
from closeranks.doctor.run_facts import RunFacts

_LEAST_SHARE = 0.15
_LEAST_OTHERWISE = 0.50
"""Where neither overlap nor compression helps, small jobs on few ranks often wait as long as this."""
_SLOW_LINK = 400e6
"""Bytes per second, below which compressing gradients on a CPU pays; a GPU compresses some 50 times as fast."""
_GPU_FASTER = 50.0
_INT8_BYTES = 1 / 3.9
"""int8 sends this share of the bytes of float32."""


def find(facts: RunFacts) -> Iterator[Finding]:
    by_axis: dict[str, float] = {}
    for name, spent in facts.exposed_s.items():
        axis = name.partition(".")[0] if "." in name else "data"
        by_axis[axis] = by_axis.get(axis, 0.0) + spent
    total = sum(by_axis.values())
    if facts.share(total) < _LEAST_SHARE:
        return
    axis = max(by_axis, key=lambda name: by_axis[name])
    evidence = [
        f"{milliseconds(spent)} of a step of {milliseconds(facts.step_s)} in {name}, on every rank alike"
        for name, spent in sorted(facts.exposed_s.items(), key=lambda item: -item[1])[:3]
        if spent >= 0.02 * facts.step_s
    ]
    finding = _on_data_axis(facts, by_axis[axis], evidence) if axis == "data" else _on_other_axis(facts, axis, by_axis)
    if facts.share(total) < _LEAST_OTHERWISE and not any(change.key.startswith("sync.") for change in finding[1]):
        return
    what = f"Ranks wait {percent(facts.share(total))} of the time for communication that nothing hides ({axis} axis)."
    advice, changes, gain = finding
    yield Finding("exposed-communication", what, tuple(evidence), advice, changes, gain)


_Advice = tuple[str, tuple[SettingChange, ...], float]


def _on_data_axis(facts: RunFacts, exposed_s: float, evidence: list[str]) -> _Advice:
    if (facts.setting("sync.overlap")) is False:
        return (
            "Exchange gradients while the backward pass computes.",
            (_change(facts, "sync.overlap", True),),
            (facts.share(exposed_s) / 2),
        )
    rate = _bytes_per_s(facts, exposed_s)
    slow = _SLOW_LINK if facts.is_cpu else _SLOW_LINK * _GPU_FASTER
    is_plain = facts.setting("sync.compress.name") in (None, "none") and facts.layout.zero < 3
    if is_plain and 0 < rate < slow:
        evidence.append(f"gradients travel at about {rate / 1e6:.3g} MB/s")
        gain = facts.share(exposed_s) * (1 - _INT8_BYTES)
        advice = "Compress gradients; closeranks compare shows what that costs in accuracy."
        return advice, (_change(facts, "sync.compress.name", "int8"),), gain
    batch = int(facts.started.global_batch or facts.setting("train.global_batch") or 0)
    changes = (SettingChange("train.global_batch", 2 * batch, batch),) if batch else ()
    advice = "Exchange gradients less often per sample: a larger batch, if the loss allows it, or [sync.local]."
    return advice, changes, facts.share(exposed_s) / 2


def _on_other_axis(facts: RunFacts, axis: str, by_axis: dict[str, float]) -> _Advice:
    size = getattr(facts.layout, axis, 1)
    advice = (
        f"Use fewer ranks along the {axis} axis, and keep them on one host: closeranks layout ls shows what fits."
        if size > 1
        else "Larger micro-batches exchange more at a time."
    )
    return advice, (), facts.share(by_axis[axis]) / 2


def _bytes_per_s(facts: RunFacts, exposed_s: float) -> float:
    """What a ring sends per rank for float32 gradients, over the time that is exposed: an upper bound of the time."""
    num = facts.layout.data
    sent = 4.0 * facts.started.num_trainable / max(1, facts.layout.tensor * facts.layout.pipeline)
    return 2 * (num - 1) / num * sent / exposed_s if exposed_s > 0 else 0.0


def _change(facts: RunFacts, key: str, value: object) -> SettingChange:
    return SettingChange(key, value, facts.setting(key))
