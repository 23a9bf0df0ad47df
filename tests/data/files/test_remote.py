"""Data behind a URL: real S3 servers, and a proxy that misbehaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from closeranks.core.errors import DataError, SetupError
from closeranks.data.files.cache import FileCache, PrefetchOutcome
from closeranks.data.files.open import open_files
from closeranks.data.files.protocol import Files
from tests.data.files.test_prefetch import end_of_threads
from tests.storage import servers
from tests.storage.proxy import Proxy, Rule, Standing, pausing
from tests.storage.servers import Server
from tests.storage.test_conformance import put
from tests.storage.test_s3_faults import opened

SIZES = {f"set/{number:02d}.bin": 20_000 + number for number in range(12)}
DATA = {name: os.urandom(size) for name, size in SIZES.items()}

Opener = Callable[..., Files]


@pytest.fixture
def open_at(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens this test's place at an endpoint as a job would: what it takes stands in fsspec's settings."""

    def open_it(endpoint: str, cache_bytes: int = 10**9, secret: str = servers.SECRET, place: str = "") -> Files:
        monkeypatch.setitem(fsspec.config.conf, "s3", servers.options(endpoint, secret))
        return open_files(f"s3://{place or prefix}", cache=str(tmp_path / "cache"), cache_bytes=cache_bytes)

    return open_it


def upload(server: Server, prefix: str, data: dict[str, bytes] = DATA) -> None:
    storage = opened(server.endpoint, prefix)
    for name, content in data.items():
        put(storage, name, content, step=1 << 20)


def gets(proxy: Proxy) -> Counter[str]:
    """How often each object was asked for."""
    lines = [line.split()[1] for line in proxy.requests if line.startswith("GET") and "list-type" not in line]
    return Counter(line.partition("?")[0].rpartition("/")[2] for line in lines)


def read(files: Files, name: str) -> bytes:
    with files.local_path(name) as path:
        return path.read_bytes()


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_prefix_is_a_folder_of_files(
    request: pytest.FixtureRequest, server: str, prefix: str, open_at: Opener, proxied: Standing
) -> None:
    upstream: Server = request.getfixturevalue(server)
    upload(upstream, prefix, {**DATA, ".hidden": b"1", "none": b"", "dataset.json": b"{}"})
    with proxied(upstream.endpoint) as proxy:
        files = open_at(proxy.endpoint)
        assert not files.is_local
        assert proxy.requests == []
        assert {info.name: info.num_bytes for info in files.list()} == {**SIZES, "none": 0, "dataset.json": 2}
        assert [info.name for info in files.list()] == sorted([*SIZES, "none", "dataset.json"])
        num_asked = len(proxy.requests)
        assert files.read("dataset.json") == b"{}"
        assert files.read("none") == read(files, "none") == b""
        assert files.read(".hidden") == b"1"
        for copy in (files, pickle.loads(pickle.dumps(files)), open_at(proxy.endpoint)):
            for name in SIZES:
                assert read(copy, name) == DATA[name]
        assert all(gets(proxy)[name.rpartition("/")[2]] == 1 for name in SIZES)
        assert num_asked < 5
    assert files.full_name("none") == f"s3://{prefix}/none"
    files.close()


def test_a_url_of_one_file_is_a_folder_of_one(moto: Server, prefix: str, open_at: Opener) -> None:
    upload(moto, prefix)
    name = "03.bin"
    one = open_at(moto.endpoint, place=f"{prefix}/set/{name}")
    assert [(info.name, info.num_bytes) for info in one.list()] == [(name, SIZES[f"set/{name}"])]
    assert read(one, name) == one.read(name) == DATA[f"set/{name}"]
    assert one.full_name(name) == one.url == f"s3://{prefix}/set/{name}"
    folder = open_at(moto.endpoint)
    with one.local_path(name) as here, folder.local_path(f"set/{name}") as there:
        assert here == there, "the same file, however it was named"


@pytest.mark.parametrize(
    "rule",
    [
        Rule("GET", ".bin", times=3, status=503),
        Rule("GET", ".bin", times=2, status=500, code="InternalError"),
        Rule("GET", ".bin", times=2, cut_answer_after_bytes=9_000),
        Rule("GET", "list-type", times=2, status=503),
        Rule("HEAD", times=2, status=503),
    ],
    ids=["throttled", "internal", "cut", "listing", "looking"],
)
def test_what_passes_is_waited_out(
    moto: Server, prefix: str, rule: Rule, open_at: Opener, proxied: Standing, tmp_path: Path
) -> None:
    upload(moto, prefix)
    with proxied(moto.endpoint, rule) as proxy:
        files = open_at(proxy.endpoint)
        files.list()
        for name in SIZES:
            assert read(files, name) == DATA[name]
        assert rule.num_applied == rule.times
    assert len(list((tmp_path / "cache").glob("file-*"))) == len(SIZES)


def test_what_is_missing_or_refused_is_one_sentence(
    moto: Server, rclone: Server, prefix: str, open_at: Opener, tmp_path: Path
) -> None:
    upload(moto, prefix)
    with pytest.raises(DataError, match="credentials"):
        open_at(rclone.endpoint, secret="wrong").list()
    with pytest.raises(DataError, match="no such file, object or bucket"):
        open_at(moto.endpoint, place="no-such-bucket/set").list()
    with pytest.raises(DataError, match=r"there are no files in s3://\S+/nothing"):
        open_at(moto.endpoint, place=f"{prefix}/nothing").list()
    files = open_at(moto.endpoint)
    with pytest.raises(DataError, match=r"'gone' is not among the files of s3://"):
        read(files, "gone")
    with pytest.raises(DataError, match=r"reading|looking"):
        files.read("gone")
    opened(moto.endpoint, prefix).remove("set/03.bin")
    with pytest.raises(DataError, match=r"set/03\.bin failed: there is no such file, object"):
        read(files, "set/03.bin")
    with pytest.raises(SetupError, match="unknown protocol"):
        open_files("s4://bucket/set")
    assert list((tmp_path / "cache").glob("part-*")) == []


def test_a_file_replaced_since_it_was_listed_is_refused(moto: Server, prefix: str, open_at: Opener) -> None:
    upload(moto, prefix)
    files = open_at(moto.endpoint)
    files.list()
    assert read(files, "set/00.bin") == DATA["set/00.bin"]
    upload(moto, prefix, {name: DATA[name][::-1] for name in ("set/00.bin", "set/01.bin")})
    assert read(files, "set/00.bin") == DATA["set/00.bin"], "here already, in the version that was listed"
    with pytest.raises(DataError, match=r"set/01\.bin is not the file that was listed.*Put the old file back"):
        read(files, "set/01.bin")
    with pytest.raises(DataError, match="not the file that was listed"):
        files.read("set/01.bin")
    assert read(open_at(moto.endpoint), "set/01.bin") == DATA["set/01.bin"][::-1]


def test_wishes_are_fetched_in_the_background(moto: Server, prefix: str, open_at: Opener, proxied: Standing) -> None:
    upload(moto, prefix)
    with proxied(moto.endpoint) as proxy:
        files = open_at(proxy.endpoint)
        names = list(SIZES)
        files.prefetch([*names[:4], "no such file"])
        end_of_threads()
        assert sorted(gets(proxy)) == [f"{number:02d}.bin" for number in range(4)]
        for name in names[:4]:
            assert read(files, name) == DATA[name]
        assert set(gets(proxy).values()) == {1}
        proxy.rules = [Rule("GET", "05.bin", times=-1, status=404, code="NoSuchKey")]
        files.prefetch(["set/05.bin"])
        end_of_threads()
        with pytest.raises(DataError, match=r"05\.bin"):
            read(files, "set/05.bin")
        proxy.rules = []
        assert read(files, "set/05.bin") == DATA["set/05.bin"]
        files.close()


def test_letting_go_makes_room_for_wishes(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had_no_room = threading.Event()
    fetch_ahead = FileCache.prefetch

    def spied(*args: Any) -> PrefetchOutcome:
        outcome = fetch_ahead(*args)
        if outcome is PrefetchOutcome.NO_SPACE:
            had_no_room.set()
        return outcome

    monkeypatch.setattr(FileCache, "prefetch", spied)
    monkeypatch.setattr("closeranks.data.files.prefetch._LOOK_S", 100.0)
    fsspec.filesystem("memory").pipe({f"/{prefix}/{name}": bytes(100) for name in "ab"})
    files = open_files(f"memory://{prefix}", cache=str(tmp_path / "cache"), cache_bytes=150)
    with files.local_path("a"):
        files.prefetch(["b"])
        assert had_no_room.wait(120)
    end_of_threads()
    assert [path.name[-2:] for path in (tmp_path / "cache").glob("file-*")] == ["-b"]
    files.close()


def read_in_child(files: Files, name: str, answer: multiprocessing.Queue[bytes]) -> None:  # pragma: no cover
    files.prefetch(["set/07.bin"])
    answer.put(read(files, name))
    files.close()


def test_a_forked_child_reads_on_while_its_parent_fetches(
    moto: Server, prefix: str, open_at: Opener, proxied: Standing
) -> None:
    """The fork comes while threads of the parent fetch: their locks and connections are none of the child's."""
    upload(moto, prefix)
    forked, asked = threading.Event(), threading.Event()
    rule = Rule("GET", "05.bin", then=pausing(asked, forked))
    with proxied(moto.endpoint, rule) as proxy:
        files = open_at(proxy.endpoint)
        with files.local_path("set/00.bin"):
            files.prefetch(["set/05.bin", "set/06.bin"])
            assert asked.wait(120)
            context = multiprocessing.get_context("fork")
            answer: multiprocessing.Queue[bytes] = context.Queue()
            child = context.Process(target=read_in_child, args=(files, "set/01.bin", answer))
            child.start()
            forked.set()
            assert answer.get(timeout=30) == DATA["set/01.bin"]
            child.join(30)
            assert child.exitcode == 0
            assert read(files, "set/05.bin") == DATA["set/05.bin"]
        end_of_threads()
        files.close()


def test_a_plain_web_server_will_do(tmp_path: Path) -> None:
    (tmp_path / "web" / "set").mkdir(parents=True)
    for name in ("a.bin", "b.bin"):
        (tmp_path / "web" / "set" / name).write_bytes(DATA[f"set/0{ord(name[0]) - 96}.bin"])

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web")))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_address[1]}/set/"
        for url, names in ((base, ["a.bin", "b.bin"]), (f"{base}b.bin", ["b.bin"])):
            files = open_files(url, cache=str(tmp_path / "cache"))
            assert [info.name for info in files.list()] == names
            assert read(files, "b.bin") == DATA["set/02.bin"]
            files.close()
        for url in (f"{base}none.bin", f"{base}none/"):
            with pytest.raises(DataError, match=r"set/none\S* failed: there is no such file.*Check the place"):
                open_files(url, cache=str(tmp_path / "cache")).list()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("name", ["set/", "set", "a.bin", ""])
def test_a_web_server_that_does_not_answer_is_no_empty_folder(tmp_path: Path, name: str) -> None:
    url = f"http://127.0.0.1:{servers.free_port()}/{name}"
    with pytest.raises(DataError, match=r"127\.0\.0\.1\S* failed: .*[Cc]onnect") as caught:
        open_files(url, cache=str(tmp_path / "cache")).list()
    assert "no such file" not in str(caught.value)


def test_neither_torch_nor_numpy_is_needed() -> None:
    script = (
        "import sys; from closeranks.data.files.open import open_files; open_files('memory://x');"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
