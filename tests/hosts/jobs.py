"""A small job on several hosts: it waits where a test wants it to, and tells afterwards what it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks import Hook, Session
from closeranks.core.events import Event, StepDone
from closeranks.telemetry.live.status import read_status
from closeranks.telemetry.run_log.recorder import read_events
from tests.hosts.commands import Command, wait_for
from tests.hosts.lab import LabHost as Host

ROOT = Path(__file__).parents[2]
PORT = 29400
STEPS = 12
TEXT = f"""
[run]
folder = "run"
hooks = ["tests.hosts.jobs:Holds"]
[model]
name = "llama"
dim = 16
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 32
dropout = 0.1
[data]
name = "text"
seq_len = 8
max_bytes = 20000
[train]
steps = {STEPS}
global_batch = 12
micro_batch = 2
eval_samples = 1
precision = "float64"
[optim]
lr = 1e-2
[telemetry]
report = false
log_every = 100
[checkpoint]
every = 0
[elastic]
snapshot_every = 1
hang_floor_s = 600
stragglers = "off"
"""


class Holds(Hook):
    """After a step that a test holds, every rank waits until it lets go; or one of them does, and the others in their
    next collective."""

    def on_step(self, session: Session, step: Any) -> None:
        folder, rank = Path(session.folder.parent, "holds"), session.world.rank
        held = [folder / str(step.step), folder / f"{step.step}@{rank}"]
        if any(path.exists() for path in held):
            (folder / f"{step.step}-{session.world.generation}-{rank}").touch()
        while any(path.exists() for path in held):
            time.sleep(0.01)


class Fails(Hook):
    """An error of the user's code in one step, however often it is tried."""

    def on_step(self, session: Session, step: Any) -> None:
        if step.step == 6:
            raise RuntimeError("this hook fails at step 6")


@dataclass(frozen=True)
class Site:
    """Where a job is run, and what became of it."""

    folder: Path
    num_workers: int = 1
    """Of each host."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def token(self) -> Path:
        return self.folder / "token"

    def prepare(self) -> Site:
        (self.folder / "holds").mkdir(parents=True)
        (self.folder / "job.toml").write_text(TEXT)
        self.token.write_text("0123456789abcdef" * 4)
        self.token.chmod(0o600)
        return self

    # --- the commands

    def command(self, host: Host, *arguments: object) -> Command:
        """``closeranks ...`` on a host."""
        return Command(host, self.folder, *arguments)

    def lead(self, host: Host, *arguments: object, hosts: str = "2") -> Command:
        listen = ("--hosts", hosts, "--listen", f"{host.address}:{PORT}", "--token-file", self.token)
        return self.command(host, "train", "job.toml", "-n", self.num_workers, *listen, *arguments)

    def join(self, host: Host, lead: Host, *arguments: object, token: Path | None = None) -> Command:
        how = ("--join", f"{lead.address}:{PORT}", "-n", self.num_workers, "--token-file", token or self.token)
        return self.command(host, "agent", *how, *arguments)

    # --- while it runs

    def hold(self, step: int, rank: int | None = None) -> None:
        """All ranks, or one."""
        self._hold(step, rank).touch()

    def let_go(self, step: int, rank: int | None = None) -> None:
        self._hold(step, rank).unlink()

    def _hold(self, step: int, rank: int | None) -> Path:
        return self.folder / "holds" / (str(step) if rank is None else f"{step}@{rank}")

    def wait_until_held(
        self, step: int, *, generation: int = 0, num_ranks: int = 2, rank: int | None = None, lead: Command
    ) -> None:
        """Every rank, or that one, has finished the step and waits."""
        ranks = range(num_ranks) if rank is None else [rank]
        paths = [self.folder / "holds" / f"{step}-{generation}-{one}" for one in ranks]
        what = f"ranks {list(ranks)} to stand at step {step}"
        try:
            wait_for(lambda: all(path.exists() for path in paths) or _ended(lead, what), what, lead)
        except AssertionError as error:
            held, events = sorted(path.name for path in paths[0].parent.iterdir()), self._all_agent_events()
            raise AssertionError(f"{error}\nheld: {held}\nthe agent told: {events}") from None

    def wait_for_event(self, event: str, lead: Command, *, times: int = 1, **fields: object) -> Event:
        """Of the agent's own: the first such, or a later one."""

        def find() -> Event | None:
            found = [one for one in self.agent_events(event) if _has(one, fields)]
            return found[times - 1] if len(found) >= times else None

        return wait_for(lambda: find() or _ended(lead, f"{event} {fields}"), f"{event} {fields}", lead)

    def agent_events(self, kind: str) -> list[Event]:
        return [event for event in self._all_agent_events() if event.name == kind]

    def _all_agent_events(self) -> list[Event]:
        path = self.run / "metrics" / "agent.jsonl"
        events = [event for _, event in read_events(path)] if path.exists() else []
        return [event for event in events if event is not None]

    # --- afterwards

    @property
    def shown_workers(self) -> list[tuple[int, str, int | None]]:
        """What ``closeranks status`` shows of each: its rank, its host and the step it works on."""
        status = read_status(self.run)
        return [(one.rank, one.host, one.step) for one in status.workers] if status else []

    @property
    def losses(self) -> dict[int, float]:
        """By step; what was redone replaces what stood there."""
        return self.losses_of("run")

    def losses_of(self, run: str) -> dict[int, float]:
        lines = read_events(self.folder / run / "metrics" / "rank-00000.jsonl")
        return {event.step: event.loss for _, event in lines if isinstance(event, StepDone)}


def _ended(lead: Command, what: str) -> None:
    assert lead.process.poll() is None, f"it ended before {what}:\n{lead.said}"


def _has(event: Event, fields: dict[str, object]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())
