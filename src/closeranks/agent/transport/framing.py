"""Frames of the control channel, signed with an HMAC so that forged, replayed or reordered ones are rejected.

    hello    magic (18) | role (1) | version (2) | nonce (32)                        in the clear, both sides
    frame    length (4) | tag of the length (16) | body | tag of the body (32)       everything after that

A tag is an HMAC-SHA256 over (direction, both hellos, which part, number of the frame, part), under a key derived from
the job token and both nonces. It covers the hellos, so altering one invalidates every tag; the nonces are fresh on each
side, so a frame of another connection is never valid; the number is counted, never sent, so a frame that is dropped,
repeated or reordered fails its check. The length has a tag of its own: a forged length is rejected at once, instead of
being waited for. Invariant: no byte of a body is used before its tag has been verified, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from closeranks.agent.transport.token import JobToken
from closeranks.core.errors import CloseranksError

VERSION = 2
MAGIC = b"closeranks-control"
NONCE_BYTES = 32

Role = Literal["client", "server"]

_ROLES: dict[Role, bytes] = {"client": b"c", "server": b"s"}
_HELLO = struct.Struct(f">{len(MAGIC)}s1sH{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
_LENGTH = struct.Struct(">I")
_LENGTH_TAG_BYTES = 16
_HEADER_BYTES = _LENGTH.size + _LENGTH_TAG_BYTES
_TAG_BYTES = hashlib.sha256().digest_size
_PART = struct.Struct(">BQ")
_OF_LENGTH, _OF_BODY = 0, 1

_FOREIGN = (
    (
        (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"HTTP", b"PRI "),
        "speaks HTTP, not the control channel's protocol",
    ),
    ((b"\x16\x03", b"\x15\x03"), "speaks TLS, not the control channel's protocol"),
    ((b"SSH-",), "speaks SSH, not the control channel's protocol"),
)


class ChannelError(CloseranksError):
    """The data received is not valid on this channel; ``what`` is worded to follow the name of the other side."""


@dataclass(frozen=True, slots=True)
class ChannelHello:
    """The first data that a side sends: its role and a fresh nonce."""

    role: Role
    nonce: bytes
    version: int = VERSION

    def encode(self) -> bytes:
        return _HELLO.pack(MAGIC, _ROLES[self.role], self.version, self.nonce)


def decode_hello(data: bytes | bytearray, role: Role) -> ChannelHello | None:
    """The hello at the start of ``data``; None while it is incomplete. Raises at the first byte that does not match."""
    expected = MAGIC + _ROLES[role]
    if not expected.startswith(bytes(data[: len(expected)])):
        raise ChannelError(_foreign(bytes(data[: len(expected)])))
    if len(data) < HELLO_BYTES:
        return None
    _, _, version, nonce = _HELLO.unpack_from(data)
    return ChannelHello(role, nonce, version)


def _foreign(data: bytes) -> str:
    """Which protocol the other side seems to speak. Its bytes are not quoted: they would reach a terminal or a log."""
    if data.startswith(MAGIC):
        return "is on the same side of the channel: two leaders, or two hosts, were connected to each other"
    for beginnings, description in _FOREIGN:
        if data.startswith(beginnings):
            return description
    return "does not speak the control channel's protocol"


@dataclass(frozen=True, slots=True)
class FrameSigners:
    """One signer for what the client sends, one for what the server sends."""

    client: FrameSigner
    server: FrameSigner


def derive_signers(token: JobToken, client: ChannelHello, server: ChannelHello) -> FrameSigners:
    """HKDF (RFC 5869) with one block: extract with a label of ours as salt, expand with both nonces."""
    extracted = hmac.digest(b"closeranks control channel", token.secret, "sha256")
    key = hmac.digest(extracted, b"frames" + client.nonce + server.nonce + b"\x01", "sha256")
    both = client.encode() + server.encode()
    return FrameSigners(FrameSigner(key, b"client to server" + both), FrameSigner(key, b"server to client" + both))


class FrameSigner:
    """Signs or verifies the frames of one direction of one connection, each frame once and in order."""

    def __init__(self, key: bytes, context: bytes) -> None:
        self._prefix_hmac = hmac.new(key, context, hashlib.sha256)
        self._number = 0

    def encode_frame(self, body: bytes) -> bytes:
        """The next frame."""
        length = _LENGTH.pack(len(body))
        frame = b"".join((length, self._tag(_OF_LENGTH, length), body, self._tag(_OF_BODY, body)))
        self._number += 1
        return frame

    def check_length(self, header: bytes) -> int:
        length, tag = header[: _LENGTH.size], header[_LENGTH.size :]
        self._check(self._tag(_OF_LENGTH, length), tag)
        return int(_LENGTH.unpack(length)[0])

    def check_body(self, body: bytes, tag: bytes) -> None:
        self._check(self._tag(_OF_BODY, body), tag)
        self._number += 1

    def _tag(self, part: int, data: bytes) -> bytes:
        tag = self._prefix_hmac.copy()
        tag.update(_PART.pack(part, self._number))
        tag.update(data)
        return tag.digest()[: _LENGTH_TAG_BYTES if part == _OF_LENGTH else _TAG_BYTES]

    def _check(self, expected: bytes, given: bytes) -> None:
        if hmac.compare_digest(expected, given):
            return
        if self._number == 0:
            raise ChannelError("does not hold this job's token (or what it sent was altered in transit)")
        raise ChannelError("sent a message that was altered, replayed or reordered in transit")


class FrameReader:
    """Bytes in, verified bodies out; an incomplete frame stays in the buffer."""

    def __init__(self, signer: FrameSigner, max_bytes: int) -> None:
        self._signer = signer
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._length: int | None = None
        """Length of the body that is awaited, once its header has been verified."""

    @property
    def is_empty(self) -> bool:
        return not self._buffer and self._length is None

    def set_max_bytes(self, max_bytes: int) -> None:
        """Set the largest body that is accepted from now on."""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each body before the next frame is checked, so that an invalid frame does not discard valid ones
        before it."""
        self._buffer += data
        while (body := self._next()) is not None:
            yield body

    def _next(self) -> bytes | None:
        if self._length is None:
            if len(self._buffer) < _HEADER_BYTES:
                return None
            self._length = self._signer.check_length(self._take(_HEADER_BYTES))
            if self._length > self._max_bytes:
                raise ChannelError(f"sent a message of {self._length} bytes; at most {self._max_bytes} are accepted")
        if len(self._buffer) < self._length + _TAG_BYTES:
            return None
        body = self._take(self._length)
        self._signer.check_body(body, self._take(_TAG_BYTES))
        self._length = None
        return body

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken
