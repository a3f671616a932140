#!/usr/bin/env bash
# A training on several nodes without a job scheduler. On every node, in the same checkout:
#
#   HEAD=node0 examples/cluster/torchrun.sh [arguments of `lnn-lightning fit`]
#
# HEAD     name of one of the nodes, which all of them can look up
# PORT     a free port there (29500)
# ADDRESS  address of this node, where names cannot be looked up; HEAD is then an address, too
# NODES    number of nodes (2)
# DEVICES  processes on each of them, one a device (4)
# RESTARTS how often all processes start again after one has failed (3); they go on from the last checkpoint
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${HEAD:?is the name of one of the nodes, which all of them can look up}"
nodes=${NODES:-2}
devices=${DEVICES:-4}
named=()
if [[ -n ${ADDRESS:-} ]]; then
    is_head=0
    if [[ $ADDRESS == "$HEAD" ]]; then is_head=1; fi
    named=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$is_head")
fi

exec torchrun \
    --nnodes "$nodes" --nproc-per-node "$devices" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id gpt_cluster "${named[@]}" \
    -m lnn_lightning.cli fit --config configs/gpt_cluster.yaml \
    --trainer.num_nodes "$nodes" --trainer.devices "$devices" "$@"
