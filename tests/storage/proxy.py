"""A proxy on a real socket that answers some requests in a store's stead, cuts connections, or takes its time."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>Not now.</Message></Error>'


@dataclass
class Rule:
    """For the first ``times`` requests that ``method`` and ``query`` fit; -1: for all of them."""

    method: str
    query: str = ""
    times: int = 1
    status: int = 0
    """Answer this and do not ask the store."""
    code: str = "SlowDown"
    """What the answer says."""
    cut_after_bytes: int = -1
    """Read so much of the body and reset the connection; the store never sees the request."""
    is_answer_lost: bool = False
    """Pass it on, and reset the connection instead of answering."""
    is_body_damaged: bool = False
    """Flip a bit of what goes to the store."""
    cut_answer_after_bytes: int = -1
    """Send so much of the answer's body and reset the connection."""
    delay_s: float = 0.0
    then: Callable[[], None] | None = None
    """Called when the rule applies, before anything else."""
    num_applied: int = 0


def pausing(reached: threading.Event, go_on: threading.Event) -> Callable[[], None]:
    """For ``Rule.then``: says that the request came, and keeps it until it may go on."""

    def pause() -> None:
        reached.set()
        go_on.wait(120)

    return pause


@dataclass
class Proxy:
    upstream: str
    rules: list[Rule] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    port: int = 0
    num_now: int = 0
    most_at_once: int = 0
    """Of requests."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, change: int) -> None:
        with self.lock:
            self.num_now += change
            self.most_at_once = max(self.most_at_once, self.num_now)

    def rule_for(self, method: str, path: str) -> Rule | None:
        with self.lock:
            self.requests.append(f"{method} {path}")
            for rule in self.rules:
                if rule.method == method and rule.query in path and rule.num_applied != rule.times:
                    rule.num_applied += 1
                    return rule
        return None


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return

        def _serve(self) -> None:
            proxy.count(1)
            try:
                self._serve_one()
            finally:
                proxy.count(-1)

        def _serve_one(self) -> None:
            rule = proxy.rule_for(self.command, self.path) or Rule("")
            if rule.then:
                rule.then()
            if rule.delay_s:
                time.sleep(rule.delay_s)
            length = int(self.headers.get("Content-Length", 0))
            if rule.cut_after_bytes >= 0:
                self.rfile.read(min(length, rule.cut_after_bytes))
                return self._reset()
            body = self.rfile.read(length)
            if rule.is_body_damaged:
                body = bytes([body[0] ^ 1]) + body[1:]
            if rule.status:
                return self._answer(
                    rule.status, [("Content-Type", "application/xml")], ANSWER.format(rule.code).encode()
                )
            try:
                status, headers, data = self._forward(body)
            except OSError:
                return self._reset()
            if rule.is_answer_lost:
                return self._reset()
            return self._answer(status, headers, data, rule.cut_answer_after_bytes)

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(proxy.upstream.removeprefix("http://"), timeout=30)
            try:
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                skipped = ("transfer-encoding", "connection", "content-length")
                kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in skipped]
                if self.command == "HEAD":
                    kept.append(("Content-Length", answer.getheader("Content-Length") or "0"))
                return answer.status, kept, answer.read()
            finally:
                connection.close()

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: int = -1) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data if cut < 0 else data[:cut])
            if cut >= 0:
                self._reset()

        def _reset(self) -> None:
            """An RST, not a FIN: what a crashed host or a firewall looks like."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    return Handler


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        return  # connections end in all the ways this proxy is for


class Standing:
    """One proxy for each server, for as long as the tests run: a client is costly to set up, and is kept by address."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[Proxy, _QuietServer, threading.Thread]] = {}

    @contextmanager
    def __call__(self, upstream: str, *rules: Rule) -> Iterator[Proxy]:
        if upstream not in self._servers:
            self._servers[upstream] = self._started(upstream)
        proxy = self._servers[upstream][0]
        proxy.rules, proxy.requests, proxy.most_at_once = list(rules), [], 0
        try:
            yield proxy
        finally:
            proxy.rules = []

    def _started(self, upstream: str) -> tuple[Proxy, _QuietServer, threading.Thread]:
        proxy = Proxy(upstream)
        server = _QuietServer(("127.0.0.1", 0), _handler(proxy))
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        return proxy, server, thread

    def close(self) -> None:
        for _, server, thread in self._servers.values():
            server.shutdown()
            server.server_close()
            thread.join()
