"""Decides where the runs of a comparison take place, and whether their bytes can be counted there.

Invariant: an environment in which the job could not run is refused before anything runs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.core.errors import SetupError
from closeranks.elastic.faults.requirements import unavailable_kinds
from closeranks.lab.compare.comparison_plan import ComparisonPlan
from closeranks.lab.compare.config import NetworkConfig
from closeranks.lab.compare.namespaces import unavailable_reason


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """Where runs take place: directly on this machine, or in network namespaces."""

    network: NetworkConfig | None
    is_counted: bool
    not_counted_reason: str = ""
    """Why bytes are not counted."""


def choose_environments(plan: ComparisonPlan) -> dict[str, RunEnvironment]:
    """By the name of the condition. Refuses faults that cannot be injected here, a network that cannot be created, and
    one in which the job could not run.

    Without a network, the result says why bytes will not be counted, if so.
    """
    kinds = dict.fromkeys(fault.kind for case in plan.cases for fault in case.faults.faults)
    for kind, reason in unavailable_kinds(kinds).items():
        raise SetupError(f"the fault {kind} is not possible here: {reason}", "Remove it, or run as root.")
    return {condition.name: _environment(plan, condition.network) for condition in plan.compare.conditions}


def _environment(plan: ComparisonPlan, network: NetworkConfig | None) -> RunEnvironment:
    remote_url = next((value for case in plan.cases for value in _remote_urls(case.job.model_dump(mode="json"))), "")
    if network is not None:
        if remote_url:
            fix = "Name a copy on this machine, or remove [network]."
            raise SetupError(f"the job needs {remote_url}, which the hosts of [network] cannot reach", fix)
        if reason := unavailable_reason(shaped=bool(network.mbit)):
            raise SetupError(f"the hosts of [network] cannot be made: {reason}", "Remove [network], or run as root.")
        return RunEnvironment(network, is_counted=True)
    if not plan.compare.isolate:
        return RunEnvironment(None, is_counted=False, not_counted_reason="isolate = false")
    if remote_url:
        return RunEnvironment(
            None,
            is_counted=False,
            not_counted_reason=f"the job needs {remote_url}, which a namespace of its own cannot reach",
        )
    reason = unavailable_reason(shaped=False)
    return RunEnvironment(None, is_counted=not reason, not_counted_reason=reason)


def _remote_urls(value: object) -> Iterator[str]:
    """URLs in the job that refer to other machines."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _remote_urls(one)
    elif isinstance(value, list):
        for one in value:
            yield from _remote_urls(one)
    elif isinstance(value, str) and "://" in value and not value.startswith(("file://", "memory://")):
        yield value
