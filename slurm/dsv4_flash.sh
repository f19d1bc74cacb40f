#!/usr/bin/env bash
# DeepSeek-V4-Flash pretraining on GB200, 16 nodes of 4 GPUs, with optimizer-state offload. No NeMo-Run.
#
#   CONTAINER_IMAGE=... sbatch --account=ME --partition=GB200 slurm/dsv4_flash.sh [SECTION.FIELD=VALUE ...]
#   DRY_RUN=1 slurm/dsv4_flash.sh      prints what a job would run; needs no Slurm
#
# The arguments are overrides of Bridge's config, for training and for `bridge-fgo doctor`, which examines the job on
# every node first. The container holds Megatron-Bridge 0.6 with Megatron-LM's dev branch, which this model needs, and
# bridge-fgo. Options of sbatch on the command line win over the lines below; a Slurm older than 23.11 does not know
# --segment: delete that line there.

#SBATCH --job-name=dsv4_flash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --segment=16
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600

set -euo pipefail

# --- what to set, in the environment of sbatch ---

RECIPE="${RECIPE:-dsv4_flash_64gpu}"                      # or dsv4_flash_64gpu_bf16
OFFLOAD="${OFFLOAD:-1}"                                   # 0: upstream's recipe as it is
OFFLOAD_OPTIONS="${OFFLOAD_OPTIONS:-}"                    # as of `bridge-fgo run`: "--fraction 0.5"
CONTAINER_IMAGE="${CONTAINER_IMAGE:-}"                    # empty: runs on the nodes themselves
CONTAINER_MOUNTS="${CONTAINER_MOUNTS:-$PWD:$PWD}"         # HOST:CONTAINER,...
ENV_NAMES="${ENV_NAMES:-}"                                # names that enter the container: HF_TOKEN,WANDB_API_KEY
# CHECKPOINTS                                             # saved to and resumed from; $PWD/checkpoints/$RECIPE, but
                                                          # of tiny none; empty: as the recipe
MAX_RESTARTS="${MAX_RESTARTS:-3}"                         # a failed job is queued again as long as it began fewer times,
                                                          # unless its command is not there (126, 127)
NUMA="${NUMA:-1}"                                         # 0: processes and their pinned memory on any CPU
# PREFLIGHT                                               # a command in place of bridge-fgo doctor; empty: none
PYTHON="${PYTHON:-python}"
DRY_RUN="${DRY_RUN:-0}"

refuse() {
    echo "${0##*/}: $1" >&2
    exit 2
}

checkpoints="$PWD/checkpoints/$RECIPE" gpus=(--gpus "${SLURM_NTASKS:-64}")
case $RECIPE in
dsv4_flash_64gpu | dsv4_flash_64gpu_bf16) ;;
tiny) checkpoints="" gpus=() ;; # to try this script: it needs no environment, and on the CPU takes no overrides
*) refuse "RECIPE=$RECIPE: use dsv4_flash_64gpu or dsv4_flash_64gpu_bf16; nemorun fgo pretrain launches the others" ;;
esac
[[ $OFFLOAD == [01] ]] || refuse "OFFLOAD=$OFFLOAD: use 1 or 0"
[[ $DRY_RUN == [01] ]] || refuse "DRY_RUN=$DRY_RUN: use 1 or 0"
[[ $NUMA == [01] ]] || refuse "NUMA=$NUMA: use 1 or 0"
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || refuse "MAX_RESTARTS=$MAX_RESTARTS: use a number"
CHECKPOINTS="${CHECKPOINTS-$checkpoints}"
[[ $CHECKPOINTS != *\'* ]] || refuse "CHECKPOINTS=$CHECKPOINTS: use a path without '"
is_mounted=0
for mount in ${CONTAINER_MOUNTS//,/ }; do
    inside=${mount#*:}
    inside=${inside%%:*} # without flags
    if [[ $CHECKPOINTS/ == "${inside%/}"/* ]]; then is_mounted=1; fi
done
[[ -z $CHECKPOINTS || -z $CONTAINER_IMAGE || $is_mounted == 1 ]] \
    || refuse "CHECKPOINTS=$CHECKPOINTS with CONTAINER_MOUNTS=$CONTAINER_MOUNTS: mount it, or it ends with the container"
[[ $OFFLOAD == 1 || -z $OFFLOAD_OPTIONS ]] \
    || refuse "OFFLOAD_OPTIONS=$OFFLOAD_OPTIONS with OFFLOAD=0: leave it empty, or set OFFLOAD=1"

# The environment of upstream's 64-GPU recipes.
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export TORCH_NCCL_AVOID_RECORD_STREAMS="${TORCH_NCCL_AVOID_RECORD_STREAMS:-1}"
export TORCH_NCCL_HIGH_PRIORITY="${TORCH_NCCL_HIGH_PRIORITY:-1}"
RECIPE_ENV=NCCL_GRAPH_REGISTER,NCCL_NVLS_ENABLE,PYTORCH_CUDA_ALLOC_CONF
RECIPE_ENV+=,TORCH_NCCL_AVOID_RECORD_STREAMS,TORCH_NCCL_HIGH_PRIORITY

# --- what runs ---

run() { # Runs a command, or prints it in a dry run, as bash would read it.
    if [[ $DRY_RUN != 1 ]]; then
        "$@"
        return
    fi
    local word words=()
    for word in "$@"; do
        if [[ $word =~ ^[[:alnum:]_./:,=@+-]+$ ]]; then words+=("$word"); else words+=("${word@Q}"); fi
    done
    echo "${words[*]}"
}

if [[ $DRY_RUN != 1 && -z ${SLURM_JOB_ID:-} ]]; then
    refuse "not in a Slurm job; submit it with sbatch, or set DRY_RUN=1"
fi

if [[ $DRY_RUN == 1 ]]; then
    for name in ${RECIPE_ENV//,/ }; do run export "$name=${!name}"; done
fi

container=()
if [[ -n $CONTAINER_IMAGE ]]; then
    # Without --container-env, what the image sets under these names would win.
    container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS" --no-container-mount-home
        --container-env="$RECIPE_ENV${ENV_NAMES:+,$ENV_NAMES}")
fi

train=("$PYTHON" -m bridge_fgo.recipes.train "$RECIPE")
if [[ $OFFLOAD == 1 ]]; then train+=(--offload); else train+=(--no-offload); fi
read -ra options <<<"$OFFLOAD_OPTIONS"
overrides=()
if [[ -n $CHECKPOINTS ]]; then
    # Bridge resumes from `load` where there is a checkpoint, and at SIGTERM saves one and ends. Upstream's recipe
    # advises checkpoint.save_optim=false with HybridEP; a run that resumes from such a checkpoint has new moments.
    path=$CHECKPOINTS
    if ! [[ $path =~ ^/[[:alnum:]_./-]+$ ]]; then path="'$path'"; fi # to Hydra, which overrides go through
    overrides+=("checkpoint.save=$path" "checkpoint.load=$path"
        train.exit_signal_handler=true train.exit_signal_handler_for_dataloader=true)
fi
overrides+=("$@")
train+=("${options[@]}" "${overrides[@]}")
if [[ $NUMA == 1 ]]; then
    # shellcheck disable=SC2016 # expanded by each process: two GPUs hang on either CPU of a node, in order
    train=(bash -c 'node=$((SLURM_LOCALID / 2)); exec numactl --cpunodebind=$node --membind=$node "$@"' numa "${train[@]}")
fi

preflight=()
if [[ -n ${PREFLIGHT+set} ]]; then
    read -ra preflight <<<"$PREFLIGHT"
elif [[ $OFFLOAD == 1 ]]; then # it examines what is offloaded
    preflight=("$PYTHON" -m bridge_fgo doctor "$RECIPE" "${gpus[@]}" "${options[@]}" "${overrides[@]}")
fi
if [[ $NUMA == 1 && ${PREFLIGHT-unset} ]]; then # a node's last process binds to the last CPU
    # shellcheck disable=SC2016 # expanded on the node; doctor itself is not bound, so that it sees the node's memory
    check='numactl --cpunodebind=$0 --membind=$0 true && "$@"'
    preflight=(bash -c "$check" "$(((${SLURM_NTASKS_PER_NODE:-4} - 1) / 2))" "${preflight[@]}")
fi
if ((${#preflight[@]})); then
    if ! run srun --ntasks="${SLURM_JOB_NUM_NODES:-16}" --ntasks-per-node=1 "${container[@]}" "${preflight[@]}"; then
        why="see above; training was not started (NUMA=0: without numactl)"
        echo "${0##*/}: the preflight refuses this job on a node, $why" >&2
        exit 1
    fi
fi

starts=1
if [[ " $OFFLOAD_OPTIONS " == *" --survive-crash "* ]]; then
    # A process a node keeps finished steps, and ends with this job, as all of its steps do.
    starts=4
    run export BRIDGE_FGO_KEEPER="${SLURM_JOB_ID:-0}"
    run srun --overlap --ntasks="${SLURM_JOB_NUM_NODES:-16}" --ntasks-per-node=1 "${container[@]}" \
        "$PYTHON" -m bridge_fgo keep &
fi

if [[ $DRY_RUN == 1 ]]; then
    wait
    run srun --kill-on-bad-exit=1 "${container[@]}" "${train[@]}"
    exit 0
fi

time_is_up=0
# Not by a signal to srun, which would kill the processes before they have saved. SIGURG: see end_on_sigurg in
# recipes/train.py.
trap 'time_is_up=1; scancel --signal=URG "$SLURM_JOB_ID"' USR1
while ((starts--)); do
    # In the background, so that the shell can take the signal that Slurm sends before the time is up.
    srun --kill-on-bad-exit=1 "${container[@]}" "${train[@]}" &
    step=$!
    status=0
    wait "$step" || status=$?
    while kill -0 "$step" 2>/dev/null; do # `wait` also returns when the trap has run
        status=0
        wait "$step" || status=$?
    done
    if ((status == 0 || status == 126 || status == 127 || time_is_up)); then break; fi
done

again=0
if ((time_is_up)); then
    # Without a checkpoint every run would begin anew, and none would end.
    if [[ -n $CHECKPOINTS ]]; then again=1; fi
elif ((status != 0 && status != 126 && status != 127 && ${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then # no command
    again=1
fi
echo "${0##*/}: status $status, time is up: $time_is_up, queued again: $again"
if ((again)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
