#!/usr/bin/env bash
# Starts Ray on the nodes of a Slurm allocation, submits a run as a Ray job, and ends with its status.
#
#   cd CHECKOUT && sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh examples/run_grpo.py --config RECIPE.yaml \
#       cluster.num_nodes=2 cluster.gpus_per_node=8 logger.log_dir=/shared/logs checkpointing.checkpoint_dir=/shared/run
#
# The checkout, its .venv (make setup EXTRAS="te vllm cluster") and the home folder are on storage that all nodes share.
#SBATCH --job-name=nemo-offload-rl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300 # five minutes for the step, its checkpoint and the end
set -euo pipefail

export PATH="$PWD/.venv/bin:$PATH"
export UV_PROJECT_ENVIRONMENT="$PWD/.venv" UV_NO_SYNC=1 # the job's copy of the checkout uses this environment
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_JOB_STOP_WAIT_TIME_S=280 # what `ray job stop` leaves a run that saves; see checkpointing.grace_period_s
PORT=${RAY_PORT:-6379}

ray get-auth-token --generate >/dev/null # in the home folder, for all nodes and for the submission

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # where this script runs, too
head_address=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }')

# `srun --overlap`: each step may use what the allocation has. A node that ends does not end the others.
start() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --kill-on-bad-exit=0 ray start --block "${@:2}" & }

# Nodes of one NVLink domain (GB200 NVL72) have the same cluster and clique; cluster.segment_size asks for it.
label_of() {
    local clique
    clique=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" nvidia-smi -q |
        awk -F': *' '/ClusterUUID/ { uuid = $2 } /CliqueId/ { print uuid "." $2; exit }')
    case $clique in
    "" | N/A* | 00000000-*) ;;
    *) echo "--labels=nvidia.com/gpu.clique=$clique" ;;
    esac
}

# The dashboard, which takes jobs, listens on 127.0.0.1 alone; the other ports are open to the nodes, with the token.
# shellcheck disable=SC2046 # a label or nothing
start "$head" --head --node-ip-address="$head_address" --port="$PORT" --dashboard-host=127.0.0.1 $(label_of "$head")
until ray status --address="$head_address:$PORT" >/dev/null 2>&1; do sleep 2; done
for node in "${nodes[@]:1}"; do
    # shellcheck disable=SC2046
    start "$node" --address="$head_address:$PORT" $(label_of "$node")
done
until (($(RAY_ADDRESS="$head_address:$PORT" python -c \
    'import ray; ray.init(log_to_driver=False); print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null || echo 0) \
    >= ${#nodes[@]})); do sleep 2; done

export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265
job="run-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
trap 'ray job stop "$job" || true' TERM # the step is finished and saved
ray job submit --submission-id "$job" --working-dir . -- uv run --frozen "$@" &
submission=$!
status=0
wait "$submission" || status=$?
while kill -0 "$submission" 2>/dev/null; do # a signal ends `wait`, not the job
    status=0
    wait "$submission" || status=$?
done
exit "$status" # ends the steps, and Ray with them
