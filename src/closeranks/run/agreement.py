"""What do the ranks of a session agree on once they have met? Its folder, and the past of the run that it continues."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.world import World
from closeranks.parallel.group import Group
from closeranks.run import heirloom
from closeranks.run.job import Job
from closeranks.run.ownership import agree_on_folder
from closeranks.run.past import Past
from closeranks.run.recall import share_past


@dataclass
class Agreement:
    job: Job
    world: World
    held: ExitStack
    """Takes what rank 0 owns from now on."""
    prepared: Path | None
    """The folder, where whoever started us has prepared it."""

    def folder(self, group: Group) -> Path:
        """All ranks."""
        self.prepared = self.prepared or agree_on_folder(self.job, self.world, group.share_text, self.held)
        return self.prepared

    def past(self, group: Group) -> Past:
        """All ranks. Found out by whoever started us, or by rank 0 now."""
        folder = self.folder(group)
        return heirloom.past() or share_past(self.job, folder, looks=self.world.is_lead, share_text=group.share_text)
