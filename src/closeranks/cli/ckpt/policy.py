"""``closeranks ckpt policy``: computes how often to save, and what it costs.

Imports no torch. Invariant: standard output holds the policy and nothing else, so that ``--json`` can be piped; values
come from the command line first, then from what a run measured, then from the defaults that the help names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from closeranks.plan.policy import CheckpointPolicy, CheckpointScenario

HELP = """Say how often a job should save, from how often it fails and what a save costs.

\b
  closeranks ckpt policy --mtbf 3h --state 14GB
  closeranks ckpt policy --ranks 1024 --on-demand --save-cost 0.5s --durable 20s
  closeranks ckpt policy --run runs/tiny --mtbf 8h
  closeranks ckpt policy --jobs 16 --remote-bandwidth 2GB/s --picture policy.png
  closeranks ckpt policy --mtbf 11min --json > policy.json

It prints the interval for each place, the work lost per failure, the share of time lost against other policies, what is
written and kept, the slowdown when many jobs share one store, and a [checkpoint] table to paste into the job. The
picture shows the same. Without options: a job of 24 hours on preemptible machines that fails every 3 hours.
"""

_SPARE = ("cost", "kept", "written", "saves", "store in use", "redo per failure", "needed every")
"""Columns that a narrow terminal leaves out, in this order."""
_BANDWIDTH, _REMOTE_BANDWIDTH = "1.5GB/s", "0.5GB/s"


def register(app: typer.Typer) -> None:
    app.command("policy", help=HELP, short_help="How often to save, and what it costs.")(policy)


def policy(
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of the job, like 90min.  [default: 3h]")] = "",
    ranks: Annotated[int, typer.Option(min=0, help="Without --mtbf: estimate it for this many ranks.")] = 0,
    save_cost: Annotated[str, typer.Option(help="How long a save stalls training.  [default: 0.05s]")] = "",
    durable: Annotated[
        str, typer.Option(help="Until a save is durable on the nearest disk.  [default: from --bandwidth]")
    ] = "",
    restart: Annotated[str, typer.Option(help="From a failure until training resumes.  [default: 60s]")] = "",
    step: Annotated[str, typer.Option(help="Duration of one training step.  [default: 1s]")] = "",
    state: Annotated[str, typer.Option(help="Size of the whole state.  [default: 14GB]")] = "",
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of the nearest disk.  [default: 1.5GB/s]")] = "",
    remote_bandwidth: Annotated[
        str, typer.Option(help="Bandwidth of the store that all jobs share; 0B: none.  [default: 0.5GB/s]")
    ] = "",
    price: Annotated[float, typer.Option(min=0, help="Price of the store per GB and month.")] = 0.023,
    jobs: Annotated[int, typer.Option(min=1, help="Number of such jobs that share the store.")] = 1,
    length: Annotated[str, typer.Option(help="Training time without failures and saves.")] = "24h",
    machine_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Share of failures that take the local disk with them.")
    ] = 0.25,
    drag: Annotated[float, typer.Option(min=0, max=1, help="Share of speed lost while a save is written.")] = 0.01,
    keep: Annotated[int, typer.Option(min=2, help="Checkpoints kept in each place.")] = 3,
    preemptible: Annotated[bool, typer.Option("--preemptible/--on-demand", help="Machines can be preempted.")] = True,
    run: Annotated[Path | None, typer.Option(help="Use the costs that this run measured.", metavar="RUN")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG.", metavar="OUT.png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    from closeranks.cli.pictures import check_picture, picture_errors_explained
    from closeranks.plan.policy import CheckpointScenario, policy_for

    base = CheckpointScenario(
        price=price, num_jobs=jobs, machine_loss=machine_loss, drag=drag, keep_last=keep, is_preemptible=preemptible
    )
    options = PolicyOptions(mtbf, ranks, length, save_cost, durable, restart, step, state, bandwidth, remote_bandwidth)
    measured = _measured(run) if run is not None else MeasuredSaves()
    scenario = _scenario(base, options, measured)
    check_picture(picture)
    found = policy_for(scenario)
    if picture is not None:
        from closeranks.plan.policy_picture import draw_policy

        with picture_errors_explained(picture):
            draw_policy(found, picture)
    if as_json:
        _print_json(found)
    else:
        _print(found, measured, picture)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options as they were typed; empty if not given."""

    mtbf: str
    ranks: int
    length: str
    save_cost: str
    durable: str
    restart: str
    step: str
    state: str
    bandwidth: str
    remote_bandwidth: str


@dataclass(frozen=True, slots=True)
class MeasuredSaves:
    """What a run measured about its saves; 0 where nothing was measured."""

    num_saves: int = 0
    stall_s: float = 0.0
    durable_s: float = 0.0
    transfer_s: float = 0.0
    """From the first storage tier to the second."""
    state_bytes: float = 0.0
    step_s: float = 0.0
    num_ranks: int = 0
    num_faults: int = 0
    uptime_s: float = 0.0


def _measured(run: Path) -> MeasuredSaves:
    from statistics import median

    from closeranks.core.errors import UserError
    from closeranks.core.events import Saved
    from closeranks.telemetry.run_log.recorder import read_events
    from closeranks.telemetry.run_log.run_folder import RunFolder
    from closeranks.telemetry.run_log.run_history import load_history

    metrics = RunFolder(run).metrics(0)
    if not metrics.is_file():
        raise UserError(f"{run} is not a run folder", "Name the folder that `closeranks train` printed.")
    events = [fields for fields, event in read_events(metrics) if isinstance(event, Saved)]
    saves = [fields for fields in events if fields.get("tier", "primary") == "primary"]
    if not saves:
        raise UserError(f"{run} has saved nothing yet", "Give --save-cost and --durable instead of --run.")
    history, durable_s = load_history(run, all_steps=True), median(float(fields["seconds"]) for fields in saves)
    transfers_s = [float(fields["seconds"]) - durable_s for fields in events if fields.get("tier") == "remote"]
    counted = [step.seconds for step in history.steps if step.step not in history.first_steps]
    return MeasuredSaves(
        num_saves=len(saves),
        stall_s=median(float(fields.get("stall_s", fields["seconds"])) for fields in saves),
        durable_s=durable_s,
        transfer_s=max(0.0, median(transfers_s)) if transfers_s else 0.0,
        state_bytes=float(max(fields["bytes"] for fields in saves)),
        step_s=median(counted) if counted else 0.0,
        num_ranks=history.started.world_size if history.started is not None else 1,
        num_faults=len(history.restarts),
        uptime_s=history.seconds,
    )


def _scenario(base: CheckpointScenario, options: PolicyOptions, measured: MeasuredSaves) -> CheckpointScenario:
    """The command line first, then the run, then the defaults."""
    stall_s = _seconds("--save-cost", options.save_cost) if options.save_cost else measured.stall_s or base.stall_s
    state_bytes = _positive("--state", options.state) if options.state else measured.state_bytes or base.state_bytes
    if options.durable:
        durable_s = _seconds("--durable", options.durable)
    elif options.bandwidth or not measured.durable_s:
        durable_s = state_bytes / _positive("--bandwidth", options.bandwidth or _BANDWIDTH)
    else:
        durable_s = measured.durable_s
    if options.remote_bandwidth or not measured.transfer_s:
        remote = _bytes("--remote-bandwidth", options.remote_bandwidth or _REMOTE_BANDWIDTH)
    else:
        remote = state_bytes / measured.transfer_s
    return replace(
        base,
        mtbf_s=_mtbf_s(base, options, measured),
        length_s=_seconds("--length", options.length),
        state_bytes=state_bytes,
        durable_s=max(durable_s, stall_s),
        stall_s=stall_s,
        restart_s=_seconds("--restart", options.restart) if options.restart else base.restart_s,
        step_s=_seconds("--step", options.step) if options.step else measured.step_s or base.step_s,
        remote_bytes_per_s=remote,
    )


def _mtbf_s(base: CheckpointScenario, options: PolicyOptions, measured: MeasuredSaves) -> float:
    """As given; else estimated from the number of ranks and the run's faults; else that of preemptible machines."""
    from closeranks.facts.checkpoint_policy.save_interval import learned_mtbf_s, prior_mtbf_s

    if options.mtbf:
        return _seconds("--mtbf", options.mtbf)
    num_ranks = options.ranks or measured.num_ranks
    if num_ranks or not base.is_preemptible:
        return learned_mtbf_s(prior_mtbf_s(num_ranks), measured.uptime_s, measured.num_faults)
    return base.mtbf_s


def _seconds(option: str, text: str) -> float:
    from closeranks.checkpoint.config import seconds_of

    try:
        return seconds_of(text)
    except ValueError:
        raise _refusal(option, text, "is not a duration", "90s, 10min or 3h") from None


def _bytes(option: str, text: str) -> float:
    from closeranks.cli.ckpt.transfer_progress import bytes_of

    try:
        return bytes_of(text.strip().upper().removesuffix("/S"))
    except ValueError:
        raise _refusal(option, text, "is not a number of bytes", "14GB, 512MiB or 1.5GB/s") from None


def _positive(option: str, text: str) -> float:
    found = _bytes(option, text)
    if not found:
        raise _refusal(option, text, "must be above 0", "14GB or 1.5GB/s")
    return found


def _refusal(option: str, text: str, what: str, example: str) -> Exception:
    from closeranks.core.errors import UserError

    return UserError(f"{option}: '{text}' {what}", f"Write it like {example}.")


def _print_json(found: CheckpointPolicy) -> None:
    import json
    import math
    from dataclasses import asdict

    from closeranks.plan.policy import checkpoint_table

    def plain(value: Any) -> Any:
        """JSON has no infinity: it becomes null."""
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain({**asdict(found), "waste": found.waste, "table": checkpoint_table(found)}), indent=1))


def _print(found: CheckpointPolicy, measured: MeasuredSaves, picture: Path | None) -> None:
    from closeranks.plan import policy_text
    from closeranks.telemetry.terminal_table import print_table, stdout

    console = stdout()

    def show(rows: policy_text.Rows) -> None:
        print_table(rows[0], rows[1:], right=rows[0][1:], droppable=_SPARE)

    console.print(policy_text.headline(found, measured.num_saves), "", sep="\n", soft_wrap=True)
    show(policy_text.level_rows(found))
    for title, remark, rows in policy_text.tables(found):
        console.print("", title, sep="\n")
        show(rows)
        if remark:
            console.print(remark, soft_wrap=not console.is_terminal)
    console.print("", policy_text.footer(found), sep="\n", soft_wrap=True)
    if picture is not None:
        console.print(f"\npicture: {picture}", soft_wrap=True)
