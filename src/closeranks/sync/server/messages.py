"""Point-to-point messages between workers and servers.

Each kind of message between two ranks has a tag of its own, and messages of one tag arrive in the order in which they
were sent. So a push or a version of the weights needs no number to be recognised by: it is the next one, and none can
be taken for another or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import PendingWork
from closeranks.sync.reducers.local_parameters import CommGroup

BALLOT_TAG, HEADER_TAG, DECISION_TAG, COUNT_TAG = 1, 2, 3, 4
ROW_HEADER_TAG, ROW_KEYS_TAG, ROW_VALUES_TAG = 8, 9, 10
_FIRST_BUCKET_TAG = 16


def bucket_tag(number: int) -> int:
    """Of the slices of one bucket: gradients on their way to a server, weights on their way back."""
    return _FIRST_BUCKET_TAG + number


class Messages:
    """Messages in flight, and the tensors that they read or write."""

    def __init__(self, works: Iterable[PendingWork], tensors: Sequence[Tensor] = ()) -> None:
        self.works, self.tensors = list(works), tensors

    def wait(self) -> None:
        """Each message is waited for once: Gloo would wait for a second one."""
        while self.works:
            self.works.pop(0).wait()


def send(tensor: Tensor, group: CommGroup, ranks: Iterable[int], tag: int) -> list[dist.Work]:
    return [_started(dist.isend(tensor, group=group.process_group, group_dst=rank, tag=tag)) for rank in ranks]


def receive(tensor: Tensor, group: CommGroup, rank: int, tag: int) -> dist.Work:
    return _started(dist.irecv(tensor, group=group.process_group, group_src=rank, tag=tag))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
