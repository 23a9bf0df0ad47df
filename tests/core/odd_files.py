"""Things that may lie where a file is expected."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

KINDS = ("fifo", "socket", "device", "loop", "folder")


def put(kind: str, path: Path) -> None:
    """In place of whatever is there. A device is a link, which needs no privilege to make."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with socket.socket(socket.AF_UNIX) as bound:  # by a short name: the kernel's limit is 108 bytes
                bound.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case _:
            path.mkdir()
