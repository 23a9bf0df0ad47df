"""Encodes texts as token ids.

Byte by byte, or with a Hugging Face tokenizer file. Invariant: the ids of a document depend on its text and the encoder
alone, not on the batch it was encoded in; every document ends with the end-of-document id if there is one. Special
tokens that a tokenizer would put around a text are left out: a stream of documents needs only the end-of-document
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import read_bytes
from closeranks.data.dataset_protocol import Ints

BYTES = "bytes"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<|end|>", "[SEP]")
"""Names of the end-of-document token in existing tokenizers, the most common first."""
_LONG = 4 << 20
"""In characters: longer texts are encoded in pieces, cut after a line, since a tokenizer needs many times the memory of
its text."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Documents, concatenated, and the number of tokens of each."""

    tokens: npt.NDArray[Any]
    lengths: Ints


class TokenEncoder(Protocol):
    """Texts are given as UTF-8, which the reader has validated if ``needs_utf8`` is set."""

    vocab_size: int
    dtype: np.dtype[Any]
    eos: int | None
    needs_utf8: bool
    bytes_per_byte: float
    """Expected bytes of tokens per byte of text."""

    def encode(self, texts: Sequence[bytes]) -> EncodedTexts: ...


class ByteEncoder:
    """Every byte is a token."""

    vocab_size = 256
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    needs_utf8 = False
    bytes_per_byte = 1.0

    def __init__(self, eos: int | None = None) -> None:
        self.eos = eos
        self._end = b"" if eos is None else bytes([eos])

    def encode(self, texts: Sequence[bytes]) -> EncodedTexts:
        if len(texts) == 1 and not self._end:  # a memory-mapped text takes no memory this way
            return EncodedTexts(np.frombuffer(texts[0], dtype=np.uint8), np.array([len(texts[0])], dtype=np.int64))
        joined = b"".join(chain.from_iterable((text, self._end) for text in texts)) if self._end else b"".join(texts)
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)) + len(self._end)
        return EncodedTexts(np.frombuffer(joined, dtype=np.uint8), lengths)


class TokenizerEncoder:
    """A ``tokenizer.json`` of the ``tokenizers`` library, which this process uses with one thread."""

    needs_utf8 = True

    def __init__(self, tokenizer: Any, eos: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos = eos
        self.vocab_size = largest_id(tokenizer) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self.bytes_per_byte = self.dtype.itemsize / 4  # a token of a trained vocabulary is about four bytes of text

    def encode(self, texts: Sequence[bytes]) -> EncodedTexts:
        pieces = [_pieces(text.decode()) for text in texts]
        encoded = self._tokenizer.encode_batch_fast(list(chain.from_iterable(pieces)), add_special_tokens=False)
        ids = iter([one.ids for one in encoded])
        end = [] if self.eos is None else [self.eos]
        rows = [[*chain.from_iterable(next(ids) for _ in held), *end] for held in pieces]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        tokens = np.fromiter(chain.from_iterable(rows), dtype=self.dtype, count=int(lengths.sum()))
        return EncodedTexts(tokens, lengths)


def _pieces(text: str) -> list[str]:
    if len(text) <= _LONG:
        return [text]
    pieces, start = [], 0
    while start < len(text):
        end = start + _LONG
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return pieces


def largest_id(tokenizer: Any) -> int:
    """Ids of added tokens may lie beyond the vocabulary's own, with gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Which encoder a build uses: small enough to send to every process and to record."""

    tokenizer: str
    """``bytes``, or the path of the file."""
    digest: str
    """BLAKE3 of the file: a different file under the same name makes a different build."""
    eos: int | None


def encoder_spec(tokenizer: str, eos: str) -> EncoderSpec:
    """The user's choice, checked. ``eos``: a number, ``auto`` or ``none``."""
    if tokenizer == BYTES:
        return EncoderSpec(BYTES, "", _asked_eos(eos, 256) if eos not in ("auto", "none") else None)
    path = _file_of(tokenizer)
    data = _read(path)
    loaded = _parse(data, path)
    found = find_eos(loaded) if eos == "auto" else None if eos == "none" else _asked_eos(eos, largest_id(loaded) + 1)
    return EncoderSpec(str(path), blake3(data).hexdigest(length=16), found)


def open_encoder(spec: EncoderSpec) -> TokenEncoder:
    if spec.tokenizer == BYTES:
        return ByteEncoder(spec.eos)
    data = _read(Path(spec.tokenizer))
    if blake3(data).hexdigest(length=16) != spec.digest:
        what = f"the tokenizer file '{spec.tokenizer}' has changed since the build began"
        raise DataError(what, "Put it back, or rebuild with --overwrite.")
    return TokenizerEncoder(_parse(data, Path(spec.tokenizer)), spec.eos)


def open_decoder(tokenizer: str) -> Any:
    """The tokenizer from a file, to turn ids back into text."""
    path = _file_of(tokenizer)
    return _parse(_read(path), path)


def find_eos(tokenizer: Any) -> int | None:
    """The end-of-document token among those that a tokenizer file marks as special."""
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return next((special[name] for name in _ENDS if name in special), None)


def _asked_eos(eos: str, vocab_size: int) -> int:
    if not eos.isdecimal():
        raise DataError(f"--eos {eos} is not a token id", "Give a number, 'auto' or 'none'.")
    if int(eos) >= vocab_size:
        raise DataError(f"--eos {eos} lies outside the vocabulary of {vocab_size}", f"Give 0 to {vocab_size - 1}.")
    return int(eos)


def _file_of(tokenizer: str) -> Path:
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        fix = "Name a tokenizer.json, a folder that holds one, or 'bytes'."
        raise DataError(f"there is no tokenizer file '{path}'", fix)
    return path


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        what = f"the tokenizer file '{path}' cannot be read: {error.strerror}"
        raise DataError(what, "Check its permissions.") from error


def _parse(data: bytes, path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        fix = "Install it: pip install tokenizers, or closeranks[data]."
        raise DataError("tokenizer files need the package 'tokenizers'", fix) from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception, with serde's reason
        what = f"'{path}' is not a tokenizer file of the tokenizers library ({error})"
        raise DataError(what, "Give the tokenizer.json of a Hugging Face model.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
