"""Which products and which attention does a calibration measure? Pure: those of a job, and a grid for other jobs.

Invariant: every product of a block and of the head is there as forward and as the two of backward compute it, for a
model that is whole and for one that is split over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from closeranks.facts.shapes.llama import PRESETS, LlamaShape

_CPU_GRID = ((64, 256, 1024), (64, 256, 1024, 4096), (64, 256, 1024, 4096))
_GPU_GRID = ((1024, 4096, 16_384), (1024, 2048, 4096, 8192, 16_384), (1024, 2048, 4096, 8192, 16_384))
_TENSOR = (1, 2)
_CPU_ATTENTION = ((4, 64, 32), (8, 64, 64), (4, 256, 32), (8, 256, 64), (8, 1024, 64), (16, 512, 128))
_GPU_ATTENTION = ((32, 2048, 64), (32, 4096, 64), (128, 4096, 64), (32, 2048, 128), (64, 4096, 128), (32, 16_384, 128))


@dataclass(frozen=True, slots=True)
class ProductShape:
    """[m, k] times [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        return self.m * self.k + self.k * self.n + self.m * self.n


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """The attention of one block on one micro-batch."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.num_heads * self.seq_len**2 * self.head_dim


@dataclass(frozen=True, slots=True)
class JobShapes:
    """What of a job decides its shapes."""

    llama: LlamaShape
    seq_len: int
    micro_batch: int

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The job's own, and half and twice of it."""
        return tuple(sorted({max(1, self.micro_batch // 2), self.micro_batch, 2 * self.micro_batch}))


def products_of(kind: str, jobs: Iterable[JobShapes]) -> tuple[ProductShape, ...]:
    """The shapes of the jobs first: a calibration that runs out of time leaves out the end of the grid."""
    found = [shape for job in jobs for micro in job.micro_batches for shape in _job_products(job, micro)]
    grid = [ProductShape(*sizes) for sizes in product(*(_CPU_GRID if kind == "cpu" else _GPU_GRID))]
    return tuple(dict.fromkeys((*found, *sorted(grid, key=lambda shape: shape.flops))))


def attention_of(kind: str, jobs: Iterable[JobShapes]) -> tuple[AttentionPlace, ...]:
    found = [
        AttentionPlace(micro, heads // tensor, max(1, job.llama.num_kv_heads // tensor), job.seq_len, dim)
        for job in jobs
        for micro in job.micro_batches
        for tensor in _TENSOR
        for heads, dim in ((job.llama.num_heads, job.llama.head_dim),)
    ]
    grid = [
        AttentionPlace(1, heads, heads, length, dim)
        for heads, length, dim in (_CPU_ATTENTION if kind == "cpu" else _GPU_ATTENTION)
    ]
    return tuple(dict.fromkeys((*found, *grid)))


def _job_products(job: JobShapes, micro_batch: int) -> Iterator[ProductShape]:
    shape, tokens = job.llama, micro_batch * job.seq_len
    for tensor in _TENSOR:
        columns, kv_columns = shape.dim // tensor, 2 * shape.num_kv_heads * shape.head_dim // tensor
        inner = shape.ffn_dim // tensor
        for n, k in (
            (columns + kv_columns, shape.dim),
            (shape.dim, columns),
            (2 * inner, shape.dim),
            (shape.dim, inner),
            (shape.vocab_size // tensor, shape.dim),
        ):
            yield from (ProductShape(tokens, n, k), ProductShape(tokens, k, n), ProductShape(k, n, tokens))


def gpu_jobs() -> tuple[JobShapes, ...]:
    """The shapes a GPU is measured with if no job is named."""
    return (JobShapes(PRESETS["1b"], 4096, 2),)
