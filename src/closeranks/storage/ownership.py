"""Ownership of a folder on a disk: one process holds it from its start to its end.

Ownership is the kernel's lock (``flock``) on the file ``.owner``, whose text names the holder. Invariants: the lock
ends with the process that holds it, however that ends: no process that it starts or forks inherits the lock. The file
stays behind and by itself never blocks anybody. On a file system shared with other machines, whose locks may not be
visible here, the text is also a lease that the holder renews: a lease of another machine is valid until it has expired
and was not renewed while watched.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from closeranks.storage.disk import make_folder, read_range
from closeranks.storage.errors import disk_error
from closeranks.storage.lease import InUseError, Lease, LeaseTimes, decode, host_id
from closeranks.storage.names import OWNER
from closeranks.storage.protocol import Ownership, StorageError

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_STOP_S = 10.0
_MAX_BYTES = 4096
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS))
_ONE_MACHINE = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay", "vfat"))
"""File systems whose users are all processes of one kernel, so that its locks apply to all of them."""
_HELD: set[int] = set()
"""Descriptors that carry a lock, to be closed in forked children."""


@contextmanager
def hold_folder(
    root: Path, lease: Lease, wait_s: float, times: LeaseTimes, is_shared: bool | None = None
) -> Iterator[Ownership]:
    """``InUseError`` after ``wait_s`` names the holder; ``is_shared``: other machines write there (None: detect)."""
    path = root / OWNER
    try:
        make_folder(root)
        is_shared = _is_shared(root) if is_shared is None else is_shared
        fd = _acquire(path, time.monotonic() + wait_s, times, is_shared)
    except OSError as error:
        raise disk_error(error, "locking", path) from error
    lease_file = _LeaseFile(fd, path, lease, times)
    try:
        lease_file.write()
        if is_shared:
            lease_file.start()
        yield lease_file
    finally:
        if os.getpid() == lease.pid:  # a forked child that exits the context holds nothing
            lease_file.stop()
            lease_file.clear()
            _close(fd)


def _acquire(path: Path, until: float, times: LeaseTimes, is_shared: bool) -> int:
    while True:
        fd = _open(path, is_shared)
        try:
            rival = _rival(fd, path, times, is_shared)
        except BaseException:
            _close(fd)
            raise
        if rival is None and _is_current(fd, path):
            return fd
        _close(fd)
        if rival is not None:
            if time.monotonic() >= until:
                raise InUseError(str(path.parent), rival)
            time.sleep(_POLL_S)


def _open(path: Path, is_shared: bool) -> int:
    """Read-only, so that a disk can be made read-only under a run; NFS locks need a writable descriptor."""
    mode = os.O_RDWR if is_shared else os.O_RDONLY
    fd = os.open(path, mode | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"{path} is not a regular file; remove it")
    if not _HELD:
        _close_in_forks()
    _HELD.add(fd)
    return fd


def _close(fd: int) -> None:
    _HELD.discard(fd)
    os.close(fd)


def _rival(fd: int, path: Path, times: LeaseTimes, is_shared: bool) -> Lease | None:
    """The holder of the folder; None if nobody held it, in which case this process does from now on."""
    has_lock = _try_lock(fd)
    text = _read(fd)
    lease = decode(text)
    if has_lock is False:
        return lease
    is_here = bool(lease.boot) and lease.boot == Lease("", 0.0, host_id()).boot
    if not text or not is_shared or (is_here and (has_lock or lease.is_orphan)):
        return None
    if not lease.is_valid(time.time()):
        time.sleep(times.watch_s)
        if _read(fd) == text:
            _LOG.warning("%s was left behind by %s and is taken over", path.parent, lease.owner)
            return None
    return lease


def _try_lock(fd: int) -> bool | None:
    """None if the file system has no locks, so that only the lease protects the folder."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _is_current(fd: int, path: Path) -> bool:
    """False if the file was removed, and perhaps created again, since it was opened: others would lock another."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read(fd: int) -> bytes:
    return bytes(read_range(fd, 0, min(os.fstat(fd).st_size, _MAX_BYTES)))


def _is_shared(root: Path) -> bool:
    """Whether other machines may write to the file system; True if unknown."""
    device = os.stat(root).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        kinds = {fields[fields.index("-") + 1] for fields in mounts if fields[2] == number}
    except (OSError, ValueError, IndexError):
        return True
    return not kinds or not kinds <= _ONE_MACHINE


def _close_in_forks() -> None:
    global _is_watching
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(after_in_child=_close_inherited)


_is_watching = False


def _close_inherited() -> None:
    """A lock belongs to every process that inherited its descriptor: a forked child must not keep it alive."""
    while _HELD:
        os.close(_HELD.pop())


class _LeaseFile:
    """Writes the lease into the locked file and renews it until it is stopped."""

    def __init__(self, fd: int, path: Path, lease: Lease, times: LeaseTimes) -> None:
        self._fd, self._path, self._lease, self._times = fd, path, lease, times
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._text = b""
        self.is_gone = False

    def write(self) -> None:
        """A full disk prevents the text, not the lock."""
        text = self._lease.renewed_until(time.time() + self._times.lease_s).encode() + b"\n"
        if self._put(text):
            self._text = text

    def clear(self) -> None:
        self._put(b"")

    def _put(self, text: bytes) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                    os.pwrite(fd, text, 0)
                    os.ftruncate(fd, len(text))
            finally:
                os.close(fd)
        except OSError as error:
            _LOG.info("%s cannot be written: %s", self._path, error.strerror or error)
            return False
        return True

    def start(self) -> None:
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _renew(self) -> None:
        while not self._stopped.wait(self._times.renew_s):
            try:
                found = decode(_read(self._fd))
            except OSError as error:
                _LOG.warning("%s cannot be read: %s", self._path, error.strerror or error)
                continue
            if self._text and found.pid and (found.host, found.pid) != (self._lease.host, self._lease.pid):
                self.is_gone = True
                return
            self.write()
