"""What an S3 store and the way to it can do wrong: real servers, and a proxy that misbehaves on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.storage.errors import UnknownUploadError
from closeranks.storage.object_store.multipart import NUM_STREAMS
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.protocol import DeniedError, ExistsError, MissingError, Storage, StorageError
from tests.storage import servers
from tests.storage.proxy import Rule, Standing
from tests.storage.servers import Server
from tests.storage.test_conformance import PART, SOON, put

DATA = os.urandom(2 * PART + 1000)


def opened(endpoint: str, prefix: str, secret: str = servers.SECRET, num_tries: int = SOON.num_tries) -> RemoteStorage:
    options = servers.options(endpoint, secret)
    return RemoteStorage(f"s3://{prefix}", options, policy=replace(SOON, num_tries=num_tries), part_bytes=PART)


def left_in(server: Server, prefix: str) -> list[str]:
    """Of this test: everything in the bucket, unfinished uploads included."""
    folder = prefix.partition("/")[2]
    uploads = [key for key in servers.unfinished_uploads(server.endpoint) if key.startswith(folder)]
    return uploads + opened(server.endpoint, prefix).names()


def put_or_abort(storage: Storage, name: str) -> None:
    sink = storage.create(name, len(DATA))
    try:
        sink.write(DATA)
        sink.close()
    except StorageError:
        sink.abort()
        raise


@pytest.mark.parametrize(
    "rule",
    [
        Rule("PUT", "partNumber=2", times=3, status=503),
        Rule("PUT", "partNumber=1", times=2, status=500),
        Rule("PUT", "partNumber=2", status=400, code="BadDigest"),
        Rule("PUT", "partNumber=2", status=400, code="RequestTimeout"),
        Rule("POST", "uploads", status=503),
        Rule("POST", "uploadId=", status=503),
        Rule("PUT", "partNumber=1", times=2, cut_after_bytes=70_000),
        Rule("PUT", "partNumber=3", cut_after_bytes=0),
        Rule("PUT", "partNumber=2", is_answer_lost=True),
        Rule("POST", "uploadId=", is_answer_lost=True),
        Rule("GET", "data", cut_answer_after_bytes=1000),
        Rule("GET", "data", status=503),
        Rule("HEAD", "data", times=2, status=503),
    ],
    ids=lambda rule: f"{rule.method} {rule.query}",
)
def test_what_passes_is_waited_out(moto: Server, prefix: str, rule: Rule, proxied: Standing) -> None:
    with proxied(moto.endpoint, rule) as proxy:
        storage = opened(proxy.endpoint, prefix)
        put(storage, "data", DATA)
        assert b"".join(storage.read_fresh("data", 200_000)) == DATA
        assert rule.num_applied == rule.times
    assert left_in(moto, prefix) == ["data"]


@pytest.mark.parametrize("server", ["moto", "rclone"])
@pytest.mark.parametrize(
    "rule",
    [
        Rule("PUT", "partNumber=2", times=-1, status=503),
        Rule("PUT", "partNumber=3", times=-1, cut_after_bytes=500),
        Rule("POST", "uploadId=", times=-1, status=500),
    ],
    ids=["throttled", "cut", "not joined"],
)
def test_what_does_not_pass_leaves_nothing(
    request: pytest.FixtureRequest, server: str, prefix: str, rule: Rule, proxied: Standing
) -> None:
    upstream: Server = request.getfixturevalue(server)
    with proxied(upstream.endpoint, replace(rule)) as proxy:
        storage = opened(proxy.endpoint, prefix, num_tries=3)
        with pytest.raises(StorageError, match="step-00000001/data failed"):
            put_or_abort(storage, "step-00000001/data")
        assert 3 <= proxy.rules[0].num_applied <= 6, "the HTTP library sends once more by itself on a kept connection"
    assert left_in(upstream, prefix) == []


def test_only_one_layer_tries_again(moto: Server, prefix: str, proxied: Standing) -> None:
    with proxied(moto.endpoint, Rule("PUT", times=-1, status=503)) as proxy:
        with pytest.raises(StorageError, match="SlowDown"):
            opened(proxy.endpoint, prefix, num_tries=4).publish("latest", b"1", replace=True)
        assert len([line for line in proxy.requests if line.startswith("PUT")]) == 4


def test_parts_travel_side_by_side_but_not_too_many(moto: Server, prefix: str, proxied: Standing) -> None:
    with proxied(moto.endpoint, Rule("PUT", "partNumber", times=-1, delay_s=0.2)) as proxy:
        put(opened(proxy.endpoint, prefix), "data", b"x" * (6 * PART))
        assert 2 <= proxy.most_at_once <= NUM_STREAMS


def test_a_document_whose_answer_was_lost_is_not_a_rival(moto: Server, prefix: str, proxied: Standing) -> None:
    with proxied(moto.endpoint, Rule("PUT", "manifest", is_answer_lost=True)) as proxy:
        storage = opened(proxy.endpoint, prefix)
        storage.publish("manifest.json", b"mine")
        assert len([line for line in proxy.requests if line.startswith("PUT")]) >= 2
        assert storage.read("manifest.json") == b"mine"


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_the_store_itself_refuses_a_second_document(
    moto: Server, prefix: str, is_answer_lost: bool, proxied: Standing
) -> None:
    """The rival comes after we looked and before our bytes arrive: only the condition on the put can see it."""
    rival = opened(moto.endpoint, prefix)
    rules = [Rule("PUT", "manifest", cut_after_bytes=0)] if is_answer_lost else []
    rules.append(Rule("PUT", "manifest", then=lambda: rival.publish("manifest.json", b"rival")))
    with proxied(moto.endpoint, *rules) as proxy, pytest.raises(ExistsError, match=r"manifest\.json"):
        opened(proxy.endpoint, prefix).publish("manifest.json", b"mine")
    assert rival.read("manifest.json") == b"rival"


def test_wrong_credentials_are_refused_at_once(rclone: Server, prefix: str, proxied: Standing) -> None:
    with proxied(rclone.endpoint) as proxy:
        storage = opened(proxy.endpoint, prefix, secret="wrong")
        started_at = time.monotonic()
        for act in (storage.names, lambda: storage.size("latest"), lambda: put(storage, "data", DATA)):
            with pytest.raises(DeniedError, match="credentials"):
                act()
        with pytest.raises(DeniedError, match="credentials"):
            storage.publish("latest", b"1", replace=True)
        assert len(proxy.requests) == 4
        assert time.monotonic() - started_at < 30


def test_no_credentials_are_refused(rclone: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    storage = RemoteStorage(f"s3://{prefix}", {"endpoint_url": rclone.endpoint})
    with pytest.raises(DeniedError, match="credentials"):
        storage.names()


def test_a_bucket_that_is_not_there_is_missing(moto: Server) -> None:
    storage = opened(moto.endpoint, "no-such-bucket/run")
    assert storage.names() == []
    with pytest.raises(MissingError, match="no-such-bucket/run/latest"):
        storage.publish("latest", b"1")
    with pytest.raises(MissingError, match="no such file, object or bucket"):
        put(storage, "data", DATA)


def test_nobody_at_the_endpoint_is_a_sentence(prefix: str) -> None:
    storage = opened(f"http://127.0.0.1:{servers.free_port()}", prefix, num_tries=2)
    with pytest.raises(StorageError, match=r"listing s3://runs/\S+ failed: .*connect"):
        storage.names()


@pytest.mark.parametrize("query", ["manifest", "small"])
def test_bits_that_flip_on_the_way_are_sent_again(rclone: Server, prefix: str, query: str, proxied: Standing) -> None:
    """rclone compares Content-MD5; moto takes anything."""
    rule = Rule("PUT", query, times=2, is_body_damaged=True)
    with proxied(rclone.endpoint, rule) as proxy:
        storage = opened(proxy.endpoint, prefix)
        put(storage, "small", b"small")
        storage.publish("manifest.json", b"document")
        assert rule.num_applied == 2
        assert storage.read("small") == b"small"
        assert storage.read("manifest.json") == b"document"


def test_a_part_damaged_on_its_way_does_not_get_through(rclone: Server, prefix: str, proxied: Standing) -> None:
    """The part is sent again, unless rclone has passed some of it on and gives up the whole upload: then nothing is
    left, and the next file succeeds."""
    rule = Rule("PUT", "partNumber=2", is_body_damaged=True)
    with proxied(rclone.endpoint, rule) as proxy:
        storage = opened(proxy.endpoint, prefix)
        try:
            put_or_abort(storage, "data")
        except UnknownUploadError:
            assert left_in(rclone, prefix) == []
            put(storage, "data", DATA)
        assert rule.num_applied == 1
        assert storage.read("data") == DATA


def test_reading_back_sees_what_lies_there(rclone: Server, prefix: str, tmp_path: Path) -> None:
    storage = opened(rclone.endpoint, prefix)
    put(storage, "data", DATA)
    assert b"".join(storage.read_fresh("data", PART)) == DATA
    stored = Path(rclone.command[-1]) / prefix / "data"
    with stored.open("r+b") as file:
        file.seek(PART + 7)
        file.write(bytes([DATA[PART + 7] ^ 4]))
    seen = b"".join(storage.read_fresh("data", PART))
    assert [at for at in range(len(DATA)) if seen[at] != DATA[at]] == [PART + 7]
    os.truncate(stored, PART)
    with pytest.raises(StorageError, match="data"):
        storage.read("data", 0, len(DATA))


def test_a_server_that_dies_and_returns(tmp_path: Path, prefix: str, proxied: Standing) -> None:
    """Its uploads are forgotten, so the file fails cleanly; documents and the next file succeed."""
    with servers.rclone(tmp_path) as server, ThreadPoolExecutor(1) as keeper:
        dies, returns = server.kill, lambda: keeper.submit(server.start).result()
        rules = [Rule("PUT", "partNumber=2", then=dies), Rule("PUT", "partNumber=2", then=returns)]
        with proxied(server.endpoint, *rules) as proxy:
            storage = opened(proxy.endpoint, prefix)
            with pytest.raises(StorageError, match="data failed"):
                put_or_abort(storage, "data")
            assert storage.names() == []
            put(storage, "data", DATA)
            proxy.rules += [Rule("PUT", "latest", then=dies), Rule("PUT", "latest", then=returns)]
            storage.publish("latest", b"1")
            assert storage.names() == ["data", "latest"]
            assert storage.read("data") == DATA


def child(script: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300)


USE = """
import sys, time
from closeranks.storage.open import open_storage
storage = open_storage(sys.argv[1] if len(sys.argv) > 1 else {url!r})
storage.publish("latest", b"1")
sink = storage.create("data", 6 << 20)
sink.write(b"x" * (6 << 20))
sink.close()
assert storage.names() == ["data", "latest"]
print(time.time())
"""


def settings_of(endpoint: str, kind: str) -> dict[str, str]:
    if kind == "fsspec":
        return {"FSSPEC_S3": json.dumps(servers.options(endpoint))}
    aws = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET}
    return {**aws, "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.mark.parametrize("kind", ["fsspec", "aws"])
def test_the_environment_names_the_endpoint_and_the_process_ends_soon(rclone: Server, prefix: str, kind: str) -> None:
    done = child(USE.format(url=f"s3://{prefix}"), settings_of(rclone.endpoint, kind))
    assert (done.returncode, done.stderr) == (0, "")
    assert time.time() - float(done.stdout) < 3


@pytest.mark.parametrize("label", ["part sent", "parts sent", "upload complete", "document put"])
def test_a_killed_upload_is_not_there_and_swept_away(rclone: Server, prefix: str, label: str) -> None:
    script = f"""
from closeranks.storage.object_store.remote import RemoteStorage
storage = RemoteStorage("s3://{prefix}", part_bytes={PART})
sink = storage.create("data", {len(DATA)})
sink.write(bytes({len(DATA)}))
sink.close()
storage.publish("manifest.json", b"1")
"""
    done = child(script, {**settings_of(rclone.endpoint, "fsspec"), "CLOSERANKS_KILL_AT": label})
    assert done.returncode == -9
    storage = opened(rclone.endpoint, prefix)
    finished = {"upload complete": ["data"], "document put": ["data", "manifest.json"]}.get(label, [])
    assert storage.names() == finished
    storage.remove_stale()
    assert bool(set(left_in(rclone, prefix)) - set(finished)) == (not finished), "a young upload is left alone"
    storage.remove_stale(older_than_s=0)
    assert left_in(rclone, prefix) == finished


def test_a_removed_folder_takes_its_unfinished_uploads_along(moto: Server, prefix: str) -> None:
    storage: Storage = opened(moto.endpoint, prefix)
    sink = storage.create("step-00000001/data", 3 * PART)
    sink.write(bytes(2 * PART + 1))
    put(storage, "step-00000002/data", b"1")
    storage.remove_folder("step-00000001")
    assert left_in(moto, prefix) == ["step-00000002/"]
    sink.abort()
