"""Headers of safetensors files and configs of Hugging Face folders that hold what no writer wrote."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from closeranks.checkpoint.weights.safetensors_file import SafetensorsFile
from closeranks.core.errors import CheckpointError, ModelError
from closeranks.facts.shapes.llama import LlamaShape
from closeranks.models.llama.hf_conversion import hf_config, llama_config_from_hf
from tests.checkpoint.forging import to_text, variants

SEED = int(os.environ.get("SEED", "0"))


def test_every_forged_header_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.int64)}, path, metadata={"format": "pt"})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for _, forged in variants(header, SEED):
        text = to_text(forged)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        with suppress(CheckpointError):
            SafetensorsFile(path)


def test_every_forged_config_is_refused_or_read() -> None:
    config = hf_config(LlamaShape(64, 2, 4, 2, 96, 300), max_len=128, dtype="float32")
    assert llama_config_from_hf(config)["name"] == "llama"
    for _, forged in variants(config, SEED):
        with suppress(ModelError):
            llama_config_from_hf(json.loads(to_text(forged)))
