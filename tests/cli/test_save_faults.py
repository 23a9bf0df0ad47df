"""Jobs that are hurt while they save, as a person or a cluster would: killed at every point of a save, at any moment
from outside, asked to stop in the middle of one, with a store that fails. What counted stays, and going on is
bit-identical.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.storage.object_store.remote import RemoteStorage
from tests.checkpoint import saving
from tests.checkpoint.test_write_faults import _FIFREEZE, _FITHAW, disk
from tests.cli.commands import ROOT, started, wait_for_line
from tests.cli.fault_hooks import DIE_AT
from tests.cli.fault_jobs import ALONE, IMPORTABLE, STEPS, Course, course, failed, go, hook, saved, write_job
from tests.cli.test_endings import gone_within, last_step
from tests.storage import servers
from tests.storage.proxy import Proxy, Rule, Standing

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]

ENUMERATE = """
import json
from closeranks.core.system.failpoints import FAILPOINTS as POINTS
import closeranks.checkpoint.save.writer_process
import closeranks.storage.local
written = list(POINTS)
import closeranks.storage.object_store.remote
stored = [label for label in POINTS if label not in written]
import closeranks.checkpoint.save.saver
taken = [label for label in POINTS if label not in written + stored]
print(json.dumps([written, stored, taken]))
"""


@cache
def labels() -> tuple[list[str], list[str], list[str]]:
    """Those that a writer passes on a disk, those of an object store, and those that only a trainer passes."""
    done = subprocess.run([sys.executable, "-c", ENUMERATE], cwd=ROOT, capture_output=True, check=True)
    written, stored, taken = json.loads(done.stdout)
    return written, stored, taken


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = go(folder, "checkpoint.every=0")
    assert done.code == 0, done.err
    return course(folder / "run")


def assert_goes_on(folder: Path, undisturbed: Course) -> None:
    done = go(folder, "checkpoint.resume=auto")
    if done.code != 0:  # the last save counted before the kill
        assert "nothing is left to do" in done.err
    assert done.left_behind == []
    assert course(folder / "run") == undisturbed


def assert_clear_report(err: str) -> None:
    assert err.count("closeranks: ") == 1, err
    assert "SIGKILL" in err
    assert "Traceback" not in err


# Killed at the labelled points


def die_handing_over(folder: Path, label: str) -> None:
    """A trainer, in its third save; the second counts then, and was waited for."""
    done = go(folder, ALONE, hook("Patient"), env={"CLOSERANKS_KILL_AT": f"{label}:3"})
    assert done.code == 1, done.err
    assert_clear_report(done.err)
    assert done.left_behind == []
    assert saved(folder / "run") == [2, 4]


def die_writing(folder: Path, label: str) -> None:
    """Writers, in every save up to step 7; that of step 8 succeeds, and so does the trainer's own at the end."""
    run = folder / "run"
    env = {"CLOSERANKS_KILL_AT": label, "FORCE_COLOR": "1"}
    done = go(folder, hook("WritersDie"), "checkpoint.resume=auto", env=env)
    assert done.code == 0, done.err
    assert "the writer was killed by SIGKILL" in (run / "deaths-0").read_text()
    assert saved(run)[-2:] == [8, 9]
    assert set(saved(run)) | set(failed(run)) == {2, 4, 6, 8, 9}, "each save counted or was told of"
    for step in failed(run):
        assert f"\x1b[1;31mstep {step} was not saved" in done.out, "in red"
    assert done.left_behind == []


def die_at_the_end(folder: Path, label: str) -> None:
    """A trainer, in the last save, which it does itself."""
    done = go(folder, ALONE, "checkpoint.every=0", "checkpoint.resume=auto", env={"CLOSERANKS_KILL_AT": label})
    assert done.code == 1, done.err
    assert_clear_report(done.err)
    assert done.left_behind == []


def test_a_run_killed_in_three_ways_ends_as_if_nothing_had_been(tmp_path: Path, undisturbed: Course) -> None:
    die_handing_over(tmp_path, "capture.copied")
    die_writing(tmp_path, "save.first_bytes")
    assert failed(tmp_path / "run") == [6]
    die_at_the_end(tmp_path, "commit.parts_gathered")
    assert_goes_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in labels()[2] if not label.startswith("slot.")])  # no agent, none
def test_a_trainer_killed_while_it_hands_over_a_state(tmp_path: Path, undisturbed: Course, label: str) -> None:
    die_handing_over(tmp_path, label)
    assert_goes_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("label", labels()[0])
def test_writers_killed_in_every_save_do_not_end_the_run(tmp_path: Path, undisturbed: Course, label: str) -> None:
    die_writing(tmp_path, label)
    assert_goes_on(tmp_path, undisturbed)


NOT_AT_THE_END = {"writer.order_received", *(label for label in labels()[0] if label.startswith("collect."))}
"""The only save of a run, in the trainer's own process, has nothing to collect."""


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in labels()[0] if label not in NOT_AT_THE_END])
def test_a_trainer_killed_in_its_last_save(tmp_path: Path, undisturbed: Course, label: str) -> None:
    die_at_the_end(tmp_path, label)
    assert_goes_on(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("label", labels()[2])
def test_a_trainer_killed_while_it_hands_over_a_state_is_replaced(
    tmp_path: Path, undisturbed: Course, label: str
) -> None:
    done = go(tmp_path, hook("Patient"), env={"CLOSERANKS_KILL_AT": f"{label}:3"})
    assert done.code == 0, done.err
    assert "closed ranks in" in done.out
    assert done.left_behind == []
    assert saved(tmp_path / "run")[-1] == STEPS
    assert course(tmp_path / "run") == undisturbed


# Killed from outside


def kill_at_random(folder: Path, dice: random.Random) -> None:
    """SIGKILL to a run that saves after every step, at a moment that neither it nor this test knows."""
    with started("train", write_job(folder), "-n", 2, *OFTEN, "checkpoint.resume=auto", cwd=folder) as (process, name):
        wait_for_line(process, "saved step")
        time.sleep(dice.uniform(0.0, 0.25))
        process.kill()
        process.wait()
        assert gone_within(name, 30.0)


OFTEN = ("checkpoint.every=1", "train.steps=400")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_again_and_again_while_it_saves(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    quiet, hurt = tmp_path / "quiet", tmp_path / "hurt"
    for folder in (quiet, hurt):
        folder.mkdir()
    for _ in range(6):
        kill_at_random(hurt, dice)
    reached = last_step(hurt / "run", 0) + 5
    more = (f"train.steps={reached}", "checkpoint.every=1")
    done = go(hurt, *more, "checkpoint.resume=auto")
    assert done.code == 0, done.err
    assert go(quiet, *more).code == 0
    assert course(hurt / "run") == course(quiet / "run")


# Asked to stop, or to save, while a save is under way

LONG = ("train.steps=1000000", "checkpoint.every=0", "checkpoint.timeout_s=600")


def until(is_so: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def assert_saved_at_the_end(run: Path, step: int) -> None:
    assert last_step(run, 0) == last_step(run, 1) == step, "all ranks stopped at the same step, and it was saved"


@pytest.mark.slow
def test_sigterm_while_a_disk_stands_still(tmp_path: Path) -> None:
    """A save hangs in it; two seconds after the request to stop it moves again, well within the grace."""
    run, place = tmp_path / "run", tmp_path / "disk"
    with disk(place):
        handle = os.open(place, os.O_RDONLY)
        words = ("train", write_job(tmp_path), "-n", 2, *LONG, f"checkpoint.folder={place / 'saved'}")
        with started(*words, cwd=tmp_path) as (process, name):
            wait_for_line(process, "step    50/")
            fcntl.ioctl(handle, _FIFREEZE, 0)
            try:
                process.send_signal(signal.SIGUSR1)
                wait_for_line(process, "step   ")
                process.send_signal(signal.SIGTERM)
                time.sleep(2.0)  # the fault itself
            finally:
                fcntl.ioctl(handle, _FITHAW, 0)
            _, err = process.communicate(timeout=40)
            assert process.returncode == 143, err
            assert gone_within(name, 30.0)
        os.close(handle)
        assert_saved_at_the_end(run, newest_step(str(place / "saved")))


def newest_step(place: str) -> int:
    reader = open_newest(place)
    reader.check_files()
    return reader.manifest.step


@pytest.mark.slow
def test_sigusr1_twice_at_once_saves_and_goes_on(tmp_path: Path) -> None:
    with started("train", write_job(tmp_path), "-n", 2, *LONG, cwd=tmp_path) as (process, name):
        wait_for_line(process, "step    50/")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR1)
        line = wait_for_line(process, "saved step")
        wait_for_line(process, "step ")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=40)
        assert process.returncode == 143, err
        assert gone_within(name, 30.0)
    assert int(re.findall(r"saved step (\d+)", line)[0]) >= 50
    assert_saved_at_the_end(tmp_path / "run", newest_step(str(tmp_path / "run")))


# Object stores


def access(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET}
    return {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}


def far(tmp_path: Path) -> str:
    return f"s3://{servers.BUCKET}/{tmp_path.name}"


def opened(server: servers.Server, url: str) -> RemoteStorage:
    return RemoteStorage(url, servers.options(server.endpoint))


def unfinished(server: servers.Server, tmp_path: Path) -> list[str]:
    return [key for key in servers.unfinished_uploads(server.endpoint) if key.startswith(f"{tmp_path.name}/")]


PATIENT = (hook("Patient"), "checkpoint.timeout_s=150")


def assert_resumes_elsewhere(folder: Path, url: str, server: servers.Server, undisturbed: Course, *more: str) -> None:
    """From the store, by one worker: what it holds and saves again, untrained, is what two workers came to."""
    assert saving.latest_manifest(opened(server, url)).digests() == undisturbed.digests
    settings = (hook("SavedAgain"), f"checkpoint.resume={url}", "run.folder=again", f"train.steps={STEPS + 1}")
    done = go(folder, *settings, *more, num_workers=1, env=access(server.endpoint))
    assert done.code == 0, done.err
    again = open_newest(str(folder / "again" / "as-it-was")).manifest
    assert (again.step, again.num_ranks) == (STEPS, 1)
    assert again.digests() == undisturbed.digests


REFUSED = Rule("PUT", "step-00000004/data-00001", times=-1, status=403, code="AccessDenied")
THROTTLED = Rule("PUT", "step-00000004/", times=4, status=503)
CUT = Rule("PUT", "step-00000004/data-00001", times=-1, cut_after_bytes=5000)
CUT_TWICE = Rule("PUT", "step-00000004/data-0000", times=2, cut_after_bytes=5000)


@pytest.mark.parametrize(
    ("rules", "lost"),
    [
        ([REFUSED], [4]),
        pytest.param([THROTTLED, CUT_TWICE], [], marks=pytest.mark.slow),
        pytest.param([CUT], [4], marks=pytest.mark.slow),
    ],
    ids=["refused", "throttled and cut", "lost connections"],
)
def test_a_store_that_fails_during_a_run(
    tmp_path: Path, undisturbed: Course, moto: servers.Server, proxied: Standing, rules: list[Rule], lost: list[int]
) -> None:
    """For good, as far as one save is concerned: that one is lost. What passes is waited for."""
    url, run = far(tmp_path), tmp_path / "run"
    for rule in rules:
        rule.num_applied = 0
    with proxied(moto.endpoint, *rules) as proxy:
        env = {**access(proxy.endpoint), "FORCE_COLOR": "1"}
        done = go(tmp_path, *PATIENT, f"checkpoint.folder={url}", env=env, timeout_s=250)
        assert done.code == 0, done.err
        assert all(rule.num_applied for rule in rules)
    assert failed(run) == lost
    assert saved(run) == [step for step in range(2, STEPS + 1, 2) if step not in lost]
    assert ("\x1b[1;31mstep 4 was not saved" in done.out) == bool(lost)
    assert unfinished(moto, tmp_path) == []
    assert_resumes_elsewhere(tmp_path, url, moto, undisturbed)


LARGE = ("model.dim=256", "model.ffn_dim=1024", "model.num_layers=4")
"""A state whose halves take two parts each to upload."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Undisturbed."""
    folder = tmp_path_factory.mktemp("large")
    done = go(folder, "checkpoint.every=0", *LARGE)
    assert done.code == 0, done.err
    return course(folder / "run")


@pytest.mark.slow
def test_a_connection_lost_in_the_middle_of_a_part(
    tmp_path: Path, large: Course, moto: servers.Server, proxied: Standing
) -> None:
    url, run = far(tmp_path), tmp_path / "run"
    rule = Rule("PUT", "step-00000004/data-00001", times=-1, cut_after_bytes=1 << 20)
    with proxied(moto.endpoint, rule) as proxy:
        settings = (*PATIENT, *LARGE, f"checkpoint.folder={url}")
        done = go(tmp_path, *settings, env=access(proxy.endpoint), timeout_s=250)
    assert done.code == 0, done.err
    assert rule.num_applied > 1, "it was tried again"
    assert failed(run) == failed(run, rank=1) == [4]
    assert saved(run) == [2, 6, 8, 10, 12]
    assert unfinished(moto, tmp_path) == []
    assert_resumes_elsewhere(tmp_path, url, moto, large, *LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("label", labels()[1])
def test_a_writer_killed_while_it_uploads(tmp_path: Path, large: Course, moto: servers.Server, label: str) -> None:
    url, run, env = far(tmp_path), tmp_path / "run", access(moto.endpoint)
    settings = (*LARGE, f"checkpoint.folder={url}", "checkpoint.timeout_s=15")
    done = go(tmp_path, hook("OneWriterDies"), *settings, env={**env, DIE_AT: label}, timeout_s=200)
    assert done.code == 0, done.err
    assert "the writer was killed by SIGKILL" in (run / "deaths-1").read_text()
    assert saved(run)[-2:] == [8, 9]
    assert {2, 8, 9} <= {*saved(run), *failed(run)}, "those between fall due by steps or are tried again by time"
    done = go(tmp_path, *settings, "checkpoint.resume=auto", env=env)
    assert done.code == 0, done.err
    assert saving.latest_manifest(opened(moto, url)).digests() == large.digests


@pytest.mark.slow
def test_a_store_that_is_killed_and_started_again_between_saves(
    tmp_path: Path, undisturbed: Course, rclone: servers.Server
) -> None:
    url, run = far(tmp_path), tmp_path / "run"
    words = ("train", write_job(tmp_path), "-n", 2, *PATIENT, f"checkpoint.folder={url}")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**access(rclone.endpoint), **IMPORTABLE}.items():
            patch.setenv(key, value)
        with started(*words, cwd=tmp_path) as (process, _):
            wait_for_line(process, "saved step 4")
            rclone.kill()
            rclone.start()
            _, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
    assert saved(run)[-1] == STEPS
    assert set(saved(run)) | set(failed(run)) == set(range(2, STEPS + 1, 2))
    assert_resumes_elsewhere(tmp_path, url, rclone, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        Rule("PUT", "step-00000004/", times=-1, status=403, code="AccessDenied"),
        Rule("PUT", "step-00000004/", times=-1, cut_after_bytes=0),
    ],
    ids=["refused", "lost"],
)
def test_a_second_place_that_is_down_for_a_while(
    tmp_path: Path, undisturbed: Course, moto: servers.Server, proxied: Standing, rule: Rule
) -> None:
    """The first place goes on without it; later ones reach it again."""
    url, run = far(tmp_path), tmp_path / "run"
    rule.num_applied = 0
    with proxied(moto.endpoint, rule) as proxy:
        done = go(tmp_path, *PATIENT, f"checkpoint.remote={url}", env=access(proxy.endpoint), timeout_s=280)
    assert done.code == 0, done.err
    every = list(range(2, STEPS + 1, 2))
    assert saved(run) == every
    assert failed(run) == []
    assert failed(run, "remote") == [4]
    assert saved(run, "remote") == [step for step in every if step != 4]
    assert "step 4 was not saved" in done.out
    assert course(run) == undisturbed
    assert saving.latest_manifest(opened(moto, url)).digests() == undisturbed.digests


def is_uploading(proxy: Proxy) -> bool:
    return any(line.startswith("PUT") and "/data-0000" in line for line in list(proxy.requests))


@pytest.mark.slow
def test_sigterm_while_an_upload_is_under_way(tmp_path: Path, moto: servers.Server, proxied: Standing) -> None:
    """A slow store: the save under way is given up for the last one, which is there before the grace is over."""
    url, run = far(tmp_path), tmp_path / "run"
    words = ("train", write_job(tmp_path), "-n", 2, *LONG, f"checkpoint.folder={url}")
    with proxied(moto.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        for key, value in access(proxy.endpoint).items():
            patch.setenv(key, value)
        with started(*words, cwd=tmp_path) as (process, _):
            wait_for_line(process, "step    50/")
            proxy.rules.append(Rule("PUT", "/data-0000", times=-1, delay_s=3.0))
            process.send_signal(signal.SIGUSR1)
            until(lambda: is_uploading(proxy), "no upload began")
            asked_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=300)
            assert process.returncode == 143, err
            assert time.monotonic() - asked_at < 30.0, "within the grace"
    assert_saved_at_the_end(run, saving.latest_manifest(opened(moto, url)).step)
