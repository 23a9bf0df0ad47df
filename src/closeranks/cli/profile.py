"""``closeranks profile``: traces the next steps of a run while it trains, all ranks in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.status import existing_run
from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.telemetry.traces.trace_collector import CollectedTraces
    from closeranks.telemetry.traces.trace_summary import TraceSummary

HELP = """Trace the next steps of a run while it trains, with torch's profiler.

\b
  closeranks profile runs/tiny                      the next 3 steps, all ranks
  closeranks profile runs/tiny --steps 1 --rank 0 --rank 7
  closeranks profile runs/tiny --out trace.json.gz

All ranks trace the same steps. Their traces are merged into one file for https://ui.perfetto.dev or
chrome://tracing: a process for each rank, on one clock, with the phases of each step above what torch recorded.
The operations that took longest are printed, and on a GPU how long it was idle; summary.json holds the figures.

It works for every run whose folder you can write to, however it was started. Training continues: the traced
steps are slower, and no number changes. The run answers after a step, so a slow step takes as long as it takes.
"""


def register(app: typer.Typer) -> None:
    app.command("profile", help=HELP, short_help="Trace the next steps of a run while it trains.")(profile)


def profile(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many steps to trace.")] = 3,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Trace this rank; repeatable. All when left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The merged trace, .json or .json.gz; in the run folder when left out.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait while nothing happens.")] = 600.0,
) -> None:
    from closeranks.core.errors import CloseranksError
    from closeranks.telemetry.traces.trace_collector import TraceCollector
    from closeranks.telemetry.traces.trace_mailbox import new_request

    folder = existing_run(run)
    _check_out(out)
    collected = TraceCollector(folder, safe_echo, timeout).collect(new_request(steps, sorted(set(rank or ()))))
    if collected.paths:
        _merge(collected, out or collected.folder / "trace.json.gz")
    if collected.missing:
        whys = "; ".join(f"rank {one}: {why}" for one, why in collected.missing.items())
        raise CloseranksError(f"not every rank has a trace ({whys})", "Ask again.")


def _check_out(out: Path | None) -> None:
    from closeranks.core.errors import UserError

    if out is None:
        return
    if not out.name.endswith((".json", ".json.gz")):
        raise UserError(f"--out {out} is neither .json nor .json.gz", "Viewers go by the name.")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.absolute().parent}", "Create it first.")


def _merge(collected: CollectedTraces, out: Path) -> None:
    from closeranks.core.errors import UserError
    from closeranks.telemetry.traces.merge import merge_traces, write_summary
    from closeranks.telemetry.traces.rank_trace import TraceDamaged

    try:
        summary = merge_traces(collected.paths, out)
        write_summary(summary, collected.folder / "summary.json")
    except TraceDamaged as error:
        raise UserError(str(error), "Ask again.") from error
    except OSError as error:
        what = f"the merged trace {out} cannot be written: {error.strerror or error}"
        raise UserError(what, f"Make room there. The traces of the ranks are in {collected.folder}.") from error
    _print(summary, out, collected.folder / "summary.json")


def _print(summary: TraceSummary, out: Path, figures: Path) -> None:
    from closeranks.telemetry import formatting
    from closeranks.telemetry.traces.trace_summary import summary_lines

    ranks = formatting.count(len(summary.ranks), "rank")
    first, last = summary.first_step, summary.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    error_s = summary.clock_error_s
    clock = "unknown" if error_s is None else f"within {formatting.short_duration(error_s)}"
    safe_echo(f"\n{out}: {steps} of {ranks}, {formatting.size(out.stat().st_size)}")
    safe_echo("Open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.")
    safe_echo(f"The clocks of the ranks agree {clock}. Figures for programs: {figures}")
    safe_echo("\n".join(summary_lines(summary)))
