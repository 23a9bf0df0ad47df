"""Generates text from a trained model: loads a run's newest sound checkpoint and continues a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import cast

import torch

from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.weights.checkpoint_weights import CheckpointWeights
from closeranks.core.errors import CheckpointError, ModelError
from closeranks.facts.shapes.llama import num_params
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.models.generate import generate
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.components.model import load_model
from closeranks.run.state.saved_tree import load_saved_job


def sample(folder: Path, prompt: str, *, num_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[bytes]:
    """The continuation, byte by byte, as the model samples it."""
    saved = open_newest(str(folder))
    job = load_saved_job(saved.tree, saved.path)
    if job.data.name != "text":
        raise ModelError(
            f"{folder} holds a model of '{job.data.name}' data, not of text", "Name a run trained on text."
        )
    if job.model.name != "llama":
        # A user's model factory is code: a checkpoint from elsewhere must not choose what is run.
        what = f"{folder} holds the model '{job.model.name}', and this command only runs Llama models"
        raise ModelError(what, "Load its weights in Python: closeranks ckpt convert RUN OUT.pt --to torch.")
    wanted, found = num_params(cast(LlamaConfig, job.model).shape()), sum(map(prod, saved.shapes("model").values()))
    if wanted != found:  # checked before a model of the size that the job claims is allocated
        what = f"{saved.path} is damaged or invalid: its job describes {wanted:,} parameters, and it holds {found:,}"
        raise CheckpointError(what, "Use an earlier checkpoint.")
    spec = spec_for(job.model, seq_len=job.data.seq_len)
    dtype = torch.float64 if job.train.precision == "float64" else torch.float32
    device = torch.device("cpu")
    module = materialize(spec, seed=job.run.seed, device=device, dtype=dtype, broadcast=lambda tensor: tensor)
    load_model(module, CheckpointWeights(saved))
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
