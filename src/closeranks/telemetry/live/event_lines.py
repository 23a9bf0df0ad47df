"""Formats each event as one line for people. Pure: events and readings in, text out.

A step's line is a sequence of fields that can be fitted to a width. Invariant: the step and the loss are always there,
and what is not known is left out, never shown as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.core.events import (
    Evaluated,
    FlopsCounted,
    HostChanged,
    NoiseSeen,
    PushesDropped,
    RankLost,
    RanksClosed,
    Restored,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    SharesChanged,
    SlowRank,
    Snapshotting,
    Standstill,
    StepDone,
    Warned,
)
from closeranks.core.tracebacks import display_path
from closeranks.facts.devices import is_cpu
from closeranks.telemetry import formatting
from closeranks.telemetry.live.throughput import MeterReading


@dataclass(frozen=True, slots=True)
class LineField:
    """``label value`` in a step's line. If it is too wide, the highest ``drop_order`` is dropped first, 0 never."""

    label: str
    value: str
    drop_order: int = 0
    gap: str = "  "
    """Separator between this field and the one before."""

    @property
    def text(self) -> str:
        return f"{self.label} {self.value}" if self.label else self.value


def step_fields(
    started: RunStarted, done: StepDone, reading: MeterReading, *, num_skipped: int, detail: bool
) -> tuple[LineField, ...]:
    """The fields of a step's line, in reading order; ``detail`` adds learning rate and gradient norm."""
    of = f"/{started.last_step}" if started.last_step else ""
    fields = [LineField("step", f"{done.step:>5}{of}"), LineField("loss", formatting.number(done.loss))]
    if reading.items_per_s is None:
        fields.append(LineField("", f"first step {formatting.duration(done.seconds)}", drop_order=1))
    else:
        fields.append(LineField("", formatting.rate(reading.items_per_s, started.item), drop_order=1))
    fields += _peak_fields(reading)
    if done.memory_bytes:
        fields.append(LineField("mem", formatting.size(done.memory_bytes), drop_order=4))
    if reading.eta_s is not None and done.step < started.last_step:
        fields.append(LineField("eta", formatting.clock(reading.eta_s), drop_order=2))
        if reading.eta_error_s is not None and reading.eta_error_s >= 1:
            fields.append(LineField("", f"±{formatting.clock(reading.eta_error_s)}", drop_order=8, gap=" "))
    if reading.cost:
        fields.append(LineField("cost", reading.cost, drop_order=3))
    if detail:
        fields += [
            LineField("lr", f"{done.lr:.2e}", drop_order=7),
            LineField("grad", formatting.number(done.grad_norm), drop_order=7),
        ]
    fields += _metric_fields(done.metrics)
    if num_skipped:
        fields.append(LineField("skipped", str(num_skipped), drop_order=5))
    return tuple(fields)


def _peak_fields(reading: MeterReading) -> list[LineField]:
    measured = None if reading.peak_share is None else formatting.percent(reading.peak_share)
    if reading.mfu is None:
        return [] if measured is None else [LineField("peak", measured, drop_order=3)]
    fields = [LineField("mfu", formatting.percent(reading.mfu), drop_order=3)]
    if reading.hfu is not None:
        fields.append(LineField("hfu", formatting.percent(reading.hfu), drop_order=7))
    if measured is not None:
        fields.append(LineField("", f"(of measured peak {measured})", drop_order=8, gap=" "))
    return fields


def _metric_fields(metrics: Mapping[str, float]) -> list[LineField]:
    return [
        LineField(formatting.metric_label(name), formatting.metric(value), drop_order=6)
        for name, value in metrics.items()
    ]


def join(fields: Sequence[LineField]) -> str:
    return "".join((field.gap if place else "") + field.text for place, field in enumerate(fields))


def fit(fields: Sequence[LineField], width: int) -> tuple[LineField, ...]:
    """The fields that fit into ``width`` columns: the highest ``drop_order`` is dropped first, of equals the last."""
    kept = list(fields)
    while len(join(kept)) > width:
        place = max(range(len(kept)), key=lambda index: (kept[index].drop_order, index))
        if kept[place].drop_order == 0:
            break
        del kept[place]
    return tuple(kept)


def skipped_line(started: RunStarted, done: StepDone, num_skipped: int) -> str:
    scale = f", loss scale now {done.loss_scale:.0f}" if started.precision == "fp16" else ", the update was left out"
    so_far = f" ({num_skipped} so far)" if num_skipped > 1 else ""
    place = join(step_fields(started, done, _nothing_known(done), num_skipped=0, detail=False)[:1])
    return f"{place}  skipped: gradients not finite{scale}{so_far}"


def _nothing_known(done: StepDone) -> MeterReading:
    return MeterReading(done.step, done.loss, None, None, None, done.memory_bytes, None)


def is_logged(num_skipped: int) -> bool:
    """The first three skipped steps, then ever fewer: a run that keeps skipping does not flood the screen."""
    return num_skipped <= 3 or num_skipped & (num_skipped - 1) == 0


def started_line(started: RunStarted) -> str:
    """The model, the workers and the range of steps; and, once, which share of peak the lines will show."""
    workers = formatting.count(started.world_size, "worker")
    steps = f"steps {started.first_step + 1} to {started.last_step}"
    again = f"generation {started.generation}: " if started.generation else ""
    layout = f"{started.layout}, " if started.layout else ""
    text = f"{again}{parameters(started)} on {workers} ({layout}{started.device}, {started.precision}), {steps}"
    if started.generation:
        return "; ".join(filter(None, (text, started.apart)))
    text += f", global batch {batch}" if (batch := batch_words(started)) else ""
    return "; ".join(filter(None, (text, started.apart, _why_no_mfu(started))))


def batch_words(started: RunStarted) -> str:
    """``32 = 8 micro-batches of 4``; empty if it was not recorded."""
    if not started.micro_batch:
        return ""
    num_full, rest = divmod(started.global_batch, started.micro_batch)
    if num_full + bool(rest) == 1:
        return f"{started.global_batch} = one micro-batch"
    full = f"{num_full} micro-batch{'' if num_full == 1 else 'es'} of {started.micro_batch}"
    return f"{started.global_batch} = {full}" + (f" and one of {rest}" if rest else "")


def buckets_line(started: RunStarted) -> str:
    """The chosen bucket size and the measurement behind it; empty if the job sets it."""
    if started.link_latency_s is None or not started.link_bytes_per_s:
        return ""
    latency, rate = formatting.short_duration(started.link_latency_s), formatting.byte_rate(started.link_bytes_per_s)
    found = f"measured {latency} and {rate}"
    return f"buckets of {started.bucket_mib:g} MiB: {found} between ranks"


def parameters(started: RunStarted) -> str:
    total = f"{formatting.compact(started.num_params)} parameters"
    if started.num_trainable == started.num_params:
        return total
    return f"{total} ({formatting.compact(started.num_trainable)} of them trained)"


def _why_no_mfu(started: RunStarted) -> str:
    if not started.flops_per_item:
        return "no MFU before this model's FLOPs are known (telemetry.count_flops = true counts them)"
    if started.datasheet_flops:
        return ""
    device = "CPU" if is_cpu(started.device) else "device"
    if started.measured_flops:
        return f"no datasheet for this {device}: share of the measured matmul peak is shown instead of MFU"
    return f"no datasheet for this {device}, so no MFU is shown"


def flops_line(started: RunStarted, counted: FlopsCounted) -> str:
    """After the first step of a model whose FLOPs had to be counted."""
    if not counted.flops_per_item:
        return f"no MFU is shown, as this model's FLOPs could not be counted: {counted.why}"
    found = f"{formatting.compact(counted.flops_per_item)} FLOPs per {started.item}, forward and backward"
    return "; ".join(filter(None, (found, _why_no_mfu(counted.added_to(started)))))


def evaluated_line(event: Evaluated) -> str:
    metrics = join(_metric_fields(event.metrics))
    loss = f"eval at step {event.step}  loss {formatting.number(event.loss)}"
    bad = f"{event.num_bad} bad samples left out" if event.num_bad else ""
    return "  ".join(part for part in (loss, metrics, bad, f"({formatting.duration(event.seconds)})") if part)


def noise_line(event: NoiseSeen) -> str:
    """What it means for the batch size: at the noise scale, twice the samples save only a quarter of the steps."""
    if event.noise_scale is None:
        return f"noise at step {event.step}: gradients are still too noisy to tell which batch size pays off"
    scale = two_digits(event.noise_scale)
    means = "a larger batch still helps" if event.batch < event.noise_scale else f"batches beyond {scale} gain little"
    return f"noise scale about {scale} samples; a step now has {event.batch}: {means}"


def two_digits(value: float) -> str:
    """Two digits: the measurement is no more precise."""
    return f"{float(f'{value:.2g}'):g}" if value < 1e5 else formatting.compact(value)


def saved_line(event: Saved) -> str:
    stall = f", training paused {formatting.duration(event.stall_s)}" if event.stall_s else ""
    took = f"{formatting.size(event.bytes)}, {formatting.duration(event.seconds)}{stall}"
    return f"saved step {event.step}: {display_path(event.path)} ({took})"


def save_failed_line(event: SaveFailed) -> str:
    step = f"step {event.step} "
    what = event.what if event.what.startswith(step) else f"{step}was not saved: {event.what}"
    return f"{what}. Training continues, and the save is retried."


def resumed_line(event: Resumed) -> str:
    if event.step == 0:
        return f"starting with the weights of {display_path(event.path)}"
    return f"resumed at step {event.step} from {display_path(event.path)}"


def warned_line(event: Warned) -> str:
    return f"warning: {event.what}" if event.step is None else f"warning at step {event.step}: {event.what}"


_LOSS_VERBS = {
    "slow": "is replaced",
    "preempted": "leaves",
    "resize": "regroup",
}
_KILLS = ("killed", "oom")
_CAUSE_CHARS = 160


def lost_words(event: RankLost) -> str:
    """Which rank was lost, at which step and why: ``rank 1 lost at step 40 (killed by SIGKILL)``."""
    where = "while closing ranks" if event.generation else "before the first step"
    where = where if event.step is None else f"at step {event.step}"
    cause = event.cause.partition("\n")[0].strip()
    cause = cause.partition("; ")[0] if event.kind in _KILLS else cause  # hints on what to look for belong in a report
    cause = cause if len(cause) <= _CAUSE_CHARS else f"{cause[: _CAUSE_CHARS - 4]} ..."
    return f"{_who(event)} {_LOSS_VERBS.get(event.kind, 'lost')} {where}" + (f" ({cause})" if cause else "")


def _who(event: RankLost) -> str:
    host = f"host {event.host}" if event.host else "a host"
    match event.kind:
        case "host":
            return host
        case "zygote":
            return f"the zygote of {event.host}" if event.host else "the zygote"
        case "resize":
            return "the workers"
    return f"rank {event.rank}" if event.rank >= 0 else host if event.kind == "preempted" else "the workers"


def closing_line(event: RankLost) -> str:
    """While recovery is under way."""
    return f"{lost_words(event)}; closing ranks ..."


def closed_line(lost: RankLost, closed: RanksClosed, num_before: int) -> str:
    """The complete line, once a step is finished again; ``num_before`` is the number of workers before the fault."""
    words = [f"{lost_words(lost)}; closed ranks in {formatting.duration(closed.seconds)}"]
    if closed.num_redone > 1:
        words.append(f"{closed.num_redone} steps redone")
    if closed.world_size != num_before:
        layout = f" ({closed.layout})" if closed.layout else ""
        words.append(f"now on {formatting.count(closed.world_size, 'worker')}{layout}")
    return ", ".join(words)


_SOURCES = {
    "memory": "from memory",
    "peer": "from a peer's memory",
    "checkpoint": "from the checkpoint",
    "start": "from the beginning",
}


def restored_line(event: Restored) -> str:
    source = _SOURCES.get(event.source, f"from {event.source}")
    seconds = formatting.duration(event.seconds)
    return f"generation {event.generation} continues after step {event.step}, {source} ({seconds})"


_COPIES = {
    "replica": ", a second copy in each replica",
    "peer": ", a second copy with a peer",
    "peer on another host": ", a second copy with a peer on another host",
    "none": ", no second copy",
}


def snapshots_line(event: Snapshotting) -> str:
    """How often a snapshot is taken, how much memory it takes and what it costs."""
    every = "every step" if event.every == 1 else f"every {event.every} steps"
    where = _COPIES.get(event.copies, f", {event.copies}" if event.copies else "")
    size, cost = formatting.size(event.bytes), formatting.duration(event.cost_s)
    return f"state kept in memory {every} ({size} a rank{where}; {cost} a copy)"


def standstill_lines(event: Standstill) -> list[str]:
    """Who holds up the others and why, then what each rank does."""
    where = "before the first step" if event.step is None else f"at step {event.step}"
    who = f"rank {event.rank} {event.cause}" if event.rank >= 0 else event.cause
    lasted = f"nothing has moved for {formatting.duration(event.seconds)}" if event.seconds else "collectives mismatch"
    return [f"{lasted} {where}: {who}", *(f"  {line}" for line in event.lines)]


def slow_line(event: SlowRank) -> str:
    host = f" on {event.host}" if event.host else ""
    times = f"{formatting.duration(event.own_s)} a micro-batch, the others {formatting.duration(event.median_s)}"
    return f"rank {event.rank}{host} is slow at step {event.step}: {event.score:.2g} times the others ({times})"


_SHARES_SHOWN, _RUNS_SHOWN = 3, 6


def shares_line(event: SharesChanged) -> str:
    """Who takes how many micro-batches from now on; those whose share changes most come first."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, pair in enumerate(zip(event.before, event.shares, strict=False)):
        if pair[0] != pair[1]:
            alike.setdefault(pair, []).append(number)
    groups = sorted(alike.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    words = [_share_words(event, *group, is_first=group is groups[0]) for group in groups[:_SHARES_SHOWN]]
    if num_more := sum(len(numbers) for _, numbers in groups[_SHARES_SHOWN:]):
        words.append(f"and {formatting.count(num_more, 'other')} change")
    return f"from step {event.step + 1} on {', '.join(words)}"


def _share_words(event: SharesChanged, change: tuple[int, int], numbers: Sequence[int], *, is_first: bool) -> str:
    before, now = change
    of = f" of {sum(event.shares)} micro-batches" if is_first else ""
    who = f"{event.of}s {_listed(numbers)} take" if len(numbers) > 1 else f"{event.of} {numbers[0]} takes"
    return f"{who} {now}{of} instead of {before}"


def _listed(numbers: Sequence[int]) -> str:
    """``0 to 2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words if len(words) <= _RUNS_SHOWN else [*words[:_RUNS_SHOWN], "..."])


def dropped_line(event: PushesDropped) -> str:
    """Who was left out of steps, the most often first, and what became of the samples."""
    late = sorted(((count, worker) for worker, count in enumerate(event.dropped) if count), key=lambda one: -one[0])
    words = [f"worker {worker} was too late for {count:,} of {event.step:,} steps" for count, worker in late[:1]]
    words += [f"worker {worker} for {count:,}" for count, worker in late[1:_SHARES_SHOWN]]
    if num_more := len(late[_SHARES_SHOWN:]):
        words.append(f"{formatting.count(num_more, 'other')} for fewer")
    taken = f"{event.returned:,} of {sum(event.samples):,} samples were taken by a later step"
    waiting = f", {event.waiting:,} are still to be taken" if event.waiting else ""
    return f"{', '.join(words)}: {taken}{waiting}"


def host_line(event: HostChanged) -> str:
    size = f" with {formatting.count(event.num_workers, 'worker')}" if event.change == "joined" else ""
    change = f"is {event.change}" if event.change in ("leaving", "quarantined") else event.change
    return f"host {event.host} {change}{size}" + (f": {event.why}" if event.why else "")


_ENDINGS = {
    "finished": "finished at step {step} after {time}",
    "drained": "asked to stop: ended at step {step} after {time}",
    "stopped": "stopped at step {step} after {time}",
    "failed": "failed after step {step} and {time}",
}


def ended_line(event: RunEnded) -> str:
    words = _ENDINGS.get(event.reason, event.reason + " at step {step} after {time}")
    why = f": {event.detail}" if event.detail and event.reason == "stopped" else ""
    return words.format(step=event.step, time=formatting.duration(event.seconds)) + why
