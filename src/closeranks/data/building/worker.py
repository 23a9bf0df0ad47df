"""The worker process of a build: builds the parts that its parent assigns, one after the other.

    parent --(BuildSpec)--> worker        once
    parent --(part number)--> worker --(bytes read)...--(PartDone or an error)--> parent

Invariants: it exits when its parent exits, for whatever reason, and when the parent closes the connection; Ctrl-C is
handled by the parent. Imports no torch.

    python -P -m closeranks.data.building.worker SOCKET_FD PARENT_PID
"""

from __future__ import annotations

import errno
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from closeranks.core.errors import CloseranksError, RunFailed, SetupError, encode
from closeranks.core.system.linux import die_with_parent
from closeranks.core.system.stdio import ignore_broken_pipes
from closeranks.core.tracebacks import describe_error
from closeranks.data.building.build_spec import BuildSpec
from closeranks.data.building.part_builder import PartBuilder

_REPORT_S = 0.1


@dataclass(slots=True)
class _ByteReporter:
    """Reports from time to time how many bytes were read."""

    connection: Connection
    reported_at: float = 0.0
    unreported: int = field(default=0)

    def __call__(self, num_bytes: int) -> None:
        self.unreported += num_bytes
        now = time.monotonic()
        if now - self.reported_at >= _REPORT_S:
            self.connection.send(("bytes", self.unreported))
            self.reported_at, self.unreported = now, 0


def serve(connection: Connection) -> None:
    spec: BuildSpec = connection.recv()
    on_bytes = _ByteReporter(connection)
    builder = PartBuilder(spec, on_bytes)
    while True:
        try:
            index = connection.recv()
        except EOFError:
            return
        connection.send(_done(builder, index, spec))


def _done(builder: PartBuilder, index: int, spec: BuildSpec) -> tuple[str, Any]:
    try:
        return "done", builder.build(spec.parts[index])
    except CloseranksError as error:
        return "failed", encode(error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        return "failed", encode(disk_error(error, spec))
    except Exception as error:
        what = f"part {index} of the build raised {describe_error(error)}"
        return "failed", encode(RunFailed(what))


def disk_error(error: OSError, spec: BuildSpec) -> CloseranksError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "Free some space, and run the same command again: it continues from the finished shards."
        return SetupError(f"no space is left for '{spec.out}' ({error.strerror})", fix)
    where = f" '{error.filename}'" if error.filename else ""
    return SetupError(f"reading or writing{where} failed: {error.strerror or error}", "Run the same command again.")


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    ignore_broken_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked since its start (see worker_pool.py)
    with Connection(int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError, EOFError):
            return  # the parent is gone


if __name__ == "__main__":
    main()
