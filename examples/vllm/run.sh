#!/usr/bin/env bash
# Two vLLM engines share a pool: the second one is started when the first has ended, and has its cache.
#
#     examples/vllm/run.sh MODEL            # in an environment with vLLM and cenote
#
# MODEL: a directory or a name that vLLM takes, for example Qwen/Qwen3-0.6B. CENOTE_PORT: of the pool, which is
# made for this and ended with it.
set -euo pipefail
model=${1:?usage: run.sh MODEL}
port=${CENOTE_PORT:-5110}
here=$(cd "$(dirname "$0")" && pwd)
export CENOTE_VLLM_MASTER=127.0.0.1:$port
cenote up --nodes 1 --dram 1GiB --port "$port" --detach
trap 'cenote down --port "$port"' EXIT
for instance in first second; do
    echo "== the $instance engine"
    python "$here/ask.py" "$model"
done
