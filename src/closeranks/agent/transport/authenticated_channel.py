"""Handshake and framing of one authenticated connection, without sockets: bytes in, messages and bytes out.

    client                         server
    hello(nonce)            ->
                            <-     hello(nonce)
    frame 0, empty          ->     valid: the client holds the token
    valid: so does the server  <-  frame 0, empty
    frames 1, 2, ...       <->     frames 1, 2, ...

The client proves itself first: an unauthenticated client gets nothing that was derived from the token, so it has
nothing to test guesses against. Invariant: before frame 0 has been verified, no message is returned and no body is
waited for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from closeranks.agent.transport.framing import (
    HELLO_BYTES,
    NONCE_BYTES,
    VERSION,
    ChannelError,
    ChannelHello,
    FrameReader,
    FrameSigner,
    Role,
    decode_hello,
    derive_signers,
)
from closeranks.agent.transport.token import JobToken
from closeranks.core.errors import CloseranksError

Fields = dict[str, Any]


class AuthenticatedChannel:
    """One side. The caller sends what is in ``outbox``, and closes the connection when ``feed`` raises."""

    def __init__(self, role: Role, token: JobToken, *, max_bytes: int, nonce: bytes | None = None) -> None:
        self._token = token
        self._max_bytes = max_bytes
        self._ours = ChannelHello(role, nonce or secrets.token_bytes(NONCE_BYTES))
        self._hello_buffer = bytearray()
        self._signer: FrameSigner | None = None
        self._reader: FrameReader | None = None
        self.is_open = False
        """Whether the other side has proved that it holds the token."""
        self.outbox = bytearray()
        if role == "client":
            self.outbox += self._ours.encode()

    @property
    def is_between_messages(self) -> bool:
        """Whether no message has arrived in part."""
        return not self._hello_buffer and (self._reader is None or self._reader.is_empty)

    @property
    def has_sent_proof(self) -> bool:
        """Whether our proof was sent: if the other side closes the connection now, it has rejected the proof."""
        return self.is_open or (self._ours.role == "client" and self._signer is not None)

    def queue(self, fields: Fields) -> None:
        """Append a signed message to the outbox; the channel must be open."""
        if self._signer is None or not self.is_open:
            raise CloseranksError("a message was queued before the other side was authenticated")
        body = json.dumps(fields, separators=(",", ":")).encode()
        if len(body) > self._max_bytes:
            raise CloseranksError(f"a message of {len(body)} bytes is too large to send (at most {self._max_bytes})")
        self.outbox += self._signer.encode_frame(body)

    def feed(self, data: bytes) -> Iterator[Fields]:
        """The messages that have arrived completely. Raises ``ChannelError`` at the first violation of the protocol."""
        if self._reader is None:
            data = self._read_hello(data)
        if self._reader is None:
            return
        for body in self._reader.feed(data):
            if self.is_open:
                yield _fields(body)
            else:
                self._open(self._reader)

    def _read_hello(self, data: bytes) -> bytes:
        """Consume the other side's hello; returns the bytes after it."""
        self._hello_buffer += data
        theirs = decode_hello(self._hello_buffer, "server" if self._ours.role == "client" else "client")
        if theirs is None:
            return b""
        if self._ours.role == "server":
            self.outbox += self._ours.encode()  # even to another version, which can then report the mismatch
        if theirs.version != VERSION:
            what = f"speaks version {theirs.version} of the control channel, this side {VERSION}"
            raise ChannelError(f"{what}: install the same closeranks on both")
        self._set_signers(theirs)
        rest = bytes(self._hello_buffer[HELLO_BYTES:])
        self._hello_buffer.clear()
        return rest

    def _set_signers(self, theirs: ChannelHello) -> None:
        is_client = self._ours.role == "client"
        signers = derive_signers(self._token, *((self._ours, theirs) if is_client else (theirs, self._ours)))
        self._signer = signers.client if is_client else signers.server
        self._reader = FrameReader(signers.server if is_client else signers.client, max_bytes=0)
        if is_client:
            self.outbox += self._signer.encode_frame(b"")

    def _open(self, reader: FrameReader) -> None:
        """Frame 0 has been verified."""
        reader.set_max_bytes(self._max_bytes)
        self.is_open = True
        if self._ours.role == "server" and self._signer is not None:
            self.outbox += self._signer.encode_frame(b"")


def _fields(body: bytes) -> Fields:
    """Decode a message. Its sender holds the token, but it may still be malformed."""
    try:
        fields = json.loads(str(body, "utf-8"))
    except (ValueError, RecursionError):
        raise ChannelError("sent a message that is not JSON") from None
    if not isinstance(fields, dict):
        raise ChannelError("sent a message that is not a JSON object")
    return fields
