"""Configs and names of Hugging Face's Llamas against ours: round trips, transformers' own reading, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import CheckpointError, ModelError
from closeranks.facts.shapes.llama import PRESETS, LlamaShape, parameter_shapes
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.hf_conversion import hf_config, llama_config_from_hf, match_names, max_len_of

SHAPE = LlamaShape(64, 2, 4, 2, 96, 300)
FOUND = parameter_shapes(SHAPE)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}

shapes = st.builds(
    lambda head, heads, group, shape: replace(
        shape, dim=2 * head * heads * group, num_heads=heads * group, num_kv_heads=heads
    ),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 4),
    st.builds(
        LlamaShape,
        st.just(0),
        st.integers(1, 100),
        st.just(0),
        st.just(0),
        st.integers(1, 10**5),
        st.integers(1, 10**6),
        rope_theta=st.floats(1.0, 1e7),
        rope_factor=st.sampled_from([1.0, 2.0, 8.0, 32.0]),
        rope_original_len=st.integers(1, 10**6),
        norm_eps=st.sampled_from([1e-6, 1e-5]),
        tied=st.booleans(),
    ),
)


@given(shapes, st.integers(1, 10**6))
def test_a_shape_comes_back_from_its_config(shape: LlamaShape, max_len: int) -> None:
    config = json.loads(json.dumps(hf_config(shape, max_len=max_len, dtype="float32")))
    table = llama_config_from_hf(config)
    assert max_len_of(config) == max_len
    expected = shape if shape.rope_factor != 1.0 else replace(shape, rope_original_len=8192)
    assert LlamaConfig.model_validate(table).shape() == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_come_back(preset: str) -> None:
    table = llama_config_from_hf(hf_config(PRESETS[preset], max_len=8192, dtype="bfloat16"))
    assert LlamaConfig.model_validate(table).shape() == PRESETS[preset]


def test_a_published_config_of_either_style_names_the_same_shape() -> None:
    """As Llama 3.2 1B was published, and as a later transformers saves it again."""
    earlier: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    stretch = {**earlier["rope_scaling"], "rope_theta": 500000.0}
    later = {key: value for key, value in earlier.items() if not key.startswith("rope")} | {"rope_parameters": stretch}
    for config in (earlier, later):
        assert LlamaConfig.model_validate(llama_config_from_hf(config)).shape() == PRESETS["1b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"model_type": None}, "model_type = None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = "),
        ({"head_dim": 32}, "head_dim = 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling\.rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"rope_parameters\.rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"does not say rope_scaling\.factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0\.5"),
        ({"rope_scaling": [1]}, "which is not a table"),
        ({"rope_theta": "high"}, "rope_theta = 'high'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
    ],
)
def test_what_our_llama_cannot_do_is_refused_by_the_key_that_says_it(change: dict[str, Any], said: str) -> None:
    sound = hf_config(SHAPE, max_len=64, dtype="float32")
    llama_config_from_hf(sound)
    with pytest.raises(ModelError, match=said) as refused:
        llama_config_from_hf({**sound, **change}, "there/config.json")
    assert refused.value.what.startswith("there/config.json")
    assert "\n" not in str(refused.value)


# Names


def test_equal_names_match() -> None:
    assert match_names(FOUND, FOUND, {}, "w").names == {name: name for name in FOUND}


@pytest.mark.parametrize("prefix", ["language_model.", "base.model."])
def test_a_prefix_of_theirs_is_taken_off(prefix: str) -> None:
    found = {f"{prefix}{name}": shape for name, shape in FOUND.items()}
    assert match_names(FOUND, found, {}, "w").names == {name: f"{prefix}{name}" for name in FOUND}


def test_a_prefix_is_seen_where_much_is_missing() -> None:
    found = {f"lm.{name}": shape for name, shape in FOUND.items() if ".1." not in name}
    with pytest.raises(CheckpointError, match=r"no 'model\.layers\.1\..* and 8 more"):
        match_names(FOUND, found, {}, "w")


def test_a_base_model_fits_a_tied_one() -> None:
    wanted = {name: shape for name, shape in FOUND.items() if name != "lm_head.weight"}
    found = {name.removeprefix("model."): shape for name, shape in wanted.items()}
    assert match_names(wanted, found, TIED, "w").names == {name: name.removeprefix("model.") for name in wanted}


def test_a_head_beside_a_base_model_is_found() -> None:
    found = {name.removeprefix("model."): shape for name, shape in FOUND.items()}
    assert match_names(FOUND, found, {}, "w").names["lm_head.weight"] == "lm_head.weight"


def test_a_tied_name_that_is_stored_alone_or_twice() -> None:
    wanted = {name: shape for name, shape in FOUND.items() if name != "lm_head.weight"}
    twice = match_names(wanted, FOUND, TIED, "w")
    assert twice.duplicates == {"model.embed_tokens.weight": "lm_head.weight"}
    assert twice.names["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    alone = {name: shape for name, shape in FOUND.items() if name != "model.embed_tokens.weight"}
    other = match_names(wanted, alone, TIED, "w")
    assert other.names["model.embed_tokens.weight"] == "lm_head.weight"
    assert not other.duplicates


def test_tables_of_angles_are_no_weights() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert match_names(FOUND, {**FOUND, name: (8,)}, {}, "w").ignored == (name,)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({name: shape for name, shape in FOUND.items() if name != "model.norm.weight"}, r"no 'model\.norm\.weight' of"),
        ({name: shape for name, shape in FOUND.items() if ".1." not in name}, r"and 8 more of the model's 21 tensors"),
        ({**FOUND, "score.weight": (2, 64)}, "w has 'score.weight', which the model does not have"),
        ({**FOUND, "model.norm.weight": (65,)}, r"'model\.norm\.weight' has shape \(65,\) in w and \(64,\)"),
        ({name: shape for name, shape in FOUND.items() if name != "lm_head.weight"}, r"Set model\.tied = true"),
        ({}, "and 20 more"),
        ({"other.weight": (3,)}, "it has 'other.weight'"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(found: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        match_names(FOUND, found, {}, "w")


def test_transformers_reads_our_config_as_we_mean_it(tmp_path: Path) -> None:
    from tests.models.published import transformers

    shape = PRESETS["3b"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, max_len=512, dtype="bfloat16")))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (read.model_type, read.head_dim, read.num_key_value_heads) == ("llama", shape.head_dim, shape.num_kv_heads)
    assert read.tie_word_embeddings
    assert read.rms_norm_eps == shape.norm_eps
    rope = getattr(read, "rope_parameters", None) or {**read.rope_scaling, "rope_theta": read.rope_theta}
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert llama_config_from_hf(read.to_dict()) == llama_config_from_hf(hf_config(shape, max_len=512, dtype="bfloat16"))
