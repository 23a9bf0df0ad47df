"""Exports our checkpoints as Hugging Face folders, and imports such folders as checkpoints.

Both stream tensor by tensor, and both write their output folder atomically. Invariants: weights are never changed
except for the dtype that was asked for; an import yields a checkpoint for ``checkpoint.weights`` and a job that fits
it, not a state to resume; a model that either format cannot represent is refused before a byte is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from closeranks import __version__
from closeranks.checkpoint.load.catalogue import FOLDER
from closeranks.checkpoint.weights.checkpoint_weights import CheckpointWeights, open_checkpoint_weights
from closeranks.checkpoint.weights.hf_index import read_json
from closeranks.checkpoint.weights.hf_shards import (
    ExportTensor,
    NoProgress,
    ProgressListener,
    plan_export,
    write_json,
    write_shards,
)
from closeranks.checkpoint.weights.open import OURS, detect_format, open_weights
from closeranks.checkpoint.weights.protocol import Weights, row_bands
from closeranks.checkpoint.weights.save_weights import save_weights
from closeranks.core.config.toml.writer import format_value
from closeranks.core.errors import CheckpointError, ModelError
from closeranks.core.pieces import Piece
from closeranks.facts.shapes.llama import LlamaShape, parameter_shapes
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.hf_conversion import NameMapping, hf_config, llama_config_from_hf, match_names, max_len_of
from closeranks.run.huggingface.atomic_folder import atomic_folder
from closeranks.run.huggingface.hub_files import read_hub_metadata, validate_hub_metadata, write_hub_files
from closeranks.run.job.job import Job
from closeranks.run.state.saved_tree import validate_tree
from closeranks.telemetry.run_log.run_folder import ResolvedSettings

CONFIG = "config.json"
NO_PROGRESS = NoProgress()
_PUBLISHED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Published settings that cannot be derived from shapes: kept by an import, written again by an export."""
_SEQ_LEN = 2048
"""Upper limit of the sequence length in a job made for imported weights: a context of 128k is a poor first try."""


@dataclass(frozen=True, slots=True)
class HubConversion:
    """The result of an import or export."""

    source: str
    place: Path
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]
    """Notes for people, one sentence each."""


# Export


def export_hf(
    place: str, out: Path, *, dtype: str = "", shard_bytes: int, listener: ProgressListener = NO_PROGRESS
) -> HubConversion:
    """Write the newest sound checkpoint of a place as a folder that transformers loads. Empty ``dtype``: as saved."""
    weights = open_checkpoint_weights(place)
    shape, max_len = _saved_llama(weights, place)
    found = match_names(parameter_shapes(shape), weights.names(), {}, weights.path)
    tensors = plan_export(weights, found.names, getattr(torch, dtype) if dtype else None)
    total = sum(tensor.num_bytes for tensor in tensors)
    config = hf_config(shape, max_len=max_len, dtype=_main_dtype(tensors))
    hub = validate_hub_metadata(weights.tree.get("hub"))
    config |= {key: hub[key] for key in _PUBLISHED if key in hub}
    config["max_position_embeddings"] = max(max_len, hub.get("max_position_embeddings", max_len))
    with atomic_folder(out) as folder:
        listener.begin("writing", total)
        files = write_shards(folder, weights, tensors, shard_bytes, listener.advance)
        write_json(folder / CONFIG, config)
        hub_files = write_hub_files(hub, folder)
    notes = _tokenizer_notes(hub, hub_files)
    return HubConversion(weights.path, out, len(tensors), total, tuple(files), (*weights.notes, *notes))


def _tokenizer_notes(hub: Mapping[str, Any], written: tuple[str, ...]) -> tuple[str, ...]:
    if any(name in written for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return (f"The tokenizer is the one of {hub['source']}: {', '.join(written)}.",)
    return ("No tokenizer is written: add the one that the data was tokenized with.",)


def _saved_llama(weights: CheckpointWeights, place: str) -> tuple[LlamaShape, int]:
    config = ResolvedSettings(validate_tree(weights.tree, weights.path).get("config") or {})
    table, seq_len = config.get("model"), config.get("data.seq_len")
    if not isinstance(table, dict) or table.get("name") != "llama":
        what = f"{weights.path} holds the model '{config.get('model.name')}'; Hugging Face folders are only written for"
        fix = f"Write only its weights: closeranks ckpt convert {shlex.quote(place)} OUT.safetensors --to safetensors."
        raise ModelError(f"{what} Llama models", fix)
    try:
        shape = LlamaConfig.model_validate(table).shape()
    except ValidationError as error:
        raise CheckpointError(f"{weights.path} describes its model in a way this version does not know") from error
    return shape, seq_len if type(seq_len) is int and seq_len > 0 else 2048


def _main_dtype(tensors: list[ExportTensor]) -> str:
    """The dtype of most bytes: the one that config.json names for loading."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


# Import


def import_hf(place: str, out: Path, *, listener: ProgressListener = NO_PROGRESS) -> HubConversion:
    """Make a run folder from published weights: a checkpoint of step 0 with the weights, and a job to start from it."""
    config = _published_config(place)
    weights = open_weights(place)
    table = llama_config_from_hf(config, f"{_folder_of(place)}/{CONFIG}")
    shape = LlamaConfig.model_validate(table).shape()
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
    found = match_names(parameter_shapes(shape), weights.names(), ties, weights.path)
    _check_duplicates(weights, found)
    tensors = plan_export(weights, found.names)
    total = sum(tensor.num_bytes for tensor in tensors)
    job = _job(table, config, out)
    with atomic_folder(out) as folder:
        tree = {
            "config": job.model_dump(mode="json"),
            "hub": read_hub_metadata(place),
            "versions": {"closeranks": __version__, "torch": torch.__version__},
        }
        save_weights(str(folder / FOLDER), weights, tensors, tree, listener)
        (folder / "job.toml").write_text(_job_text(table, job))
    notes = (f"The tokenizer stays where it is, in {_folder_of(place)}.",)
    return HubConversion(weights.path, out, len(tensors), total, (), (*weights.notes, *notes))


def _folder_of(place: str) -> Path:
    path = Path(place.removeprefix("file://"))
    return path if path.is_dir() else path.parent


def _published_config(place: str) -> dict[str, Any]:
    """Read before the weights are opened, so that the error for a wrong folder names the file that is missing."""
    if detect_format(place) == OURS:
        raise CheckpointError(f"{place} is already a closeranks checkpoint", "Name it as checkpoint.weights.")
    return read_json(_folder_of(place) / CONFIG)


def _check_duplicates(weights: Weights, found: NameMapping) -> None:
    """An output projection that is stored beside the embedding it is tied to must be that embedding."""
    for name, duplicate in found.duplicates.items():
        first = found.names[name]
        for band in row_bands(Piece.whole(first, tuple(weights.names()[first])), weights.dtype(first).itemsize):
            if not torch.equal(weights.read(first, band.piece), weights.read(duplicate, band.piece)):
                what = f"'{duplicate}' and '{first}' differ in {weights.path}, and its config ties them"
                raise CheckpointError(what, "Set tie_word_embeddings to false in config.json if both are meant.")


def _job(table: Mapping[str, Any], config: Mapping[str, Any], out: Path) -> Job:
    return Job.model_validate(
        {
            "model": dict(table),
            "data": {"name": "text", "seq_len": min(max_len_of(config), _SEQ_LEN)},
            "train": {"steps": 100, "global_batch": 8},
            "checkpoint": {"weights": str(out.absolute())},
        }
    )


def _job_text(table: Mapping[str, Any], job: Job) -> str:
    """A job file with the values that the weights determine, and defaults for the rest."""
    data, train = job.data, job.train
    lines = [
        "# The model of imported weights, and a job that trains them further. Change what is under data and train:"
    ]
    lines += [
        "# the text is read as bytes, so use data in the tokens that the weights were trained on.",
        "",
        "[model]",
    ]
    lines += [f"{key} = {format_value(value)}" for key, value in table.items()]
    lines += ["", "[data]", f"name = {format_value(data.name)}", f"seq_len = {data.seq_len}"]
    lines += ["", "[train]", f"steps = {train.steps}", f"global_batch = {train.global_batch}"]
    lines += ["", "[checkpoint]", f"weights = {format_value(job.checkpoint.weights)}", ""]
    return "\n".join(lines)
