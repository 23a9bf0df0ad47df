"""What does a trained model say? Loads a run's newest sound checkpoint and lets it continue a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from closeranks.checkpoint.reader import open_newest
from closeranks.core.errors import ModelError
from closeranks.models.build import spec_for
from closeranks.models.generate import generate
from closeranks.parallel.materialise import materialise
from closeranks.run.job import Job
from closeranks.run.state import load_model


def sample(folder: Path, prompt: str, *, num_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[bytes]:
    """The continuation, byte by byte, as the model draws it."""
    saved = open_newest(str(folder))
    job = Job.model_validate(saved.tree["config"])
    if job.data.name != "text":
        raise ModelError(
            f"{folder} holds a model of '{job.data.name}' data, not of text", "Name a run trained on text."
        )
    spec = spec_for(job.model, seq_len=job.data.seq_len)
    dtype = torch.float64 if job.train.precision == "float64" else torch.float32
    device = torch.device("cpu")
    module = materialise(spec, seed=job.run.seed, device=device, dtype=dtype, broadcast=lambda tensor: tensor)
    load_model(module, saved)
    module.eval()
    tokens = generate(
        module,
        list(prompt.encode() or b"\n"),
        num_tokens=num_tokens,
        max_len=job.data.seq_len,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return (bytes([token]) for token in tokens)
