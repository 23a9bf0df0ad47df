"""Every byte of a sealed document counts."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format.documents import VERSION, seal, unseal
from closeranks.core.errors import CheckpointError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_what_was_sealed_comes_back(body: object) -> None:
    assert unseal("part", seal("part", body), "here") == body


def test_the_bytes_are_those_of_the_description() -> None:
    text = b'{"a":[1,2.5,null,"\xc3\xa4"]}'
    first = b'{"closeranks":"part","version":1,"blake3":"' + blake3(text).hexdigest().encode() + b'"}\n'
    assert seal("part", {"a": [1, 2.5, None, "ä"]}) == first + text


def test_every_single_flipped_bit_is_refused() -> None:
    data = seal("latest", {"name": "step-00000040", "blake3": "ab" * 32})
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="here"):
            unseal("latest", bytes(flipped), "here")


def test_every_cut_and_every_appended_byte_is_refused() -> None:
    data = seal("latest", {"name": "step-00000040"})
    for torn in (*(data[:end] for end in range(len(data))), data + b" ", data + b"\0", b" " + data):
        with pytest.raises(CheckpointError, match="here"):
            unseal("latest", torn, "here")


def sealed(text: bytes, kind: str = "latest", version: object = VERSION) -> bytes:
    first = f'{{"closeranks":"{kind}","version":{version},"blake3":"{blake3(text).hexdigest()}"}}\n'
    return first.encode() + text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sealed(b"{}", kind="part"), "not written by closeranks"),
        (sealed(b"{}", version=VERSION + 1), f"format version {VERSION + 1}, and this program reads up to {VERSION}"),
        (sealed(b"{}", version=0), "version 0, which never existed"),
        (sealed(b"{}", version="true"), "not written by closeranks"),
        (sealed(b"{}", version="1.0"), "not written by closeranks"),
        (sealed(b"{"), "is not JSON"),
        (sealed(b"\xff"), "is not JSON"),
        (sealed(b"[" * 200_000), "is not JSON"),
        (sealed(b"9" * 20_000), "is not JSON"),
        (b"[" * 200_000, "not written by closeranks"),
        (json.dumps({"closeranks": "latest"}).encode(), "not written by closeranks"),
        (b"", "not written by closeranks"),
    ],
)
def test_what_is_not_ours_is_refused_with_its_reason(data: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        unseal("latest", data, "here")


def test_a_number_that_json_has_not_cannot_be_sealed() -> None:
    with pytest.raises(ValueError, match="JSON"):
        seal("latest", float("nan"))
