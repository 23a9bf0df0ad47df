"""Configs of Hugging Face as shapes: as many parameters as were published, and one sentence for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.errors import ModelError
from closeranks.facts.shapes.hf_config import read_hf_config, transformer_of
from closeranks.facts.shapes.transformer import num_active_params, num_params

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
}  # fmt: skip
BERT = {"num_key_value_heads": None, "max_position_embeddings": 512, "hidden_size": 768, "num_hidden_layers": 12}
MOE = {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = [
    (LLAMA, 8.03e9),
    ({**LLAMA, "model_type": "mistral", "vocab_size": 32_000}, 7.24e9),
    ({**LLAMA, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
      "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064}, 7.62e9),
    ({**LLAMA, "model_type": "mixtral", "vocab_size": 32_000, "num_local_experts": 8,
      "num_experts_per_tok": 2}, 46.7e9),
    ({**LLAMA, **MOE, "model_type": "qwen3_moe", "num_key_value_heads": 4, "intermediate_size": 6144,
      "moe_intermediate_size": 768, "vocab_size": 151_936}, 30.5e9),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
      "vocab_size": 50_257}, 124.4e6),
    ({**LLAMA, **BERT, "model_type": "bert", "num_attention_heads": 12, "intermediate_size": 3072,
      "vocab_size": 30_522}, 109.5e6),
]  # fmt: skip


@pytest.mark.parametrize(("config", "published"), PUBLISHED, ids=lambda value: str(value)[:22])
def test_a_config_has_as_many_parameters_as_its_model(config: dict[str, Any], published: float) -> None:
    """Biases, and BERT's pooler and kinds of tokens, are not counted: less than 1%."""
    assert num_params(transformer_of(config)) == pytest.approx(published, rel=0.01)


def test_of_the_experts_only_those_in_use_are_active() -> None:
    shape = transformer_of(PUBLISHED[3][0])
    assert num_active_params(shape) == pytest.approx(12.7e9, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [({}, 0), ({"decoder_sparse_step": 2}, 24), ({"mlp_only_layers": [0, 5]}, 2), ({"mlp_only_layers": None}, 0)],
)
def test_layers_without_experts_are_counted(changes: dict[str, Any], num_dense: int) -> None:
    assert transformer_of({**PUBLISHED[4][0], **changes}).num_dense_layers == num_dense


def test_an_encoder_sees_all_positions_and_a_decoder_those_before() -> None:
    bert = PUBLISHED[6][0]
    assert [transformer_of(one).is_causal for one in (LLAMA, bert, {**bert, "is_decoder": True})] == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, "does not say its model_type"),
        ({"model_type": 7}, "says model_type = 7, which is no name"),
        ({"model_type": "t5"}, "an encoder and a decoder"),
        ({"model_type": "vit"}, "patches of images"),
        ({"model_type": "misstral"}, "whose shape is not known here. .*Did you mean 'mistral'"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "4096"}, "says hidden_size = '4096', which is not a size"),
        ({"num_hidden_layers": True}, "not a size"),
        ({"vocab_size": -1}, "not a size"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5"),
        ({"hidden_size": 16}, "32 heads cannot share evenly"),
        ({"tie_word_embeddings": "no"}, "neither true nor false"),
        ({"model_type": "mixtral"}, "does not say num_local_experts"),
        ({**PUBLISHED[4][0], "mlp_only_layers": [True]}, "no list of layers"),
        ({**PUBLISHED[4][0], "decoder_sparse_step": 0}, "not a size"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        transformer_of({**LLAMA, **changes})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"Name a config\.json"):
        read_hf_config(tmp_path / "config.json")


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(tmp_path) == read_hf_config(tmp_path / "config.json") == transformer_of(LLAMA)
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_hf_config(tmp_path / "other.json")
