"""What all ranks of a session agree on once their group has formed: its folder, and the batch history of the run it
continues."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.world import World
from closeranks.parallel.process_group import RankGroup
from closeranks.run.job.batch_history import BatchHistory
from closeranks.run.job.batch_history_lookup import broadcast_batch_history
from closeranks.run.job.job import Job
from closeranks.run.job.ownership import agree_on_folder
from closeranks.run.worker import generation_cache


@dataclass
class SharedSetup:
    job: Job
    world: World
    leases: ExitStack
    """Holds the leases of rank 0 until it is closed."""
    prepared_folder: Path | None
    """The run folder, if the launcher has prepared one."""

    def folder(self, group: RankGroup) -> Path:
        """Collective."""
        self.prepared_folder = self.prepared_folder or agree_on_folder(
            self.job, self.world, group.broadcast_text, self.leases
        )
        return self.prepared_folder

    def batch_history(self, group: RankGroup) -> BatchHistory:
        """Collective. The launcher has looked it up already, or rank 0 does so now."""
        folder = self.folder(group)
        return generation_cache.batch_history() or broadcast_batch_history(
            self.job, folder, looks=self.world.is_lead, share_text=group.broadcast_text
        )
