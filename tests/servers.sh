#!/bin/sh
# Install the real servers and tools that tests need. Root on Debian only; anywhere else the tests that need them skip.
set -u
wanted=""
command -v slurmctld >/dev/null 2>&1 && command -v munged >/dev/null 2>&1 || wanted="slurm-wlm slurm-client munge"
command -v ip >/dev/null 2>&1 || wanted="$wanted iproute2"
command -v faketime >/dev/null 2>&1 || wanted="$wanted faketime"
command -v prometheus >/dev/null 2>&1 || wanted="$wanted prometheus"
[ -z "$wanted" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "servers: not root on Debian; tests that need $wanted will skip"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  (several words)
apt-get install -y -qq --no-install-recommends $wanted >/dev/null
