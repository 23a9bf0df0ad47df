"""Real S3 servers on free loopback ports: moto (honours conditional puts, keeps everything in memory) and rclone
(checks credentials and digests, keeps plain files in a folder)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY, SECRET = "AKIALEDGER", "a-secret-of-the-tests"
BUCKET = "runs"


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A process that can be killed and started again at the same port."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # Not by a function that runs between fork and exec: beside other threads that has crashed the child. The kernel
        # ties it to the thread that calls this, not to the process: that thread must stay.
        dying = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
        with self.log.open("ab") as log:
            environ = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}
            self.process = subprocess.Popen([*dying, *self.command], stdout=log, stderr=log, env=environ)
        until = time.monotonic() + 300  # moto imports a lot, and a machine may be busy
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.command[0]} did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)  # nothing tells when a foreign server listens

    def _answers(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[Server]:
    server = Server(command, port, log)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "moto.log") as server:
        make_bucket(server.endpoint)
        yield server


@contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """Buckets are the folders of ``folder/data``."""
    port = free_port()
    data = folder / "data"
    (data / BUCKET).mkdir(parents=True)
    program = Path(sys.executable).with_name("rclone")
    where = ["--addr", f"127.0.0.1:{port}", "--config", str(folder / "rclone.conf")]
    command = [str(program), "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", *where]
    with running([*command, str(data)], port, folder / "rclone.log") as server:
        yield server


def options(endpoint: str, secret: str = SECRET) -> dict[str, Any]:
    client = {"region_name": "us-east-1"}
    return {"endpoint_url": endpoint, "key": KEY, "secret": secret, "client_kwargs": client}


def make_bucket(endpoint: str) -> None:
    import s3fs

    s3fs.S3FileSystem(**options(endpoint)).call_s3("create_bucket", Bucket=BUCKET)


def unfinished_uploads(endpoint: str) -> list[str]:
    import s3fs

    try:
        found = s3fs.S3FileSystem(**options(endpoint)).list_multipart_uploads(BUCKET)
    except FileNotFoundError:  # what rclone says for none
        return []
    return [upload["Key"] for upload in found]
