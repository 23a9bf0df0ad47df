#!/bin/sh
# Install the real servers that tests talk to. Root on Debian only; anywhere else the tests that need them skip.
set -u
command -v slurmctld >/dev/null 2>&1 && command -v munged >/dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "servers: not root on Debian; tests that need Slurm will skip"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm slurm-client munge >/dev/null
