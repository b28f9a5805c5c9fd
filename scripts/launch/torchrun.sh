#!/usr/bin/env bash
# Train on this node, or on this one together with others:
#
#   scripts/launch/torchrun.sh configs/digits_tiny_llava_megatron.yaml data.path=data/digits
#
# The run goes on from the latest checkpoint of its folder, if there is one. From the environment:
#   NPROC        processes per node (default: one for each GPU, or 2 without one). Several numbers, "8 4 2", are tried in
#                turn: where the run fails with one of them, it goes on with the next
#   NNODES       nodes (default 1). On more, start the same on each, with
#   NODE_RANK    0, 1, ... and
#   MASTER_ADDR  the name of node 0. The run folder must be on a file system that all nodes share
#   MASTER_PORT  (default 29500)
set -euo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
config="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -z "${NPROC:-}" ]; then
    NPROC="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
meeting=(--standalone)
if [ "${NNODES:-1}" != 1 ]; then
    : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR, the name of node 0}" "${NODE_RANK:?and NODE_RANK, from 0 on}"
    meeting=(--nnodes="$NNODES" --node-rank="$NODE_RANK")
    meeting+=(--master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
code=0
stopped=0
trap 'stopped=1; kill -TERM "$child"' TERM
for processes in $NPROC; do
    python -m torch.distributed.run "${meeting[@]}" --nproc-per-node="$processes" \
        "$root/scripts/pretrain_vlm.py" --config "$config" --resume "$@" &
    child=$!
    code=0
    wait "$child" || code=$?
    if [ "$stopped" -eq 1 ]; then
        wait "$child" || true # until the run has saved
        exit 143
    fi
    [ "$code" -ne 0 ] || exit 0
    echo "the run failed with $processes processes (exit code $code)" >&2
done
exit "$code"
