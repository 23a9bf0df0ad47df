from __future__ import annotations

import os
from pathlib import Path

import pytest

from closeranks.core.system.regular_file import open_binary, open_descriptor, read_bytes, read_text, regular_stat
from tests.core.odd_files import KINDS, put

WORDS = {
    "fifo": "it is a named pipe, not a regular file",
    "socket": "it is a socket, not a regular file",
    "device": "it is a device, not a regular file",
    "loop": "Too many levels of symbolic links",
    "folder": "Is a directory",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_at_once_with_what_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(kind, path)
    before = set(os.listdir("/proc/self/fd"))
    for act in (open_descriptor, open_binary, read_bytes, read_text, regular_stat):
        with pytest.raises(OSError) as caught:  # noqa: PT011  the words are compared below
            act(path)
        assert caught.value.strerror == WORDS[kind]
    with pytest.raises(OSError, match=WORDS[kind].replace(".", r"\.")):
        open_descriptor(path, os.O_RDWR | os.O_CREAT)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_is_read_also_through_links_and_a_missing_one_may_be_made(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_bytes(path)
    os.close(open_descriptor(path, os.O_WRONLY | os.O_CREAT, 0o600))
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("häuser")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert (read_bytes(link), read_text(link)) == (path.read_bytes(), "häuser")
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_bytes(path, 3)
