#!/usr/bin/env bash
# Two vLLM engines share a pool: the second one is started when the first has ended, and has its cache.
#
#     examples/vllm/run.sh MODEL            # in an environment with vLLM and cenote
#
# MODEL: a directory or a name that vLLM takes, for example Qwen/Qwen3-0.6B.
set -euo pipefail
model=${1:?usage: run.sh MODEL}
here=$(cd "$(dirname "$0")" && pwd)
cenote up --nodes 1 --dram 1GiB --detach
trap 'cenote down' EXIT
for instance in first second; do
    echo "== the $instance engine"
    python "$here/ask.py" "$model"
done
