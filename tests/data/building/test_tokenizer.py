"""Texts to token ids: bytes, and a tokenizer file of the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from closeranks.core.errors import DataError
from closeranks.data.building import tokenizer as encode
from closeranks.data.building.tokenizer import ByteEncoder, TokenizerEncoder, encoder_spec, open_encoder
from tests.data.building.material import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@given(st.lists(st.binary(max_size=30), max_size=8), st.none() | st.integers(0, 255))
def test_bytes_are_the_tokens_and_every_document_ends_with_the_end(texts: list[bytes], eos: int | None) -> None:
    encoded = ByteEncoder(eos).encode(texts)
    end = b"" if eos is None else bytes([eos])
    cuts = np.cumsum(encoded.lengths)[:-1]
    assert encoded.tokens.dtype == np.uint8
    assert [part.tobytes() for part in np.split(encoded.tokens, cuts)][: len(texts)] == [text + end for text in texts]


def test_a_file_encodes_each_document_as_the_library_does_alone(tokenizer_file: Path) -> None:
    spec = encoder_spec(str(tokenizer_file), "auto")
    texts = ["import os\n", "", "def f(x):\n    return x", "Grüße, 世界 🎉"]
    encoded = open_encoder(spec).encode([text.encode() for text in texts])
    library = Tokenizer.from_file(str(tokenizer_file))
    expected = [[*library.encode(text, add_special_tokens=False).ids, spec.eos] for text in texts]
    assert [row.tolist() for row in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])] == expected
    assert encoded.tokens.dtype == np.uint16
    assert library.id_to_token(spec.eos) == "<|endoftext|>"


def test_a_vocabulary_beyond_16_bits_takes_32(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_tokens([f"added{number}" for number in range(66000)])
    encoder = TokenizerEncoder(tokenizer, None)
    assert encoder.dtype == np.uint32
    assert encoder.encode([b"added65999"]).tokens.tolist() == [encoder.vocab_size - 1]


def test_long_texts_are_encoded_in_pieces_that_end_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_LONG", 10)
    assert encode._pieces("abc\ndefg\nhijk\nl" + "m" * 12) == ["abc\ndefg\n", "hijk\n", "l" + "m" * 9, "mmm"]
    assert encode._pieces("0123456789") == ["0123456789"]


def test_truncation_and_padding_of_the_file_are_not_applied(tokenizer_file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "cut.json"))
    cut = open_encoder(encoder_spec(str(tmp_path / "cut.json"), "none")).encode([b"import os, sys, json"])
    whole = open_encoder(encoder_spec(str(tokenizer_file), "none")).encode([b"import os, sys, json"])
    assert cut.tokens.tolist() == whole.tokens.tolist()
    assert 2 < len(cut.tokens) < 50


@pytest.mark.parametrize(
    ("tokenizer", "eos", "words"),
    [
        ("missing.json", "auto", "there is no tokenizer file"),
        ("bytes", "256", "outside the vocabulary of 256"),
        ("bytes", "end", "is not a token id"),
    ],
)
def test_what_cannot_be_is_said(tokenizer: str, eos: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        encoder_spec(tokenizer, eos)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"config\.json' is not a tokenizer file"):
        encoder_spec(str(tmp_path / "config.json"), "auto")


def test_a_file_that_changed_is_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    spec = encoder_spec(str(copy), "auto")
    copy.write_bytes(copy.read_bytes() + b"\n")
    with pytest.raises(DataError, match="has changed since the build began"):
        open_encoder(spec)


def test_a_file_without_an_end_has_none(tokenizer_file: Path, tmp_path: Path) -> None:
    text = tokenizer_file.read_text().replace("<|endoftext|>", "<|whatever|>")
    (tmp_path / "t.json").write_text(text)
    assert encoder_spec(str(tmp_path / "t.json"), "auto").eos is None
