"""The tables of ``compare.toml``: what a comparison can be asked to do.

Invariant: whatever is wrong with the file is one ``UserError`` that names the file and all of its problems. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from closeranks.core.config.load import load
from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import ConfigError, Problem, UserError

Changes = dict[str, Any] | tuple[str, ...]
_MAX_DELAYED_MBIT = 500.0
"""Maximum bandwidth with a delay: every frame then passes through a process of ours, which needs processor time."""


class ComparisonSetting(ConfigTable):
    """One way to run the job; all others are compared with the first."""

    name: str = Field(min_length=1, max_length=60)
    """Its name in the table."""
    set: Changes = ()
    """What it changes: a table (set.sync.bucket_mib = 1), or an array of ["sync.bucket_mib=1"]."""
    workers: int = Field(default=0, ge=0)
    """Workers in all; 0: as many as the comparison says."""


class ComparisonBudget(ConfigTable):
    """How long each run trains, the same for all; left out: as long as the job says."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; for a job that counts steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data; for a job that counts epochs."""
    seconds: float | None = Field(default=None, gt=0)
    """Stop each run this many wall-clock seconds after training began, evaluations included. The learning rate still
    follows the job's own length."""


class ComparisonTarget(ConfigTable):
    """What must be reached; the time until then is measured."""

    metric: str = "loss"
    """loss (lower is better), or a metric of the model where higher is better, such as accuracy."""
    value: float
    """The target is reached when the smoothed training figure, or an evaluation, crosses it."""
    of: Literal["training", "evaluation"] = "training"
    """Which figure: of the training steps, smoothed, or of evaluations (train.eval_every)."""

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "loss"


class NetworkConfig(ConfigTable):
    """Hosts on one machine, with links of limited bandwidth: network namespaces, which need root."""

    hosts: int = Field(default=2, ge=2, le=64)
    """The workers are spread evenly over them."""
    mbit: float = Field(default=0.0, ge=0)
    """Bandwidth of each host's link, in each direction, in Mbit/s; 0: as fast as the machine."""
    delay_ms: float = Field(default=0.0, ge=0, le=2000)
    """Latency of a packet from one host to another."""


class ComparisonCondition(ConfigTable):
    """What every setting has to cope with: a link, slow workers, kills."""

    name: str = Field(default="", max_length=60)
    """Its name in the table; empty only if a comparison names no conditions."""
    faults: str = ""
    """As `closeranks train --faults` takes them. rank=-1 is the last rank of each setting: a server, if it has any."""
    network: NetworkConfig | None = None
    """Its hosts and links; if omitted, those of the comparison."""


class CompareConfig(ConfigTable):
    """One job, several settings."""

    job: str = Field(min_length=1)
    """The job file, looked for beside this file, then in the working folder."""
    workers: int = Field(default=0, ge=0)
    """Workers in all, over all hosts; 0: one for each host, or for each GPU, or as the job's layout says."""
    set: Changes = ()
    """What all settings change about the job."""
    setting: tuple[ComparisonSetting, ...] = ()
    """``[[setting]]``: the first is the baseline."""
    condition: tuple[ComparisonCondition, ...] = ()
    """``[[condition]]``: every setting runs under each, and has a table for each."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each setting runs with each; run.seed of the job is ignored."""
    repeats: int = Field(default=1, ge=1)
    """Run each setting and seed this many times, for more reliable timings."""
    budget: ComparisonBudget = ComparisonBudget()
    target: ComparisonTarget | None = None
    price_per_worker_hour: float = Field(default=0.0, ge=0)
    """In your currency; 0: costs are not reported."""
    folder: str = ""
    """Where everything goes; empty: runs/compare-NAME. Runs that are finished there are not run again."""
    isolate: bool = True
    """Without [network], as root: run in a network namespace of its own, so that the bytes can be counted."""
    network: NetworkConfig | None = None

    @property
    def conditions(self) -> tuple[ComparisonCondition, ...]:
        """Those that runs take place under: one without a name if the file has none."""
        given = self.condition or (ComparisonCondition(),)
        return tuple(one.model_copy(update={"network": one.network or self.network}) for one in given)


def load_compare(path: Path, overrides: Sequence[str] = ()) -> CompareConfig:
    """The comparison of a file and the command line; reports all problems at once."""
    try:
        return load(
            CompareConfig, path, overrides, checks=(check_settings, check_conditions, check_budget, check_network)
        ).value
    except ConfigError as error:
        raise as_user_error(error, path.name) from None


def as_user_error(error: ConfigError, where: str) -> UserError:
    """The same problems, with ``where`` as their heading instead of the job."""
    count = "1 problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
    return UserError(f"{count} in {where}:\n" + "\n".join(f"  {problem}" for problem in error.problems))


def check_settings(compare: CompareConfig) -> Iterable[Problem]:
    names = [setting.name for setting in compare.setting]
    if not names:
        yield Problem("setting", "there is nothing to compare", 'Write [[setting]] with name = "as it is", and others.')
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Problem("setting", f"{names.count(name)} settings are called '{name}'", "Give each its own name.")
    if not compare.seeds:
        yield Problem("seeds", "there is no seed", "Write seeds = [0, 1, 2].")
    if len(set(compare.seeds)) < len(compare.seeds) or min(compare.seeds, default=0) < 0:
        yield Problem("seeds", "seeds must differ, and be 0 or more", "To run one again, write repeats = 2.")


def check_budget(compare: CompareConfig) -> Iterable[Problem]:
    if compare.budget.steps is not None and compare.budget.epochs is not None:
        yield Problem("budget", "both steps and epochs are given", "Remove the one that the job does not count in.")


def check_conditions(compare: CompareConfig) -> Iterable[Problem]:
    names = [condition.name for condition in compare.condition]
    if "" in names:
        yield Problem("condition", "a condition has no name", 'Write [[condition]] with name = "equal workers".')
    for name in dict.fromkeys(name for name in names if name):
        if names.count(name) > 1:
            yield Problem("condition", f"{names.count(name)} conditions are called '{name}'", "Give each its own name.")


def check_network(compare: CompareConfig) -> Iterable[Problem]:
    """Of the comparison, and of each condition that has its own."""
    yield from _network_problems(compare, compare.network, "network")
    for condition in compare.condition:
        yield from _network_problems(compare, condition.network, f"condition '{condition.name}': network")


def _network_problems(compare: CompareConfig, network: NetworkConfig | None, place: str) -> Iterable[Problem]:
    if network is None:
        return
    if network.delay_ms and not network.mbit:
        yield Problem(f"{place}.mbit", "a delay needs a bandwidth", f"Set it, to {_MAX_DELAYED_MBIT:g} or less.")
    if network.delay_ms and network.mbit > _MAX_DELAYED_MBIT:
        what = f"with a delay, links of more than {_MAX_DELAYED_MBIT:g} Mbit/s cannot be sustained on one machine"
        yield Problem(f"{place}.mbit", what, f"Set it to {_MAX_DELAYED_MBIT:g} or less.")
    asked = [("workers", compare.workers), *((f"setting '{one.name}'", one.workers) for one in compare.setting)]
    for where, workers in asked:
        if workers % network.hosts:
            what = f"{workers} workers cannot be spread evenly over {network.hosts} hosts"
            yield Problem(where, what, f"Write {-(-workers // network.hosts) * network.hosts}.")
