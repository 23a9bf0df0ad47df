"""How does a benchmark train on two hosts with a slow link? On those of ``closeranks compare``, one rank on each.

A rank is a script of its own. It finds its part in ``plan.json`` and leaves what it measured beside it, in
``rank-0.json`` and so on. Invariant: when ``run_ranks`` returns or raises, its hosts and all that ran on them are gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results import say

from closeranks.lab.compare.config import NetworkConfig
from closeranks.lab.compare.namespaces import NamespaceHosts, address_of, unavailable_reason

NUM_HOSTS = 2
INTERFACE = "eth0"
_PORT = 29500


def require_hosts() -> None:
    """One sentence and exit 2 where there can be none."""
    if reason := unavailable_reason(shaped=True):
        print(f"The hosts of this benchmark cannot be made: {reason}.", file=sys.stderr)
        sys.exit(2)


def run_ranks(
    script: str, plan: Mapping[str, Any], folder: Path, *, rate_mbit: float, timeout_s: float
) -> list[dict[str, Any]]:
    """What each rank left; the link carries ``rate_mbit`` in each direction."""
    plan_path = folder / "plan.json"
    plan_path.write_text(json.dumps({**plan, "folder": str(folder)}))
    with NamespaceHosts(NetworkConfig(hosts=NUM_HOSTS, mbit=rate_mbit)) as hosts:
        say(f"two hosts, {rate_mbit:g} Mbit/s, {plan['rounds']} rounds, turns of {plan['block']} steps")
        running = []
        for rank, host in enumerate(hosts.hosts):
            command = [sys.executable, str(Path(__file__).with_name(script)), str(plan_path)]
            with _log(folder, rank).open("w") as output:
                running.append(host.start(["env", *_environment(rank), *command], output))
        try:
            failed = [rank for rank, process in enumerate(running) if process.wait(timeout_s)]
        except subprocess.TimeoutExpired:
            failed = list(range(NUM_HOSTS))
    if failed:
        logs = "\n".join(_log(folder, rank).read_text(errors="replace")[-3000:] for rank in failed)
        raise RuntimeError(f"ranks {failed} failed or did not end in {timeout_s:g} s:\n{logs}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_HOSTS)]


def _environment(rank: int) -> list[str]:
    where = {"RANK": rank, "WORLD_SIZE": NUM_HOSTS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
    where |= {"MASTER_ADDR": address_of(0), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
    return [f"{key}={value}" for key, value in where.items()]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"
