"""``closeranks agent`` is told what is wrong with what it was given, in one sentence, and touches nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import closeranks, started, wait_for_line
from tests.cli.fault_jobs import write_job

TOKEN = "0123456789abcdef" * 4
OTHER_VERSION = """
import sys
import closeranks
closeranks.__version__ = "99.0.0"
from closeranks.cli.main import main
main()
"""


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--join", "nowhere"), "'nowhere' is not an address"),
        (("--join", "127.0.0.1:99999"), "is not an address"),
        (("--join", "127.0.0.1:1", "--name", ".."), "'..' is not a host name"),
        (("--join", "127.0.0.1:1", "--name", "."), "'.' is not a host name"),
        (("--join", "127.0.0.1:1", "--name", "a/b"), "'a/b' is not a host name"),
        (("--join", "127.0.0.1:1", "--token-file", "/no/such/token"), "/no/such/token"),
    ],
)
def test_bad_words_are_one_sentence(tmp_path: Path, token: Path, words: tuple[str, ...], said: str) -> None:
    own = () if "--token-file" in words else ("--token-file", token)
    done = closeranks("agent", *words, *own, cwd=tmp_path)
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token"]


@pytest.mark.parametrize("listen", ["10.0.0.1:99999", "lead:", "[]"])
def test_so_is_a_place_to_listen_that_is_none(tmp_path: Path, token: Path, listen: str) -> None:
    words = ("-n", 1, "--hosts", 2, "--listen", listen, "--token-file", token)
    done = closeranks("train", write_job(tmp_path), *words, cwd=tmp_path)
    assert done.code == 2, done.err
    assert "is not an address" in done.err


@pytest.mark.world
def test_another_version_is_refused_by_name(tmp_path: Path, token: Path) -> None:
    words = ("-n", 1, "--hosts", 2, "--listen", "127.0.0.1:0", "--token-file", token)
    with started("train", write_job(tmp_path), *words, cwd=tmp_path) as (lead, _):
        line = wait_for_line(lead, "closeranks agent --join")
        address = line.partition("--join ")[2].split()[0]
        command = [sys.executable, "-c", OTHER_VERSION, "agent", "--join", address, "--token-file", str(token)]
        joined = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert joined.returncode == 2, joined.stderr
        assert "this host 99.0.0" in joined.stderr
        assert "Install the same version on all hosts" in joined.stderr
        lead.send_signal(signal.SIGINT)
        assert lead.wait(300) == 130
