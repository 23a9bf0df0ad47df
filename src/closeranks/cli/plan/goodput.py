"""``closeranks plan goodput``: simulates months of failures, and says what they cost and how many spares pay.

Imports no torch. Invariant: standard output holds the forecast and nothing else, so that ``--json`` can be piped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from closeranks.facts.failures.failure_rates import FailureTable
    from closeranks.facts.prices import DevicePrice
    from closeranks.plan.goodput.forecast import SpareSweep
    from closeranks.plan.goodput.scenario import GoodputScenario, RecoveryStrategy

HELP = """Simulate months of failures: how much of the time trains, where the rest goes, and how many spares pay.

\b
  closeranks plan goodput --devices 1024 --days 30 --step-s 5
  closeranks plan goodput --devices 16384 --days 54 --replica 128 --state-gib 6000 --price H100
  closeranks plan goodput --devices 64 --failures spot --spares 0 --cold-spares 4
  closeranks plan goodput --devices 1024 --failures mine.toml --strategy restart --restart-s 900
  closeranks plan goodput --devices 4096 --picture goodput.png
  closeranks plan goodput --devices 512 --json > goodput.json

Two ways to recover meet the same failures: closing ranks (from the last step, in memory, and with fewer replicas while
hosts are missing) and restarting from the last checkpoint. Every second of every worker is named, in the words of
`closeranks status`. Failures come from published tables (llama3, research, spot) or from a file of your own; rates,
sources, assumptions and limits: docs/plan-goodput.md. The same options always print the same figures (--seed).
"""

_SPARE_COLUMNS = ("paid / useful", "from checkpoint", "closed form", "of the run", "save every", "cost")
"""Columns that a narrow terminal leaves out, in this order."""
_COPY_BYTES_PER_S, _HOST_BYTES_PER_S = 10e9, 1e9
"""Of a device to its host's memory, and of a host to storage."""
_MOST_FAILURES = 100_000


def register(app: typer.Typer) -> None:
    app.command("goodput", help=HELP, short_help="Simulate failures: goodput, losses, spares.")(goodput)


Replica = Annotated[
    int, typer.Option(min=0, help="Devices of one replica: a run shrinks by whole ones; 0: those of a host.")
]
Spares = Annotated[
    int | None, typer.Option(min=0, max=100_000, help="Hosts that stand by.  [default: the number that pays]")
]
ColdSpares = Annotated[int, typer.Option(min=0, max=100_000, help="Hosts that are started when needed.")]
StateGib = Annotated[
    float, typer.Option(help="Size of the state, for the cost of saves: 10 GB/s a device, 1 GB/s a host.")
]
SaveS = Annotated[float | None, typer.Option(help="Seconds that a save stalls training.  [default: 1]")]
DurableS = Annotated[float | None, typer.Option(help="Seconds until a save is durable.  [default: 10]")]
SaveEveryS = Annotated[float, typer.Option(help="Seconds of work between saves; 0: the best for each strategy.")]
Strategy = Annotated[Literal["both", "closing-ranks", "restart"], typer.Option(help="How the run recovers.")]
SnapshotShare = Annotated[
    float, typer.Option(min=0, max=10, help="Closing ranks: what snapshots add to a step, as a share of it.")
]
WhenShort = Annotated[
    Literal["default", "shrink", "wait"],
    typer.Option(help="While hosts are missing: closing ranks shrinks and a restart waits, or both do one."),
]
Failures = Annotated[
    str, typer.Option(help="A table of failures: llama3, research, spot, or a file.", metavar="NAME|FILE.toml")
]
Price = Annotated[
    str, typer.Option(help="Of a device-hour in dollars, or a device whose list price to take.", metavar="N|DEVICE")
]


def goodput(
    devices: Annotated[int, typer.Option(min=1, max=10_000_000, help="Devices of the run.")] = 1024,
    per_host: Annotated[int, typer.Option(min=1, help="Devices of a host, which are lost together.")] = 8,
    replica: Replica = 0,
    days: Annotated[float, typer.Option(help="Duration of the run.")] = 30.0,
    step_s: Annotated[float, typer.Option(help="Seconds of a step.")] = 5.0,
    spares: Spares = None,
    cold_spares: ColdSpares = 0,
    cold_start_s: Annotated[float, typer.Option(help="Seconds until one of those is ready.")] = 600.0,
    state_gib: StateGib = 0.0,
    save_s: SaveS = None,
    durable_s: DurableS = None,
    save_every_s: SaveEveryS = 0.0,
    strategy: Strategy = "both",
    recover_s: Annotated[float, typer.Option(help="Closing ranks: seconds from detection to training.")] = 15.0,
    restart_s: Annotated[float, typer.Option(help="Restart: seconds from detection to training.")] = 300.0,
    snapshot_share: SnapshotShare = 0.01,
    when_short: WhenShort = "default",
    failures: Failures = "llama3",
    price: Price = "",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Simulated runs.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG.", metavar="OUT.png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    from closeranks.cli.pictures import check_picture
    from closeranks.facts.failures.failure_rates import load_failures
    from closeranks.plan.goodput.forecast import sweep_spares

    options = GoodputOptions(
        devices, per_host, replica or per_host, days, step_s, cold_spares, cold_start_s, state_gib, save_s, durable_s,
        save_every_s, recover_s, restart_s, snapshot_share, when_short, strategy,
    )  # fmt: skip
    check_picture(picture)
    scenario, strategies = _scenario(options), _strategies(options)
    paid, table = _price(price), load_failures(failures)
    _check_work(scenario, table, seeds)
    tried = range(seed, seed + seeds)
    sweeps = sweep_spares(scenario, table, tried, strategies=strategies, wanted=spares)
    if picture is not None:
        _draw(sweeps, table, picture)
    if as_json:
        _print_json(sweeps, table, paid, tried)
    else:
        _print(sweeps, table, failures, paid, seeds, picture)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """Options as they were typed; None if not given."""

    devices: int
    per_host: int
    replica: int
    days: float
    step_s: float
    cold_spares: int
    cold_start_s: float
    state_gib: float
    save_s: float | None
    durable_s: float | None
    save_every_s: float
    recover_s: float
    restart_s: float
    snapshot_share: float
    when_short: str
    strategy: str


def _scenario(options: GoodputOptions) -> GoodputScenario:
    from closeranks.core.errors import UserError
    from closeranks.plan.goodput.scenario import GoodputScenario

    if options.devices % options.per_host:
        raise UserError(
            f"{options.devices} devices do not fill hosts of {options.per_host}",
            "Change --devices or --per-host so that one divides the other.",
        )
    if options.replica % options.per_host or options.devices % options.replica:
        raise UserError(
            f"--replica {options.replica}: a replica must be whole hosts of {options.per_host} devices, and divide the "
            f"{options.devices} devices",
            f"Name a multiple of {options.per_host} that divides {options.devices}.",
        )
    _check_numbers(options)
    stall_s, durable_s = _save_cost(options)
    if durable_s < stall_s:
        raise UserError(
            f"a save cannot be durable after {durable_s:g} s if it stalls training for {stall_s:g} s",
            "Make --durable-s at least --save-s.",
        )
    return GoodputScenario(
        num_devices=options.devices,
        per_host=options.per_host,
        replica_hosts=options.replica // options.per_host,
        wall_s=options.days * 86400,
        step_s=options.step_s,
        stall_s=stall_s,
        durable_s=durable_s,
        save_every_s=options.save_every_s,
        cold_spares=options.cold_spares,
        cold_s=options.cold_start_s,
    )


def _check_numbers(options: GoodputOptions) -> None:
    from closeranks.core.errors import UserError

    limits = {
        "--days": (options.days, 1e-3, 3650.0),
        "--step-s": (options.step_s, 1e-3, 86400.0),
        "--cold-start-s": (options.cold_start_s, 0.0, 1e7),
        "--state-gib": (options.state_gib, 0.0, 1e9),
        "--save-s": (options.save_s or 0.0, 0.0, 86400.0),
        "--durable-s": (options.durable_s or 0.0, 0.0, 1e6),
        "--save-every-s": (options.save_every_s, 0.0, 1e7),
        "--recover-s": (options.recover_s, 0.0, 86400.0),
        "--restart-s": (options.restart_s, 0.0, 86400.0),
        "--snapshot-share": (options.snapshot_share, 0.0, 10.0),
    }
    for option, (value, least, most) in limits.items():
        if not least <= value <= most:  # also refuses nan
            raise UserError(f"{option} {value:g} cannot be used", f"Name a number from {least:g} to {most:g}.")


def _save_cost(options: GoodputOptions) -> tuple[float, float]:
    """As given; else from the size of the state; else the defaults."""
    state_bytes = options.state_gib * 2**30
    stall_s, durable_s = options.save_s, options.durable_s
    if stall_s is None:
        stall_s = state_bytes / options.devices / _COPY_BYTES_PER_S if state_bytes else 1.0
    if durable_s is None:
        num_hosts = options.devices // options.per_host
        durable_s = stall_s + state_bytes / num_hosts / _HOST_BYTES_PER_S if state_bytes else max(10.0, stall_s)
    return stall_s, durable_s


def _strategies(options: GoodputOptions) -> tuple[RecoveryStrategy, ...]:
    from dataclasses import replace

    from closeranks.plan.goodput.scenario import CLOSING_RANKS, RESTART

    closing = replace(CLOSING_RANKS, recover_s=options.recover_s, snapshot_share=options.snapshot_share)
    restart = replace(RESTART, recover_s=options.restart_s)
    if options.when_short != "default":
        shrinks = options.when_short == "shrink"
        closing, restart = replace(closing, shrinks=shrinks), replace(restart, shrinks=shrinks)
    return {"both": (closing, restart), "closing-ranks": (closing,), "restart": (restart,)}[options.strategy]


def _price(text: str) -> DevicePrice | None:
    from math import isfinite

    from closeranks.core.errors import UserError
    from closeranks.facts.prices import DevicePrice, load_prices

    if not text:
        return None
    try:
        per_hour = float(text)
    except ValueError:
        table = load_prices()
        if (found := table.price_of(text)) is None:
            known = ", ".join(price.device for price in table.prices)
            raise UserError(
                f"--price: no price is known for '{text}'", f"Name the dollars of a device-hour, or one of {known}."
            ) from None
        return found
    if not isfinite(per_hour) or per_hour < 0:
        raise UserError(f"--price {text} is not a price", "Name the dollars of a device-hour, such as 2.5.")
    return DevicePrice("device", per_hour, "USD")


def _check_work(scenario: GoodputScenario, table: FailureTable, num_runs: int) -> None:
    """Refuse what would take minutes to simulate."""
    from closeranks.core.errors import UserError
    from closeranks.facts.durations import format_duration

    mtbf_s = table.mtbf_s(scenario.num_devices)
    if num_runs * scenario.wall_s > _MOST_FAILURES * mtbf_s:
        raise UserError(
            f"a run of {scenario.num_devices:,} devices would fail every {format_duration(mtbf_s)}, and all runs more "
            f"than {_MOST_FAILURES:,} times",
            "Simulate fewer --days, --devices or --seeds, or check the rates of the table.",
        )


def _draw(sweeps: Sequence[SpareSweep], table: FailureTable, picture: Path) -> None:
    from closeranks.cli.pictures import picture_errors_explained
    from closeranks.plan.goodput.goodput_picture import draw_goodput

    with picture_errors_explained(picture):
        draw_goodput(sweeps, table, picture)


def _print_json(
    sweeps: Sequence[SpareSweep], table: FailureTable, price: DevicePrice | None, seeds: Sequence[int]
) -> None:
    import json

    from closeranks.plan.goodput.goodput_text import goodput_json

    print(json.dumps(goodput_json(sweeps, table, price, seeds), indent=1))


def _print(
    sweeps: Sequence[SpareSweep],
    table: FailureTable,
    name: str,
    price: DevicePrice | None,
    num_runs: int,
    picture: Path | None,
) -> None:
    from closeranks.plan.goodput import goodput_text
    from closeranks.telemetry.terminal_table import print_table, stdout

    console = stdout()

    def show(title: str, rows: goodput_text.Rows, remark: str = "") -> None:
        console.print("", *([title] if title else []), sep="\n")
        print_table(rows[0], rows[1:], right=rows[0][1:], droppable=_SPARE_COLUMNS)
        if remark:
            console.print(remark, soft_wrap=not console.is_terminal)

    console.print(goodput_text.headline(sweeps, table, name, num_runs), soft_wrap=True)
    show("", goodput_text.strategy_rows(sweeps, price), goodput_text.CLOSED_FORM_REMARK)
    show("Where the time of the workers goes, on average", goodput_text.loss_rows(sweeps))
    show("How many spares pay", goodput_text.spare_rows(sweeps, price), goodput_text.SPARE_REMARK)
    console.print("", goodput_text.kinds_line(sweeps[-1]), goodput_text.assumptions(sweeps), sep="\n", soft_wrap=True)
    if picture is not None:
        console.print(f"\npicture: {picture}", soft_wrap=True)
