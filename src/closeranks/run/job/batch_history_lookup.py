"""Looks up the batch history of a job that is resumed.

Both parts of a ``BatchHistory`` must be known before a run is built, so they are read from the newest saved state
first; whether that state is sound and fits the job is decided later, when it is restored. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from closeranks.capture.slots import SealedSlot, SlotError
from closeranks.checkpoint.load.catalogue import FOLDER, find_checkpoints
from closeranks.core.errors import CheckpointError
from closeranks.run.job.batch_history import BatchHistory, batch_history_of
from closeranks.run.job.job import Job
from closeranks.run.state.rescued_files import find_rescued
from closeranks.storage.protocol import StorageError

_AUTO = "auto"


def find_batch_history(job: Job, folder: Path) -> BatchHistory:
    """The batch history of a resumed job, from the newest state whose tree can be read; empty if there is none.

    If that state later proves damaged, an older one of the same run is restored, whose steps end at the same samples.
    """
    config = job.checkpoint
    if not config.resume:
        return BatchHistory()
    is_auto = config.resume == _AUTO
    place = (config.folder or str(folder / FOLDER)) if is_auto else config.resume
    try:
        found = find_checkpoints(place, [config.remote] if config.remote else []).candidates()
    except (CheckpointError, StorageError):  # reported when the state is restored
        found = ()
    newest = next((one for one in found if one.manifest is not None), None)
    tree = newest.manifest.tree if newest is not None and newest.manifest is not None else {}
    rescued = find_rescued(folder if is_auto else Path(place))
    if rescued is not None and rescued.step > (newest.step if newest else -1):
        with suppress(SlotError, OSError):  # reported when the state is restored
            tree = SealedSlot(rescued.files[0]).index.tree
    return batch_history_of(tree, job.train.global_batch)


def broadcast_batch_history(job: Job, folder: Path, *, looks: bool, share_text: Callable[[str], str]) -> BatchHistory:
    """Collective. The rank with ``looks`` looks it up and broadcasts it."""
    return BatchHistory.from_json(
        json.loads(share_text(json.dumps(find_batch_history(job, folder).to_json()) if looks else ""))
    )
