"""What a forked child, and a program that is started, get of a process's memory and sockets."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, mmap, os, socket, subprocess, sys
from closeranks.core.system.fork_safety import close_in_children, track_sockets, exclude_from_fork

slot = os.memfd_create("closeranks-slot")
os.truncate(slot, 4096)
memory = exclude_from_fork(mmap.mmap(slot, 4096))
users_memory = os.memfd_create("users-own")
users_ends = socket.socketpair()
with track_sockets():
    ours = socket.socketpair()
for end in ours:
    assert not end.get_inheritable()
close_in_children()
close_in_children()

def held():
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            links[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return links

before = held()
reader, writer = os.pipe()
if os.fork() == 0:
    after = held()
    lost = [fd for fd in before if after.get(fd) != before[fd]]
    is_mapped = "closeranks-slot" in open("/proc/self/maps").read()
    users_ends[0].send(b"still here")
    os.write(writer, json.dumps([lost, [after[fd] for fd in lost], is_mapped]).encode())
    os._exit(0)
os.wait()
lost, became, is_mapped = json.loads(os.read(reader, 65536))
memory_fds = [fd for fd, target in before.items() if "closeranks-slot" in target]
print(json.dumps({
    "as_expected": sorted(lost) == sorted([*memory_fds, ours[0].fileno(), ours[1].fileno()]),
    "became": sorted(set(became)), "is_mapped": is_mapped,
    "users": users_ends[1].recv(100).decode(), "parent": ours[0].send(b"x") == 1 and memory[:1] == b"\\0",
}))
"""


def test_a_forked_child_keeps_what_is_the_users_and_nothing_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "as_expected": True,
        "became": ["/dev/null"],
        "is_mapped": False,
        "users": "still here",
        "parent": True,
    }
