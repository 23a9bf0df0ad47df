"""Writes ``report.md``: the result of a run on one page.

Written from the run folder alone, so that a run which failed gets a report too. Invariant: a figure is shown only if it
was recorded; what is missing is said to be missing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from closeranks.core.events import Evaluated, RunStarted, Saved, StepDone
from closeranks.core.printable import printable
from closeranks.facts.devices import is_cpu
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.loss_target import load_target, target_words
from closeranks.telemetry.goodput.run_account import load_account
from closeranks.telemetry.goodput.run_cost import find_price
from closeranks.telemetry.live.event_lines import batch_words, noise_line, parameters
from closeranks.telemetry.live.throughput import efficiency
from closeranks.telemetry.reports.data_wait import data_wait
from closeranks.telemetry.reports.fault_section import fault_section
from closeranks.telemetry.reports.goodput_section import goodput_section
from closeranks.telemetry.reports.phase_section import phase_section
from closeranks.telemetry.reports.resource_section import resource_section
from closeranks.telemetry.run_log.gaps import lacking_ranks
from closeranks.telemetry.run_log.phase_history import PhaseHistory, load_phases
from closeranks.telemetry.run_log.resource_history import ResourceHistory, load_resources
from closeranks.telemetry.run_log.run_folder import ResolvedSettings, RunFolder
from closeranks.telemetry.run_log.run_history import RunHistory, WarningCount, load_history

_WARNINGS_SHOWN = 10
FindingsSection = Callable[[ResolvedSettings, RunHistory, PhaseHistory, ResourceHistory], str]
"""Writes a section of markdown about what holds a run back, empty if nothing does."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """How the run was started, for the commands that resume or repeat it."""

    job_file: str
    overrides: tuple[str, ...] = ()
    is_script: bool = False
    """The model and the data came from Python: no job file can name them."""


def write_report(
    folder: Path,
    *,
    job_file: str = "",
    overrides: Sequence[str] = (),
    failure: str = "",
    is_script: bool = False,
    findings: FindingsSection | None = None,
) -> Path:
    """Write ``report.md`` into the run folder.

    ``job_file`` and ``overrides`` are what the user typed (the folder's own copy if not given); ``failure`` is the
    description of what ended the run, shown as it is; ``findings`` writes the section about what holds the run back.
    """
    run = RunFolder(folder)
    command = RunCommand(job_file or str(run.job), tuple(overrides), is_script)
    text = printable(compose(run, load_history(folder), command, failure, findings))
    unfinished = run.report.with_name(".report.md")
    try:
        unfinished.write_text(text, encoding="utf-8")
        return unfinished.replace(run.report)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def compose(
    run: RunFolder,
    history: RunHistory,
    command: RunCommand,
    failure: str = "",
    findings: FindingsSection | None = None,
) -> str:
    """The whole report."""
    settings = run.resolved()
    name = str(settings.get("run.name") or run.path.resolve().name)
    plot = f"![Loss, throughput, learning rate and gradient norm]({run.plot.name})" if run.plot.exists() else ""
    phases, resources = load_phases(run.path), load_resources(run.path)
    sections = (
        f"# {name}",
        headline(history, failed=bool(failure)),
        _failure_section(run, failure),
        plot,
        _table(_figures(run, history, settings)),
        _notes(run, history),
        findings(settings, history, phases, resources) if findings is not None else "",
        phase_section(phases, history.first_steps, _name_of(run.phase_plot), len(history.starts)),
        _goodput(run, history),
        resource_section(resources, _name_of(run.memory_plot)),
        fault_section(history, failed=bool(failure)),
        _warning_section(history.warnings),
        _next_section(run, history, settings, command),
        _environment_section(history.started),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _name_of(picture: Path) -> str:
    """Empty if it was not drawn."""
    return picture.name if picture.exists() else ""


def _notes(run: RunFolder, history: RunHistory) -> str:
    """What of the metrics was not read, or could not be."""
    num_recorded = sum(path.stat().st_size > 0 for path in (run.metrics(0), *run.other_metrics()) if path.exists())
    gaps = lacking_ranks(num_recorded, history.started.world_size) if history.started else ()
    return "\n\n".join(f"Note: {note}." for note in (*history.notes, *gaps))


def _goodput(run: RunFolder, history: RunHistory) -> str:
    started = history.started
    if started is None:
        return ""
    price, note = find_price(run.path, started.device)
    account, plot = load_account(run.path), _name_of(run.goodput_plot)
    return goodput_section(account, price, started.device, started.item, note, plot)


def headline(history: RunHistory, *, failed: bool = False) -> str:
    """The first line: what ran, for how long, and what it reached."""
    if not history.steps:
        return "No step was recorded: the run ended before its first step was done."
    parts = [_what_ran(history), _loss_change(history.taken), _eval_words(history.evals), _survived(history)]
    text = "; ".join(part for part in parts if part) + "."
    return f"{text} {ending}" if (ending := _ending(history, failed)) else text


def _what_ran(history: RunHistory) -> str:
    started = history.started
    workers = f" on {formatting.count(started.world_size, 'worker')}" if started is not None else ""
    taken = f"Trained {formatting.count(history.num_steps, 'step')}{workers} in {formatting.duration(history.seconds)}"
    return f"{taken} ({history.num_skipped} skipped)" if history.num_skipped else taken


def _loss_change(taken: Sequence[StepDone]) -> str:
    if not taken:
        return "no update was taken: the gradients of every step were not finite"
    return f"loss {formatting.brief(taken[0].loss)} -> {formatting.brief(taken[-1].loss)}"


def _eval_words(evals: Sequence[Evaluated]) -> str:
    if not evals:
        return ""
    metrics = "".join(f", {name} {formatting.metric(value)}" for name, value in evals[-1].metrics.items())
    return f"eval {formatting.brief(evals[-1].loss)}{metrics}"


def _survived(history: RunHistory) -> str:
    num = sum(fault.closed is not None for fault in history.fault_history.faults)
    return f"closed ranks after {formatting.count(num, 'fault')}" if num else ""


def _why(history: RunHistory) -> str:
    return f": {history.ended.detail}" if history.ended is not None and history.ended.detail else ""


def _ending(history: RunHistory, failed: bool) -> str:
    last = history.steps[-1].step
    goal = f" of {history.started.last_step}" if history.started is not None and history.started.last_step else ""
    reason = "failed" if failed else history.ended.reason if history.ended is not None else "unknown"
    endings = {
        "finished": "",
        "drained": f"It was asked to stop and ended cleanly at step {last}{goal}.",
        "stopped": f"It was stopped at step {last}{goal}{_why(history)}.",
        "failed": f"**It failed** after step {last}{goal}.",
        "unknown": f"**It did not end cleanly**: nothing was recorded after step {last}{goal}.",
    }
    return endings.get(reason, f"It ended at step {last}{goal}: {reason}.")


def _failure_section(run: RunFolder, failure: str) -> str:
    if not failure:
        return ""
    logs = f"\n\nWhat each worker printed is in `{run.log(0).parent.name}/`." if run.log(0).parent.is_dir() else ""
    return f"## What went wrong\n\n```text\n{failure.strip()}\n```{logs}"


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A row of the table; an empty value is left out."""

    label: str
    value: str


def _table(figures: Sequence[ReportFigure]) -> str:
    rows = [f"| {figure.label} | {figure.value} |" for figure in figures if figure.value]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _figures(run: RunFolder, history: RunHistory, settings: ResolvedSettings) -> tuple[ReportFigure, ...]:
    started = history.started
    if started is None:
        return ()
    devices = ", ".join(filter(None, (f"{started.world_size} × {started.device}", started.layout, started.precision)))
    return (
        ReportFigure("model", ", ".join(filter(None, (_model_name(settings), parameters(started)))).replace("|", "/")),
        ReportFigure("workers", devices.replace("|", "/")),
        ReportFigure("replicas", started.apart),
        ReportFigure("batch", _batch(started, settings)),
        ReportFigure("learning rate", started.rate.removeprefix("learning rate ")),
        ReportFigure("noise", noise_line(history.noise) if history.noise is not None else ""),
        ReportFigure("steps", _steps(history, started)),
        ReportFigure("loss", _loss_figure(history)),
        ReportFigure("evaluation", _eval_figure(history.evals)),
        ReportFigure("target loss", _target(run, started)),
        ReportFigure("time", _time(history)),
        ReportFigure("throughput", _throughput(history, started)),
        *_peaks(history, started),
        ReportFigure("memory", _memory(history, started)),
        ReportFigure("gradients", _gradients(history, started)),
        ReportFigure("waiting for data", _data_wait(history)),
        ReportFigure("bad samples", _bad_samples(history)),
        ReportFigure("checkpoint", _checkpoint(run, history)),
    )


def _target(run: RunFolder, started: RunStarted) -> str:
    target = load_target(run.path)
    price, _ = find_price(run.path, started.device)
    return "" if target is None else target_words(target, price, started.device, started.item)


def _gradients(history: RunHistory, started: RunStarted) -> str:
    """How gradients are reduced, and the compression error if it was measured."""
    if not started.sync or not history.compressed:
        return started.sync
    error, cosine = (
        median(values) for values in zip(*((one.relative_error, one.cosine) for one in history.compressed), strict=True)
    )
    return (
        f"{started.sync}; in {len(history.compressed)} measured steps an error of {error:.3g}, a cosine of {cosine:.3f}"
    )


_SHAPE = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "tied")


def _model_name(settings: ResolvedSettings) -> str:
    """A preset that keys of the job have changed is no longer that model: those keys are named with it."""
    name, preset = settings.get("model.name"), settings.get("model.preset")
    if not name or not preset:
        return str(name or "")
    changed = [f"{key} {value}" for key in _SHAPE if (value := settings.get(f"model.{key}")) is not None]
    return f"{name} with {', '.join(changed)}, the rest as in {preset}" if changed else f"{name} {preset}"


def _batch(started: RunStarted, settings: ResolvedSettings) -> str:
    whole, length = settings.get("train.global_batch"), settings.get("data.seq_len")
    batch_text = batch_words(started) or (str(whole) if whole else "")
    parts = (f"{batch_text} samples" if batch_text else "", f"{length} tokens each" if length else "")
    return ", ".join(filter(None, parts))


def _steps(history: RunHistory, started: RunStarted) -> str:
    if not history.steps:
        return ""
    first, last = history.steps[0].step, history.steps[-1].step
    words = [f"{first} to {last}" + (f" of {started.last_step}" if last < started.last_step else "")]
    words.append(f"{formatting.compact(sum(step.items for step in history.counted))} {started.item}s")
    if history.num_skipped:
        words.append(f"{history.num_skipped} skipped because gradients were not finite")
    if history.restarts:
        words.append(f"resumed after step {', '.join(str(step) for step in history.restarts)}")
    return ", ".join(words)


def _loss_figure(history: RunHistory) -> str:
    taken = history.taken
    if not taken:
        return ""
    last = taken[-max(1, min(10, len(taken) // 10)) :]
    mean = sum(step.loss for step in last) / len(last)
    ends = (
        f"{formatting.number(taken[0].loss)} at step {taken[0].step}, {formatting.number(taken[-1].loss)} at the last"
    )
    return ends if len(last) == 1 else f"{ends} (mean of the last {len(last)}: {formatting.number(mean)})"


def _eval_figure(evals: Sequence[Evaluated]) -> str:
    if not evals:
        return "none was made"
    last = evals[-1]
    metrics = "".join(f", {name} {formatting.metric(value)}" for name, value in last.metrics.items())
    lowest = min(evals, key=lambda event: event.loss)
    beside = f" (lowest {formatting.number(lowest.loss)} at step {lowest.step})" if lowest is not last else ""
    return f"loss {formatting.number(last.loss)}{metrics} at step {last.step}{beside}"


def _time(history: RunHistory) -> str:
    work = history.throughput()
    parts = (
        ("first step" if len(history.first_steps) <= 1 else "first steps", work.first_steps_s),
        ("further steps", work.seconds),
        ("evaluation", history.pauses.evals_s),
        ("saving", history.pauses.saves_s),
        ("faults", history.lost_s),
    )
    spent = ", ".join(f"{label} {formatting.duration(seconds)}" for label, seconds in parts if seconds > 0)
    return f"{formatting.duration(history.seconds)}" + (f" ({spent})" if spent else "")


def _throughput(history: RunHistory, started: RunStarted) -> str:
    average = history.throughput().items_per_s
    if average is None:
        return "too short to measure (a process's first step does not count)"
    return f"{formatting.rate(average, started.item)} on average, without first steps, evaluation and saving"


def _peaks(history: RunHistory, started: RunStarted) -> tuple[ReportFigure, ...]:
    average, counted = history.throughput().items_per_s, history.flops_counted
    if counted is not None and counted.why:
        return (ReportFigure("MFU", f"not shown, as FLOPs could not be counted: {counted.why}".replace("|", "/")),)
    if average is None:
        return ()
    shares = efficiency(started, average)
    measured = (
        "" if shares.peak_share is None else f"{formatting.percent(shares.peak_share)} of the measured matmul peak"
    )
    if shares.mfu is None:
        return (
            ReportFigure("share of peak", f"{measured} (no datasheet for this device, so no MFU)" if measured else ""),
        )
    hfu = f", HFU {formatting.percent(shares.hfu)} with what is recomputed" if shares.hfu is not None else ""
    return (ReportFigure("MFU", f"{formatting.percent(shares.mfu)}{hfu}" + (f" ({measured})" if measured else "")),)


def _memory(history: RunHistory, started: RunStarted) -> str:
    most = max((step.memory_bytes for step in history.counted), default=0)
    kind = "resident in rank 0's process" if is_cpu(started.device) else "at its peak on rank 0's device"
    return f"{formatting.size(most)} {kind}" if most else ""


def _data_wait(history: RunHistory) -> str:
    return data_wait([step for step in history.steps if step.step not in history.first_steps])


def _bad_samples(history: RunHistory) -> str:
    bad = sum(step.num_bad for step in history.counted)
    return f"{bad} skipped and excluded from the loss" if bad else ""


def _checkpoint(run: RunFolder, history: RunHistory) -> str:
    saved = latest_save(run, history)
    if saved is None:
        return "none was written"
    name = saved.path.rstrip("/").rpartition("/")[2]
    part = re.fullmatch(r"step-\d+-(\d+)", name)
    about = f" (-{part[1]}: saved after the run was opened again; a higher number is always newer)" if part else ""
    return f"`{name}`{about}, {formatting.size(saved.bytes)}"


def latest_save(run: RunFolder, history: RunHistory) -> Saved | None:
    """The checkpoint to resume from: the latest that still exists; one in an object store is assumed to exist."""
    saves = reversed(history.saves)
    return next((event for event in saves if "://" in event.path or Path(event.path).exists()), None)


def _warning_section(warnings: Sequence[WarningCount]) -> str:
    if not warnings:
        return ""
    rows = [f"- {_warning(warning)}" for warning in warnings[:_WARNINGS_SHOWN]]
    if len(warnings) > _WARNINGS_SHOWN:
        rows.append(f"- and {len(warnings) - _WARNINGS_SHOWN} more, in the metrics files")
    return "\n".join(["## Warnings", "", *rows])


def _warning(warning: WarningCount) -> str:
    words = [f"step {warning.first_step}"] if warning.first_step is not None else []
    if warning.ranks != (0,):
        label = "rank" if len(warning.ranks) == 1 else "ranks"
        words.append(f"{label} {', '.join(str(rank) for rank in warning.ranks)}")
    if warning.times > 1:
        words.append(f"{warning.times} times")
    return warning.what + (f" ({', '.join(words)})" if words else "")


def _next_section(run: RunFolder, history: RunHistory, job: ResolvedSettings, command: RunCommand) -> str:
    started = history.started
    state = _resumable(run, latest_save(run, history))
    if command.is_script:
        return _next_in_python(started, job, state)
    if started is None or state is None:
        again = _shell(["closeranks", "train", command.job_file, *command.overrides])
        return f"## Start again\n\nNo state was saved to resume from.\n\n```bash\n{again}\n```"
    is_done = bool(history.steps) and history.steps[-1].step >= started.last_step
    settings = [item for item in command.overrides if not item.startswith("checkpoint.resume=")]
    if is_done:
        settings = [item for item in settings if not item.startswith(("train.steps=", "train.epochs="))]
        key, value = _twice(started, job)
        settings.append(f"train.{key}={value}")
    workers = ["-n", str(started.world_size)] if started.world_size > 1 else []
    rows = [_shell(["closeranks", "train", command.job_file, *workers, *settings, f"checkpoint.resume={state}"])]
    if started.item == "token":
        rows.append(_shell(["closeranks", "sample", str(run.path), "import "]))
    return "\n".join(["## Continue", "", "```bash", *rows, "```"])


def _twice(started: RunStarted, job: ResolvedSettings) -> tuple[str, str]:
    """The key that sets the job's length, and twice its value."""
    epochs = job.get("train.epochs")
    return ("epochs", f"{2 * epochs:g}") if epochs else ("steps", str(2 * started.last_step))


def _resumable(run: RunFolder, saved: Saved | None) -> str | None:
    """The run itself if it keeps its checkpoints: if the newest is damaged, the one before it is used."""
    if saved is None:
        return None
    is_inside = run.checkpoints.resolve() in Path(saved.path).resolve().parents
    return str(run.path) if is_inside else saved.path


def _next_in_python(started: RunStarted | None, job: ResolvedSettings, state: str | None) -> str:
    if started is None or state is None:
        return ""
    key, value = _twice(started, job)
    tables = f'train={{"{key}": {value}, ...}}, checkpoint={{"resume": "{state}"}}'
    return f"## Continue\n\nPass these tables to the session in your script:\n\n```python\nSession(..., {tables})\n```"


def _shell(words: Sequence[str]) -> str:
    return shlex.join(words)


def _environment_section(started: RunStarted | None) -> str:
    if started is None or not started.versions:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in started.versions.items())
    return f"## Environment\n\n{versions}, on {started.device}. The resolved job is in `config.json`."
