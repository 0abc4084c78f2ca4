# The guest's init after the switch of roots: makes the RDMA devices, then runs
# what the host asks for. Runs in the static busybox, not in the host's shell.
R=/run/rdmavm
C=$R/ctl
export PATH=$R/bin
. $C/config
fail() { echo "rdmavm: $*"; echo "$*" > $C/.ready; mv $C/.ready $C/ready; sleep 5; poweroff -f; }

( sleep $LIFETIME; echo "rdmavm: end of the guest's lifetime"; poweroff -f ) &

for i in $RW; do
  dir=$(cat $C/$i)
  mkdir -p "$dir"
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap $i "$dir" || fail "no share for $dir"
done
hostname rdmavm$RANK
ip link set lo up
addrs= peers=
peer=$((2 - RANK))
i=0
while [ $i -lt $NICS ]; do
  nic=rnic$i
  if [ $MODE = dummy ]; then
    ip link add $nic type dummy || fail "no $nic"
    peer=$((RANK + 1))
  else
    mac=$(printf '52:54:00:77:%02x:%02x' $i $((RANK + 1)))
    for n in /sys/class/net/*; do
      [ "$(cat $n/address)" = $mac ] && ip link set ${n##*/} name $nic
    done
  fi
  echo 0 > /proc/sys/net/ipv6/conf/$nic/accept_dad 2>/dev/null
  ip link set $nic mtu $MTU
  ip link set $nic up || fail "no $nic"
  ip addr add 10.77.$i.$((RANK + 1))/24 dev $nic
  addrs=$addrs${addrs:+,}10.77.$i.$((RANK + 1))
  peers=$peers${peers:+,}10.77.$i.$peer
  if [ $RDMA != none ]; then
    PATH=/usr/sbin:/usr/bin:/sbin:/bin rdma link add $RDMA$i type $RDMA netdev $nic || fail "no $RDMA device on $nic"
  fi
  i=$((i + 1))
done
cat > $R/env <<EOF
export RDMAVM=1 RDMAVM_RANK=$RANK RDMAVM_WORLD=$WORLD RDMAVM_NICS=$NICS
export RDMAVM_ADDRS=$addrs RDMAVM_PEER_ADDRS=$peers
export PATH="\${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}"
EOF
ulimit -l unlimited
ulimit -n 65536

run() { # number
  mkfifo $R/out.$1 $R/err.$1
  cat < $R/out.$1 > $C/out.$1 &
  cat < $R/err.$1 > $C/err.$1 &
  exec 3> $R/out.$1 4> $R/err.$1
  setsid sh -c "echo \$\$ > $R/pid.$1; exec /bin/sh $C/cmd.$1" </dev/null >&3 2>&4
  rc=$?
  printf '\036@@rdmavm-end-%s@@' $1 >&3
  printf '\036@@rdmavm-end-%s@@' $1 >&4
  [ -n "$RW" ] && sync
  echo $rc > $C/.rc.$1
  mv $C/.rc.$1 $C/rc.$1
}

stty -F /dev/ttyS1 raw -echo
exec 5<> /dev/ttyS1
echo ok > $C/.ready
mv $C/.ready $C/ready
while read -r what number signal <&5; do
  case $what in
    RUN) run $number & ;;
    KILL) kill -$signal -$(cat $R/pid.$number) ;;
  esac
done
fail "the control line closed"
