#!/usr/bin/env bash
# The benchmark beside the peers. MOONCAKE_VENV names the peer's virtual environment; without it
# only our own columns and the physical limits are measured.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python="$here/../../.venv/bin/python"
venv=${MOONCAKE_VENV:-$here/mooncake-venv}
peers="cenote=$here/adapter.py:CenoteTcp,cenote-shm=$here/adapter.py:CenoteShm"
if [ -x "$venv/bin/python" ]; then
  peers="mooncake,mooncake-daemon,$peers"
else
  echo "no peer at $venv (see README.md): measuring ours alone" >&2
fi
for argument in "$@"; do
  if [ "$argument" = --failures ]; then # what users see when something dies, not how fast it is
    exec env MOONCAKE_VENV="$venv" "$python" "$here/failures.py" "$@"
  fi
done
exec env MOONCAKE_VENV="$venv" "$python" "$here/harness.py" --peers "$peers" "$@"
