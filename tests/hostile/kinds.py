"""Every family of hostile kinds: importing this registers them all."""

from tests.hostile import disks, doubles, floods, forged, job_files, kills, shards, terminals

FAMILIES = (disks, doubles, floods, forged, job_files, kills, shards, terminals)
