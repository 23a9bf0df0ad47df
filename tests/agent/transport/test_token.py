"""Where a token comes from, and that nobody sees it."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.transport.token import (
    JobToken,
    generate_token,
    given_token,
    host_token,
    leader_token,
    parse_token,
    read_token,
)
from closeranks.core.errors import SetupError
from closeranks.core.system.environment import child_environment, job_token

GOOD = "0123456789abcdef" * 4


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_drawn_token_is_for_its_owner_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "job" / "token"
    before = os.umask(0)
    try:
        token = generate_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    notes: list[str] = []
    assert read_token(path, notes.append) == token
    assert notes == []
    assert len(token.secret) == 64
    assert bytes.fromhex(token.secret.decode()), "32 random bytes, hex"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_each_draw_is_another_and_replaces_what_lay_there(tmp_path: Path) -> None:
    path = written(tmp_path / "token", "old", 0o644)
    tokens = {generate_token(path) for _ in range(20)}
    assert len(tokens) == 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        generate_token(tmp_path / "file" / "token")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no job token"),
        ("  \n", "holds no job token"),
        ("abcdef0123", r"too short \(10 characters, at least 32\)"),
        ("a" * 64, "can be guessed"),
        (f"{GOOD} {GOOD}", "more than one word"),
        (GOOD + "ä", "characters that"),
        (GOOD + "\x00", "characters that"),
    ],
)
def test_what_is_no_token_is_refused_without_being_quoted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words) as caught:
        read_token(written(tmp_path / "token", text), lambda note: None)
    assert "openssl rand -hex 32" in str(caught.value)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_missing_huge_and_foreign_files_are_told(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none", "cannot be read .No such file"),
        (tmp_path, "cannot be read .Is a directory"),
        (written(tmp_path / "huge", GOOD * 100), "larger than 4096"),
    ):
        with pytest.raises(SetupError, match=words):
            read_token(path, lambda note: None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_use_is_warned_of_and_used(tmp_path: Path, mode: int) -> None:
    notes: list[str] = []
    token = read_token(written(tmp_path / "token", f"{GOOD}\n", mode), notes.append)
    assert token == JobToken(GOOD.encode())
    assert len(notes) == 1
    assert f"mode {mode:o}" in notes[0]
    assert GOOD not in notes[0]


@given(st.text())
def test_any_text_is_a_token_or_one_sentence(text: str) -> None:
    try:
        token = parse_token(text, "the shell")
    except SetupError:
        return
    assert token.secret == text.strip().encode()
    assert len(token.secret) >= 32


def test_the_secret_is_in_nobodys_words() -> None:
    token = JobToken(GOOD.encode())
    for shown in (repr(token), str(token), f"{token}", f"{[token]}"):
        assert GOOD not in shown
        assert token.fingerprint in shown
    assert JobToken(b"x" + GOOD.encode()).fingerprint != token.fingerprint
    assert pickle.loads(pickle.dumps(token)) == token


def test_a_file_comes_before_the_shell_and_a_draw_comes_last(tmp_path: Path) -> None:
    path = written(tmp_path / "token", GOOD)
    shell = GOOD[::-1]
    quiet = [].append
    assert given_token(path, shell, quiet) == JobToken(GOOD.encode())
    assert given_token(None, shell, quiet) == JobToken(shell.encode())
    assert given_token(None, "", quiet) is None
    drawn_at = tmp_path / "drawn"
    assert leader_token(None, shell, drawn_at, quiet) == JobToken(shell.encode())
    assert not drawn_at.exists()
    assert leader_token(None, "", drawn_at, quiet) == read_token(drawn_at, quiet)
    with pytest.raises(SetupError, match="joining a job requires its token"):
        host_token(None, "", quiet)
    with pytest.raises(SetupError, match="CLOSERANKS_TOKEN is too short"):
        host_token(None, "short", quiet)


def test_the_shell_is_asked_and_workers_never_see_it() -> None:
    environ = {"CLOSERANKS_TOKEN": GOOD, "HOME": "/h"}
    assert job_token(environ) == GOOD
    assert job_token({}) == ""
    assert GOOD not in child_environment(1, environ).values()
    assert child_environment(1, environ)["HOME"] == "/h"
