"""The compressed push of one bucket: a worker encodes each server's slice, the server decodes it and adds it up.

Each worker keeps what its codes lost, and adds it to its next push (``sync.compress.error_feedback``). The sum stays on
the server and weights are pulled exactly, so nothing is compressed a second time. Steps of the warm-up are pushed
exactly. Invariants: whether a push is compressed follows from the number of its step; padding decodes to zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.core.traffic import count_sent
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.compress.build import CODECS
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.compress.error_feedback import RESIDUAL, StagedTensor, error_feedback_rows
from closeranks.sync.config import CompressConfig
from closeranks.sync.server.messages import Messages, send
from closeranks.sync.server.push import PHASE, PushReduction


@dataclass(frozen=True, slots=True)
class PushCompression:
    config: CompressConfig
    schedule: CompressionSchedule


class CompressedPush(PushReduction):
    """``compression.config`` names a codec."""

    def __init__(self, spec: FlatBufferSpec, *args: Any, compression: PushCompression) -> None:
        super().__init__(spec, *args)
        config, server = compression.config, self._roles.server_rank(self._group.rank)
        self._codec, self._schedule = CODECS[config.name](config), compression.schedule
        self._spec, self._dtype, self._share = spec, spec.dtype, self._slice.numel()
        self._own = spec.slice(self._share * (server or 0), self._share * ((server or 0) + 1))
        zeros = torch.zeros(spec.numel if config.feedback and server is None else 0, dtype=spec.dtype)
        self._residual = StagedTensor(zeros.to(spec.device)) if zeros.numel() else None

    def commit(self, taken: Tensor) -> None:
        if self._residual is not None:
            self._residual.commit(taken)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        if self._residual is not None:
            row, num_rows = self._group.rank, self._roles.num_workers
            yield from error_feedback_rows(RESIDUAL, self._residual.committed, self._spec, row, num_rows)

    def take(self, worker: int, step: int) -> Tensor:
        arrived = super().take(worker, step)
        if self._schedule.is_exact(step):
            return arrived
        decoded = self._codec.decode(arrived.view(1, -1), self._share, self._dtype).view(-1)
        self._own.zero_padding(decoded)
        return decoded

    def _row(self, step: int) -> Tensor:
        if self._schedule.is_exact(step):
            return super()._row(step)
        return torch.empty(self._codec.num_bytes(self._share), dtype=torch.uint8, device=self._device)

    def _send(self, outgoing: Tensor) -> None:
        if self._schedule.is_exact(self._step):
            super()._send(outgoing)
            return
        rows = outgoing.view(self._roles.num_servers, -1)
        if self._residual is not None:
            rows.add_(self._residual.read().view_as(rows))
        codes = self._codec.encode(rows)
        meant = self._codec.decode(codes, self._share, self._dtype)
        self._spec.zero_padding(meant.view(-1))
        if self._residual is not None:
            torch.sub(rows, meant, out=self._residual.staged().view_as(rows))
        self.pushed = meant.view(-1)
        count_sent(PHASE, codes.nbytes)
        works = [
            work
            for server, code in enumerate(codes)
            for work in send(code, self._group, [self._roles.num_workers + server], self._tag)
        ]
        self.sent.append((self._step, Messages(works, [codes])))
