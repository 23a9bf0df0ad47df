#!/bin/sh
# The same job under torchrun, on two workers of this machine:
#
#   examples/launchers/torchrun.sh examples/tiny.toml train.steps=20
#
# WORKERS=4 starts four. --standalone takes a free port, so that two jobs on one machine never meet. On two machines,
# run this on both instead, with the first one's name:
#
#   torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 -m closeranks train JOB.toml
set -eu
exec torchrun --standalone --nproc-per-node "${WORKERS:-2}" -m closeranks train "${@:-examples/tiny.toml}"
