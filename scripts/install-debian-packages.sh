#!/bin/sh
# Installs the Debian packages that bifrost-lab, the instruction counts and the tests run or need. Does nothing, quickly, when all of them are there.
# No service is left running: the lab starts its own servers, inside its network namespaces.
# With the word `demo`, `demo-rdma` or `demo-fleet` only what `make` of that name runs: no database, no virtual machines, no DPDK.
set -eu

what=${1:-all}
case "$what" in
all | demo | demo-rdma | demo-fleet) ;;
*)
    echo "install-debian-packages.sh: \`$what\` is none of \`all\`, the default, \`demo\`, \`demo-rdma\` and \`demo-fleet\`" >&2
    exit 2
    ;;
esac

packages="redis-server redis-tools nginx apache2-utils nftables iperf3 ethtool iproute2 mptcpize valgrind user-mode-linux kmod qemu-system-x86 busybox-static isc-dhcp-client tshark openvswitch-switch openvswitch-switch-dpdk systemd sockperf memcached mariadb-server-core mariadb-client-core sysbench nghttp2-client podman catatonit containerd runc containernetworking-plugins libibverbs-dev frr bird2 gobgpd curl keepalived"
# Where the kernel of QEMU's guests is unpacked: installing it would make it this machine's own.
kernel=/var/cache/bifrost-lab/kernel
# What user-mode Linux needs on some processors, and with some vhost-user ports; their sources say why.
shims="uml-xstate uml-dpdk"
shim_directory=/var/cache/bifrost-lab
source_directory=$(dirname "$0")
# Where dpdk-testpmd is unpacked: the package that has it would bring hundreds of others, systemd among them. Its libraries are
# installed.
dpdk=/var/cache/bifrost-lab/dpdk
# Its drivers, and that of Open vSwitch for links of the kernel: packages whose names end with the version of their interface.
drivers="net-virtio net-vhost net-pcap net-af-packet mempool-ring net-memif"
# Where PostgreSQL is unpacked, server and pgbench: installing it would make a cluster and a service. Its libraries are installed,
# but for the compiler of queries, which is large and for long ones.
postgresql=/var/cache/bifrost-lab/postgresql

# Where promtool is unpacked: the package that has it would start a server.
prometheus=/var/cache/bifrost-lab/prometheus

case "$what" in
demo) packages="redis-server redis-tools nftables ethtool iproute2" shims="" ;;
demo-rdma) packages="iperf3 nftables ethtool iproute2" shims="" ;;
demo-fleet) packages="iperf3 iproute2" shims="" ;;
esac

missing=""
for package in $packages; do
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" != installed ]; then
        missing="$missing $package"
    fi
done
# The Rust toolchain needs a linker; a machine that has one, from whatever package, keeps it.
command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
if [ "$what" = all ]; then
    [ -d "$kernel" ] || unpack_kernel=yes
    [ -x "$prometheus/usr/bin/promtool" ] || unpack_prometheus=yes
    if ! [ -d "$dpdk" ] || ldd "$dpdk/usr/bin/dpdk-testpmd" | grep -q "not found"; then
        unpack_dpdk=yes
    fi
    for name in $drivers; do
        dpkg-query -W -f '${db:Status-Status}\n' "librte-$name[0-9]*" 2>/dev/null | grep -qx installed || unpack_dpdk=yes
    done
    if ! [ -d "$postgresql" ] || ldd "$postgresql"/usr/lib/postgresql/*/bin/postgres | grep -q "not found"; then
        unpack_postgresql=yes
    fi
fi
build=""
for shim in $shims; do
    [ "$shim_directory/$shim.so" -nt "$source_directory/$shim.c" ] || build="$build $shim"
done
unpack=${unpack_kernel:-}${unpack_dpdk:-}${unpack_postgresql:-}${unpack_prometheus:-}
if [ -z "$missing$unpack$build" ]; then
    exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
    echo "install-debian-packages.sh: needs root to install:$missing and to write to ${kernel%/*}" >&2
    exit 1
fi
echo "Installing:$missing${unpack_kernel:+ $kernel}${unpack_dpdk:+ $dpdk}${unpack_postgresql:+ $postgresql}${unpack_prometheus:+ $prometheus}$build"

# invoke-rc.d asks policy-rc.d whether a package may start its service: 101 forbids it. One that is there
# already is the administrator's, and stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
[ -z "$missing$unpack" ] || apt-get update -qq
# shellcheck disable=SC2086 # a list of words
[ -z "$missing" ] || apt-get install -y -qq --no-install-recommends $missing
if [ -n "${unpack_kernel:-}" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -n 1)
    mkdir -p "$kernel.new"
    (cd "$kernel.new" && apt-get download -qq "$package" && dpkg-deb -x ./*.deb . && rm ./*.deb)
    mv "$kernel.new" "$kernel"
fi

if [ -n "${unpack_dpdk:-}" ]; then
    packaged=$(for name in $drivers; do apt-cache pkgnames "librte-$name"; done)
    libraries=$(apt-cache show --no-all-versions dpdk-dev | sed -n 's/^Depends: //p' | tr ',' '\n' |
        sed -n 's/^ *\(librte-[^ ]*\|ibverbs-[^ ]*\|lib[^ ]*\) .*/\1/p' | grep -v '^libdpdk-dev$')
    # shellcheck disable=SC2086 # lists of words
    apt-get install -y -qq --no-install-recommends $packaged $libraries
    rm -rf "$dpdk.new"
    mkdir -p "$dpdk.new"
    (cd "$dpdk.new" && apt-get download -qq dpdk-dev && dpkg-deb -x ./*.deb . && rm ./*.deb)
    rm -rf "$dpdk"
    mv "$dpdk.new" "$dpdk"
fi

if [ -n "${unpack_prometheus:-}" ]; then
    rm -rf "$prometheus.new"
    mkdir -p "$prometheus.new"
    (cd "$prometheus.new" && apt-get download -qq prometheus && dpkg-deb -x ./*.deb . && rm ./*.deb)
    rm -rf "$prometheus"
    mv "$prometheus.new" "$prometheus"
fi

if [ -n "${unpack_postgresql:-}" ]; then
    # The one of this release: `postgresql` depends on it.
    package=$(apt-cache depends postgresql | sed -n 's/.*Depends: \(postgresql-[0-9]*\)$/\1/p' | head -n 1)
    libraries=$(apt-cache show --no-all-versions "$package" | sed -n 's/^Depends: //p' | tr ',' '\n' |
        sed -n 's/^ *\(lib[^ ]*\).*/\1/p' | grep -v '^libllvm')
    # shellcheck disable=SC2086 # a list of words
    apt-get install -y -qq --no-install-recommends --no-upgrade $libraries
    rm -rf "$postgresql.new"
    mkdir -p "$postgresql.new"
    (cd "$postgresql.new" && apt-get download -qq "$package" && dpkg-deb -x ./*.deb . && rm ./*.deb)
    rm -rf "$postgresql"
    mv "$postgresql.new" "$postgresql"
fi

for shim in $build; do
    mkdir -p "$shim_directory"
    cc -O1 -Wall -Wextra -Werror -shared -fPIC -o "$shim_directory/$shim.so.new" "$source_directory/$shim.c"
    mv "$shim_directory/$shim.so.new" "$shim_directory/$shim.so"
done

# Installation enables services for the next boot, too; what was there before is not ours to touch.
for package in redis-server nginx memcached containerd frr bird2 gobgpd keepalived; do
    service=${package%2}
    case " $missing " in
    *" $package "*)
        if command -v systemctl >/dev/null 2>&1; then
            systemctl disable "$service" >/dev/null 2>&1 || true
        fi
        if command -v update-rc.d >/dev/null 2>&1; then
            update-rc.d "$service" disable >/dev/null 2>&1 || true
        fi
        ;;
    esac
done
case " $missing " in
*" podman "*)
    if command -v systemctl >/dev/null 2>&1; then
        systemctl disable podman.socket podman-auto-update.timer podman-restart.service >/dev/null 2>&1 || true
    fi
    ;;
esac
