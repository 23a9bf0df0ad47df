"""Listing and fetching from S3 while the store and the way to it misbehave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from closeranks.storage.listing import list_disk, version_of
from closeranks.storage.object_store.download import NUM_STREAMS, RANGE_BYTES
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.protocol import ChangedError, DeniedError, MissingError, StoppedError, StorageError
from tests.storage import servers
from tests.storage.proxy import ANSWER, Rule, Standing, pausing
from tests.storage.servers import Server
from tests.storage.test_conformance import SOON, put
from tests.storage.test_s3_faults import opened

DATA = os.urandom(2 * RANGE_BYTES + 1000)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("GET", "/data", times=3, status=503),
        Rule("GET", "/data", times=3, status=500, code="InternalError"),
        Rule("GET", "/data", times=2, cut_answer_after_bytes=70_000),
        Rule("GET", "/data", times=3, cut_answer_after_bytes=0),
        Rule("GET", "/data", delay_s=0.2),
    ],
    ids=["throttled", "internal", "cut", "cut at once", "late"],
)
def test_what_passes_is_waited_out(moto: Server, prefix: str, rule: Rule, proxied: Standing) -> None:
    put(opened(moto.endpoint, prefix), "data", DATA, step=1 << 20)
    with proxied(moto.endpoint, rule) as proxy:
        storage = opened(proxy.endpoint, prefix)
        assert b"".join(storage.fetch(storage.entry("data"))) == DATA
        assert rule.num_applied == rule.times
        num_asked = len([line for line in proxy.requests if line.startswith("GET")])
        # A cut beyond the end of a short range cuts nothing, and which request meets the rule is chance.
        assert num_asked >= 3 + (1 if rule.cut_answer_after_bytes > 0 else 0 if rule.delay_s else rule.times)


def test_what_does_not_pass_is_a_sentence(moto: Server, prefix: str, proxied: Standing) -> None:
    put(opened(moto.endpoint, prefix), "data", b"1")
    with proxied(moto.endpoint, Rule("GET", "/data", times=-1, status=503)) as proxy:
        storage = opened(proxy.endpoint, prefix, num_tries=3)
        with pytest.raises(StorageError, match=r"reading s3://\S+/data failed: SlowDown"):
            list(storage.fetch(storage.entry("data")))
        assert proxy.rules[0].num_applied == 3


def test_ranges_travel_side_by_side_but_not_too_many(moto: Server, prefix: str, proxied: Standing) -> None:
    put(opened(moto.endpoint, prefix), "data", DATA, step=1 << 20)
    with proxied(moto.endpoint, Rule("GET", "/data", times=-1, delay_s=0.2)) as proxy:
        storage = opened(proxy.endpoint, prefix)
        assert b"".join(storage.fetch(storage.entry("data"))) == DATA
        assert 2 <= proxy.most_at_once <= NUM_STREAMS


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_file_replaced_on_the_way_is_noticed(
    request: pytest.FixtureRequest, server: str, prefix: str, proxied: Standing
) -> None:
    """All ranges have the right length, and one may be of the old file."""
    upstream: Server = request.getfixturevalue(server)
    direct = opened(upstream.endpoint, prefix)
    put(direct, "data", DATA, step=1 << 20)
    entry = direct.entry("data")
    coming = direct.fetch(entry)
    with closing(coming):
        assert next(coming) == DATA[:RANGE_BYTES]
    rules = [Rule("GET", "/data"), Rule("GET", "/data", then=lambda: put(direct, "data", DATA[::-1]))]
    with proxied(upstream.endpoint, *rules) as proxy:
        with pytest.raises(ChangedError, match=r"s3://\S+/data is not the file that was listed"):
            list(opened(proxy.endpoint, prefix).fetch(entry))
        assert len(proxy.requests) <= 3, "no patience with it"


def test_stopping_waits_for_no_answer(moto: Server, prefix: str, proxied: Standing) -> None:
    put(opened(moto.endpoint, prefix), "data", b"1" * 1000)
    stop, answer = threading.Event(), threading.Event()
    started = threading.Event()
    rule = Rule("GET", "/data", then=pausing(started, answer))
    with proxied(moto.endpoint, rule) as proxy:
        storage = opened(proxy.endpoint, prefix)
        entry = storage.entry("data")
        threading.Thread(target=lambda: started.wait(120) and stop.set()).start()
        with pytest.raises(StoppedError, match="given up"):
            list(storage.fetch(entry, stop))
        answer.set()


def test_stopping_ends_the_pauses_between_tries(moto: Server, prefix: str, proxied: Standing) -> None:
    put(opened(moto.endpoint, prefix), "data", b"1" * 1000)
    stop = threading.Event()
    with proxied(moto.endpoint, Rule("GET", "/data", times=-1, status=503, then=stop.set)) as proxy:
        storage = RemoteStorage(f"s3://{prefix}", servers.options(proxy.endpoint))
        began_at = time.monotonic()
        with pytest.raises(StoppedError, match="given up"):
            list(storage.fetch(opened(moto.endpoint, prefix).entry("data"), stop))
        assert time.monotonic() - began_at < 30


def test_a_refusal_to_list_is_told_at_once(rclone: Server, moto: Server, prefix: str) -> None:
    with pytest.raises(DeniedError, match="credentials"):
        opened(rclone.endpoint, prefix, secret="wrong").entries()
    with pytest.raises(MissingError, match="no such file, object or bucket"):
        opened(moto.endpoint, "no-such-bucket/run").entries()


def test_a_whole_bucket_is_listed(moto: Server, prefix: str) -> None:
    put(opened(moto.endpoint, prefix), "data", b"1")
    name = f"{prefix.partition('/')[2]}/data"
    assert name in [entry.name for entry in opened(moto.endpoint, servers.BUCKET).entries()]


@contextmanager
def lister(num_objects: int, num_throttled: int = 0) -> Iterator[tuple[str, list[str]]]:
    """A store that has nothing but a long listing, in pages of a thousand; every page is refused so often first."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return

        def do_GET(self) -> None:
            token = parse_qs(urlparse(self.path).query).get("continuation-token", ["0"])[0]
            asked.append(token)
            if asked.count(token) <= num_throttled:
                return self._answer(503, ANSWER.format("SlowDown"))
            first, last = int(token), min(int(token) + 1000, num_objects)
            item = '<Contents><Key>set/{:07d}</Key><Size>{}</Size><ETag>"{:x}"</ETag></Contents>'
            items = "".join(item.format(number, number, number) for number in range(first, last))
            more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < num_objects else ""
            flag = "true" if more else "false"
            return self._answer(
                200, f"<ListBucketResult><IsTruncated>{flag}</IsTruncated>{more}{items}</ListBucketResult>"
            )

        def _answer(self, status: int, text: str) -> None:
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_that_was_refused_is_asked_for_again_by_itself() -> None:
    with lister(4500, num_throttled=3) as (endpoint, asked):
        storage = RemoteStorage("s3://bucket/set", servers.options(endpoint), policy=SOON)
        entries = storage.entries()
    assert [entry.name for entry in entries] == [f"{number:07d}" for number in range(4500)]
    assert {entry.num_bytes for entry in entries} == set(range(4500))
    assert entries[255].version == "ff"
    assert asked == [token for token in ("0", "1000", "2000", "3000", "4000") for _ in range(4)]


@pytest.mark.slow
def test_a_hundred_thousand_objects_are_listed_in_seconds() -> None:
    with lister(100_000) as (endpoint, asked):
        began_at = time.monotonic()
        assert len(RemoteStorage("s3://bucket/set", servers.options(endpoint)).entries()) == 100_000
        assert len(asked) == 100
        assert time.monotonic() - began_at < 30


def test_links_on_a_disk_are_followed_and_none_leads_in_a_circle_or_nowhere(tmp_path: Path) -> None:
    (tmp_path / "set" / "sub").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_bytes(b"123")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "set" / "one").symlink_to(tmp_path / "far" / "file")
    (tmp_path / "set" / "sub" / "up").symlink_to(tmp_path / "set")
    os.mkfifo(tmp_path / "set" / "pipe")
    with pytest.raises(StorageError, match="pipe failed: it is a named pipe, not a regular file"):
        list_disk(tmp_path / "set")
    (tmp_path / "set" / "pipe").unlink()
    assert [(entry.name, entry.num_bytes) for entry in list_disk(tmp_path / "set")] == [("linked/file", 3), ("one", 3)]
    (tmp_path / "set" / "shard-3").symlink_to(tmp_path / "gone")
    with pytest.raises(MissingError, match="shard-3"):
        list_disk(tmp_path / "set")


def test_a_version_is_the_stores_own_mark() -> None:
    assert version_of({"ETag": '"abc"', "LastModified": 5}) == version_of({"etag": "abc"}) == "abc"
    assert version_of({"ETag": 'W/"abc"'}) == "abc"
    assert version_of({"ETag": "", "mtime": 12.5}) == "12.5"
    assert version_of({"size": 3}) == ""
