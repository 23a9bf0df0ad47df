"""Leases on a live run's folder and checkpoint places, so that a second run there is refused.

They are held by the process that lives as long as the run: the agent under ``closeranks train``; rank 0 in a script and
under torchrun and srun. Invariants: a run that is refused has changed nothing of the other run; hosts that join and all
other ranks take no lease; reading (status, report, sample, ckpt) and ``ckpt prune`` need none. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.core.errors import SetupError, UserError, decode, encode
from closeranks.core.world import World
from closeranks.run.job.job import Job
from closeranks.run.job.run_folder import (
    choose_folder,
    continues_run,
    holds_run,
    prepare_folder,
    remove_refused_folder,
    unwritable_error,
)
from closeranks.run.worker.agent_client import take_folder
from closeranks.storage.lease import InUseError, Lease, StaleListingError
from closeranks.storage.local import LocalStorage
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import Ownership, Storage, StorageError
from closeranks.telemetry.run_log.run_folder import RunFolder

_RETRY_S = 0.05
_MAX_TRIES = 200
_PERMANENT = (errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""Permanent errors of a place, as opposed to temporary ones."""
_OTHER = "Set folder to a writable one."
_OWNED: list[tuple[str, Ownership]] = []
"""The leases of this process, for ``check_owned``."""


@dataclass(frozen=True, slots=True)
class OwnedRunFolder:
    """A run folder that this process owns."""

    folder: Path
    is_new: bool
    """Whether the folder was made for this run."""


def agree_on_folder(job: Job, world: World, share_text: Callable[[str], str], leases: ExitStack) -> Path:
    """Collective. The folder of a session for which no launcher prepared one: rank 0 chooses it, owns it until
    ``leases`` closes and broadcasts it; if that fails, every rank raises rank 0's error."""
    if not world.is_lead:
        return _decode_folder(share_text(""))
    try:
        owned = leases.enter_context(owned_run_folder(job, Path(sys.argv[0]).stem or "run", take_folder()))
        prepare_folder(job, owned.folder)
        # Absolute: a user's code may change the working folder.
        message: dict[str, Any] = {"folder": str(owned.folder.absolute())}
    except UserError as error:
        message = {"error": encode(error)}
    return _decode_folder(share_text(json.dumps(message)))


def _decode_folder(text: str) -> Path:
    message = json.loads(text)
    if "error" in message:
        raise decode(message["error"])
    return Path(message["folder"])


@contextmanager
def owned_run_folder(job: Job, stem: str, own: Path | None = None) -> Iterator[OwnedRunFolder]:
    """The folder that this run writes to, owned together with its checkpoint places. ``own``: a folder that the
    launcher has made for it."""
    deadline = time.monotonic() + job.run.wait_s
    with ExitStack() as leases:
        owned = _own_folder(job, stem, own, deadline, leases)
        try:
            for key, place in _places(job, owned.folder).items():
                _own_place(job, key, place, deadline, leases)
            yield owned
        except UserError:
            if owned.is_new and not RunFolder(owned.folder).job.exists():
                remove_refused_folder(owned.folder)
            raise


@contextmanager
def owned_folder(folder: Path, what: str) -> Iterator[None]:
    """Own a folder for something that is not a run but writes like one; ``what`` names it, such as "a comparison"."""
    with ExitStack() as leases:
        try:
            _own(leases, LocalStorage(folder), what=what)
        except InUseError as error:
            fix = "Wait until it is over, or set another folder."
            raise SetupError(f"{folder} is in use by {error.rival.holder}", fix) from None
        except StorageError as error:
            raise SetupError(f"{folder} cannot be written: {_cause(error).strerror or error}", _OTHER) from error
        yield


def check_owned() -> None:
    """Raise ``SetupError`` if another process has taken over one of our places: its writes and ours must not mix."""
    for place, ownership in _OWNED:
        if ownership.is_gone:
            what = f"{place} is no longer this run's: its lease was not renewed in time, and another run took it over"
            raise SetupError(what, "This run ends without saving; the other continues from the last checkpoint.")


def _own_folder(job: Job, stem: str, own: Path | None, deadline: float, leases: ExitStack) -> OwnedRunFolder:
    """A run that continues another needs that folder. A new run tries the next free folder if another run has just
    taken this one."""
    for _ in range(_MAX_TRIES):
        folder = choose_folder(job, stem, own)
        is_new = not folder.exists()
        must_have = continues_run(job, stem)
        with ExitStack() as tried:
            try:
                _own(tried, LocalStorage(folder), deadline if must_have else 0.0)
            except InUseError as error:
                if must_have:
                    raise _refusal(f"the run folder {folder}", error.rival, "run.folder") from None
                time.sleep(_RETRY_S)
                own = None
                continue
            except StorageError as error:
                raise unwritable_error(folder, _cause(error)) from error
            if must_have or folder == own or not holds_run(folder):
                leases.push(tried.pop_all())
                return OwnedRunFolder(folder, is_new)
    raise SetupError(f"no free folder was found for the run beside {choose_folder(job, stem)}", "Set run.folder.")


def _own(leases: ExitStack, storage: Storage, deadline: float = 0.0, what: str = "a run") -> None:
    """Take the lease now, or as soon as it is free. ``deadline``: when to give up, on the monotonic clock."""
    try:
        ownership = leases.enter_context(storage.own(what))
    except InUseError as error:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise
        _print(f"waiting for {storage.url}, which is in use by {error.rival.holder}")
        ownership = leases.enter_context(storage.own(what, wait_s=left_s))
    entry = (storage.url, ownership)
    _OWNED.append(entry)
    leases.callback(lambda: _OWNED.remove(entry))


def _print(text: str) -> None:
    print(f"closeranks: {text}", file=sys.stderr, flush=True)


def _cause(error: StorageError) -> OSError:
    return error.__cause__ if isinstance(error.__cause__, OSError) else OSError(str(error))


def _places(job: Job, folder: Path) -> dict[str, str]:
    """Where this run saves, by config key, without the run folder itself and without duplicates: each is owned once."""
    config = job.checkpoint
    places: dict[str, str] = {}
    if config.folder or config.save:
        places["checkpoint.folder"] = config.folder or str(RunFolder(folder).checkpoints)
    if config.remote:
        places["checkpoint.remote"] = config.remote
    distinct = {_identity(place): (key, place) for key, place in reversed(places.items())}
    distinct.pop(_identity(str(folder)), None)
    return dict(reversed(distinct.values()))


def _identity(place: str) -> str:
    storage = open_storage(place)
    return str(Path(storage.url).resolve()) if storage.is_local else storage.url


def _own_place(job: Job, key: str, place: str, deadline: float, leases: ExitStack) -> None:
    """A place that cannot be reached or written now is a warning only: saves there are tried and reported as usual."""
    try:
        _own(leases, open_storage(place), deadline)
    except InUseError as error:
        raise _refusal(f"{key} {place}", error.rival, key) from None
    except StaleListingError as error:
        if job.checkpoint.resume == "auto":
            fix = "Name the checkpoint to resume from in checkpoint.resume, or save elsewhere."
            raise SetupError(f"checkpoint.resume=auto is not safe here: {error}", fix) from error
        _print(f"{key}: {error}")
    except StorageError as error:
        cause = _cause(error)
        if key == "checkpoint.folder" and cause.errno in _PERMANENT:  # no save could ever succeed there
            what = f"{key} = {place} cannot be written: {os.strerror(cause.errno)}"
            raise SetupError(what, "Name a folder that you can write to.") from error
        _print(f"{key} could not be locked against other runs: {error}")


def _refusal(what: str, rival: Lease, key: str) -> SetupError:
    fixes = ["Wait until it has ended (run.wait_s=600 waits up to 600 s)"]
    if rival.pid:
        fixes.append(f"stop it with `kill {rival.pid}` on its host, which saves first")
    if key == "run.folder":
        fixes.append("or join it from another host with `closeranks agent --join`, where it was started with --listen")
    else:
        fixes.append(f"or set another {key}")
    if rival.is_of_other_host and rival.is_valid(time.time()):
        ends = time.strftime("%H:%M:%S", time.localtime(rival.expires_at))
        fixes[-1] += f". If it was killed, its lease expires at {ends}"
    return SetupError(f"{what} is in use by {rival.holder}", f"{', '.join(fixes)}.")
