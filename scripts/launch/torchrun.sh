#!/usr/bin/env bash
# Train on this node, or on this one together with others, and start again after a failure:
#
#   scripts/launch/torchrun.sh configs/digits_tiny_llava_megatron.yaml data.path=data/digits
#
# Start the same on every node. From the environment:
#   NPROC        processes per node (default: the GPUs, or 2 without one)
#   NNODES       nodes, or MIN:MAX of them (default 1): after a failure the run goes on with those that are left, from
#                its latest checkpoint, as long as global_batch_size can be shared by them
#   RDZV         host:port of one of the nodes, where they meet; needed for more than one
#   RUN_ID       what the nodes of one run have in common (default: the configuration's name)
#   MAX_RESTARTS failures until it gives up (default 3)
# The run folder must be on a file system that all nodes share.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
config="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
nnodes="${NNODES:-1}"
if [ -z "${NPROC:-}" ]; then
    NPROC="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
rendezvous=(--standalone)
if [ "$nnodes" != 1 ]; then
    : "${RDZV:?NNODES=$nnodes needs RDZV=host:port, where the nodes meet}"
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="${RUN_ID:-$(basename "$config")}")
fi
exec python -m torch.distributed.run "${rendezvous[@]}" --nnodes="$nnodes" --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-3}" "$root/scripts/pretrain_vlm.py" --config "$config" --resume "$@"
