#!/bin/sh
# Tests the operator's guide, the pages of docs/OPERATIONS.md in their order, on two clean Debian 12 machines and a
# router (user-mode Linux, systemd). It runs the guide's own blocks. A comment before each block says how (HOST: host-a,
# host-b, router, or `here` for this machine):
#   <!-- tried on HOST[, HOST][: EXPECTED] -->          run by sh -e; the output must match (extended, over all lines)
#   <!-- tried on HOST, within N s: EXPECTED -->        the same; repeated until the output matches
#   <!-- tried on HOST as FILE -->                      written to that file
#   <!-- tried on HOST, added to FILE -->               added at its end
#   <!-- tried on HOST, put behind: LINE -->            put behind the first such line of the configuration
#   <!-- not tried: REASON -->
# Between the blocks it tests statements in the guide's text: the functions after_N, by the heading of the section.
# try-guide.sh PACKAGES (make try-guide). Needs root, debootstrap, openssh-client and what
# install-debian-packages.sh installs; no virtualization hardware; minutes.
#   OUT=DIRECTORY   results (out): its subdirectory try-guide/ has each step's output and the machines' consoles
#   PAGES=NAMES     only these pages, such as `gateway`, from clean machines; default: all. The pages about one host
#                   (install to maintenance) build on each other
#   KEEP=SECONDS    keep the machines running this long after a failure, for inspection
set -eu
cd "$(dirname "$0")/.."
here=$PWD
out=$(realpath -m "${OUT:-out}")/try-guide
# The clean machine: a Debian root file system, created once.
cache=/var/cache/bifrost-lab/guide
packages=systemd,systemd-sysv,dbus,udev,kmod,iproute2,iputils-ping,nftables,openssh-server,curl,iperf3,initramfs-tools,linux-image-cloud-amd64
later="tshark openssl podman crun frr"
# Timeout of the whole trial, s.
limit=3600
config=/etc/bifrost/bifrostd.toml

say() {
    echo "== $(($(date +%s) - began)) s: $*"
}

fail() {
    echo "== $(($(date +%s) - began)) s: FAILED: $*" >&2
    echo "   steps and consoles are in $out" >&2
    if [ -n "${KEEP:-}" ] && [ -n "${parent:-}" ]; then
        echo "   for $KEEP s: nsenter -a -t \$(pgrep -P $parent) ssh -F $out/ssh host-a" >&2
        sleep "$KEEP"
    fi
    exit 1
}

# ---- The clean machine -------------------------------------------------------------------------------------------------

make_image() {
    stamp="$packages $later 4"
    if [ "$(cat "$cache/stamp" 2>/dev/null || true)" = "$stamp" ]; then
        return
    fi
    say "a clean Debian 12, for this and later trials (minutes)"
    rm -rf "$cache"
    mkdir -p "$cache"
    root=$cache/root
    # Mounts that debootstrap leaves behind disappear with the namespace.
    root=$root packages=$packages later=$later unshare --mount --fork --kill-child sh -eu -c '
        debootstrap --variant=minbase --include="$packages" bookworm "$root" >"$root.log" 2>&1
        mount -t proc proc "$root/proc"
        # Packages start no service: it would run on this machine.
        printf "#!/bin/sh\nexit 101\n" >"$root/usr/sbin/policy-rc.d"
        chmod 755 "$root/usr/sbin/policy-rc.d"
        chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $later >>"$root.log" 2>&1
        rm "$root/usr/sbin/policy-rc.d"
    ' || fail "debootstrap: $(tail -n 5 "$root.log")"
    ssh-keygen -q -t ed25519 -N "" -f "$cache/key"
    mkdir -p -m 700 "$root/root/.ssh"
    cp "$cache/key.pub" "$root/root/.ssh/authorized_keys"
    # eth1 is the underlay, eth0 the management network; the virtual machine has only its port.
    network() {
        printf '[Match]\nMACAddress=%s\n[Link]\nName=%s\nMTUBytes=1500\n' "$2" "$3" >"$root/etc/systemd/network/10-$1.link"
        printf '[Match]\nMACAddress=%s\n[Network]\nAddress=%s\n' "$2" "$4" >"$root/etc/systemd/network/10-$1.network"
    }
    for host in 1 2 3; do
        network management$host 52:54:00:00:01:0$host eth0 10.255.$host.2/24
        network underlay$host 52:54:00:00:00:0$host eth1 192.0.2.$host/24
    done
    # The gateway's own device on host-b: no addresses.
    printf '[Match]\nMACAddress=52:54:00:00:02:02\n[Link]\nName=eth2\nMTUBytes=1500\n' >"$root/etc/systemd/network/10-gateway.link"
    network vm1 02:00:00:00:00:01 eth0 10.0.0.1/24
    # Modules of user-mode Linux; QEMU's machine has those of its package.
    cp -R /usr/lib/uml/modules/* "$root/lib/modules"
    echo "/dev/root / ext4 defaults 0 0" >"$root/etc/fstab"
    chroot "$root" systemctl -q enable systemd-networkd systemd-networkd-wait-online
    chroot "$root" systemctl -q disable frr
    chroot "$root" apt-get clean
    cp "$root"/boot/vmlinuz-* "$cache/vmlinuz"
    cp "$root"/boot/initrd.img-* "$cache/initrd"
    mke2fs -q -t ext4 -d "$root" "$cache/image" 3G
    rm -rf "$root"
    echo "$stamp" >"$cache/stamp"
}

# ---- The machines ------------------------------------------------------------------------------------------------------

# boot NUMBER NAME: management on eth0, the underlay, a bridge, on eth1; eth2, for the gateway, is there, too. File
# writes go to a separate overlay file.
boot() {
    booted=$(date +%s)
    ip tuntap add m$1 mode tap
    ip link set m$1 up
    ip address add 10.255.$1.1/24 dev m$1
    for device in u$1 g$1; do
        ip tuntap add $device mode tap
        ip link set $device mtu 9000 master underlay up
    done
    LD_PRELOAD=/var/cache/bifrost-lab/uml-xstate.so TMPDIR=$out linux.uml mem=1G con=null con0=fd:0,fd:1 \
        umid="$2" uml_dir="$out/uml" ubd0="$out/$2.cow,$cache/image" root=/dev/ubda rw net.ifnames=0 systemd.hostname="$2" \
        vec0:transport=tap,ifname=m$1,depth=64,mac=52:54:00:00:01:0$1 \
        vec1:transport=tap,ifname=u$1,depth=64,mtu=9000,mac=52:54:00:00:00:0$1 \
        vec2:transport=tap,ifname=g$1,depth=64,mtu=9000,mac=52:54:00:00:02:0$1 \
        </dev/null >"$out/$2.console" 2>&1 &
    printf 'Host %s\n HostName 10.255.%s.2\n' "$2" "$1" >>"$out/ssh"
}

# Network devices of user-mode Linux have an MTU of 1500: an underlay that cannot exceed 1500, which the guide's
# section on the MTU covers. So the NIC's MTU stays, the configuration states it, and guests' packets are shorter.
fit() {
    sed -e "s|^ip link set dev eth1 mtu 1600.*|sed -i -e 's/^.underlay.\$/\&\\\\nmtu = 1500/' -e 's/^netns = .*/\&\\\\nmtu = 1434/' $config|" \
        -e 's/-s 1472/-s 1406/; s/-s 1572/-s 1472/' -e 's/^mtu = 1500$/mtu = 1434/' -e 's/^netns = "\(web2\|db1\)"$/&\nmtu = 1434/' -e 's/^bifrostctl fleet add port.* netns=[a-z]*/& mtu=1434/' \
        -e 's/^\(name = "eth2"\|\[gateway\]\)$/&\nmtu = 1500/; /^mtu = 1600$/d; s/^\(ip link set dev eth2\) mtu 1600/\1/'
}

# on HOST: runs standard input there. No connection waits forever.
on() {
    fit | timeout 180 ssh -F "$out/ssh" "$1" 'cat >/tmp/step; sh -e /tmp/step </dev/null'
}

start_machines() {
    ip link set lo up
    cat >"$out/ssh" <<END
Host *
 User root
 IdentityFile $cache/key
 IdentitiesOnly yes
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
 LogLevel ERROR
 ConnectTimeout 5
 ServerAliveInterval 10
 ControlMaster auto
 ControlPath $out/%n.master
 ControlPersist yes
END
    ip link add underlay mtu 9000 up type bridge
    boot 1 host-a
    boot 2 host-b
    await 1 host-a
    await 2 host-b
}

# await NUMBER NAME: until the machine is up, and has the packages.
await() {
    # The machine may be busy.
    until echo 'systemctl is-system-running --wait || true' | on "$2" >"$out/$2.state" 2>&1; do
        [ $(($(date +%s) - booted)) -lt 600 ] || fail "$2 does not start: $out/$2.console"
        sleep 2
    done
    # User-mode Linux cannot receive unsegmented frames, and has only now opened the devices.
    for device in m$1 u$1 g$1; do
        ethtool -K $device tso off gso off gro off >/dev/null 2>&1 || true
    done
    scp -q -F "$out/ssh" "$out"/packages/*.deb "$2:" || fail "$2: no packages"
    say "$2 is up: $(cat "$out/$2.state")"
}

# ---- The guide ---------------------------------------------------------------------------------------------------------

# Splits the guide into steps/NNN.body and NNN.mark; a block without a mark is an error.
cut_guide() {
    mkdir "$out/steps"
    pages=""
    for page in ${PAGES:-$(sed -n 's/.*(operations\/\([a-z]*\)\.md).*/\1/p' docs/OPERATIONS.md)}; do
        pages="$pages docs/operations/$page.md"
    done
    awk -v to="$out/steps" '
        function file(kind) { return sprintf("%s/%03d.%s", to, number, kind) }
        /^<!-- (not )?tried/ { mark = $0; next }
        /^```/ && inside { inside = 0; if (!skip) close(file("body")); mark = ""; next }
        /^```/ {
            inside = 1
            skip = mark ~ /^<!-- not tried: ./
            if (mark == "") { print FILENAME ", line " FNR ": a block that is neither tried nor said not to be" > "/dev/stderr"; bad = 1; skip = 1 }
            if (!skip) {
                number++
                sub(/^<!-- tried on /, "", mark); sub(/ -->$/, "", mark)
                print mark > file("mark"); close(file("mark"))
                print section > file("section"); close(file("section"))
                printf "" > file("body")
            }
            next
        }
        inside { if (!skip) print > file("body"); next }
        /^##/ { section = $0; sub(/^#+ /, "", section) }
        /./ { mark = "" }
        END { exit bad }
    ' $pages || fail "blocks of the guide without a mark"
}

# until_matches HOST EXPECTED FILE-OF-OUTPUT SECONDS SCRIPT
until_matches() {
    since=$(date +%s)
    until on "$1" <"$5" >"$3" 2>&1 && tr '\n' ' ' <"$3" | grep -qE "$2"; do
        [ $(($(date +%s) - since)) -lt "$4" ] || fail "on $1: \"$2\" is not within $4 s in: $(cat "$3")"
        sleep 1
    done
}

# run HOST EXPECTED FILE-OF-OUTPUT <script
run() {
    if ! on "$1" >"$3" 2>&1; then
        fail "on $1: $(cat "$3")"
    fi
    if [ -n "$2" ] && ! tr '\n' ' ' <"$3" | grep -qE "$2"; then
        fail "on $1: \"$2\" is not in: $(cat "$3")"
    fi
}

# A machine within such a machine would be too slow: the packaged daemon and the guide's QEMU run next to the others,
# in the trial's namespaces, and the sockets are not in /run/bifrost. User-mode Linux has no nftables family inet, so
# rules are loaded here.
try_here() {
    vm=$out/vm
    case $action:$(cat "$body") in
    write:*) cp "$body" "$out/$(basename "$argument")" && return ;;
    run:nft*) sh -e "$body" && return ;;
    esac
    if [ ! -d "$vm" ]; then
        mkdir "$vm"
        dpkg-deb -x "$package" "$vm/package"
        cat >"$vm/bifrostd.toml" <<END
[host]
name = "here"
[control]
socket = "$vm/bifrostd.sock"
[underlay]
addresses = ["127.0.0.1"]
[[vpc]]
vni = 100
[[port]]
name = "here"
vni = 100
mac = "02:00:00:00:00:09"
addresses = ["10.0.0.9/24"]
END
    fi
    sed "s#/run/bifrost#$vm#" "$body" >"$vm/block"
    case $action in
    add)
        cat "$vm/block" >>"$vm/bifrostd.toml"
        "$vm/package/usr/bin/bifrostd" --config "$vm/bifrostd.toml" >"$vm/log" 2>&1 &
        ;;
    run)
        # QEMU 7.2 without KVM needs vectors=0, as the guide says.
        sed -i -e 's/ \.\.\.$/ "$@"/' -e 's/virtio-net-pci/&,vectors=0,romfile=/' "$vm/block"
        sh "$vm/block" -accel tcg -nodefaults -no-reboot -display none -kernel "$cache/vmlinuz" -initrd "$cache/initrd" \
            -append "root=/dev/vda rw console=ttyS0 net.ifnames=0 systemd.hostname=vm1" \
            -drive "file=$cache/image,format=raw,if=virtio,snapshot=on,file.locking=off" -serial "file:$out/vm1.console" \
            >"$out/vm1.qemu" 2>&1 </dev/null &
        printf 'Host vm1\n HostName 10.0.0.1\n' >>"$out/ssh"
        ;;
    esac
}

# Tests a statement of the guide: check HOST EXPECTED <script
checks=0
total=0
check() {
    checks=$((checks + 1))
    run "$1" "$2" "$out/steps/$number.check$checks"
}

try_block() {
    body=$out/steps/$number.body
    mark=$(cat "$out/steps/$number.mark")
    case $mark in
    *" as "*) hosts=${mark%% as *} action=write argument=${mark#* as } ;;
    *", added to "*) hosts=${mark%%, added to *} action=add argument=${mark#*, added to } ;;
    *", put behind: "*) hosts=${mark%%, put behind: *} action=behind argument=${mark#*, put behind: } ;;
    *", within "*) hosts=${mark%%, within *} action=within argument=${mark#*, within } ;;
    *": "*) hosts=${mark%%: *} action=run argument=${mark#*: } ;;
    *) hosts=$mark action=run argument="" ;;
    esac
    for host in $(echo "$hosts" | tr -d ,); do
        log=$out/steps/$number.$host
        if [ "$host" = here ]; then
            try_here
            continue
        fi
        case $action in
        run) run "$host" "$argument" "$log" <"$body" ;;
        within) until_matches "$host" "${argument#* s: }" "$log" "${argument%% s: *}" "$body" ;;
        write) (echo "cat >'$argument' <<'END-OF-BLOCK'" && cat "$body" && echo END-OF-BLOCK) | run "$host" "" "$log" ;;
        add) (echo "cat >>'$argument' <<'END-OF-BLOCK'" && cat "$body" && echo END-OF-BLOCK) | run "$host" "" "$log" ;;
        behind)
            (echo "cat >/tmp/block <<'END-OF-BLOCK'" && cat "$body" && echo END-OF-BLOCK &&
                echo "line=\$(grep -nxF -m 1 '$argument' $config | cut -d: -f1)" &&
                echo "sed -i \"\${line}r /tmp/block\" $config") | run "$host" "" "$log"
            ;;
        esac
    done
    say "$section: $hosts: $action $(head -n 1 "$body" | cut -c 1-60)"
}

. "$here/scripts/try-guide-checks.sh"

try_guide() {
    previous=""
    for body in "$out"/steps/*.body; do
        number=$(basename "$body" .body)
        section=$(cat "$out/steps/$number.section")
        if [ "$section" != "$previous" ] && [ -n "$previous" ]; then
            after "$previous"
        fi
        # The pages about one host end with its removal; the page about many hosts begins without it, and that about
        # the gateway without both.
        case "$previous:$section" in
        "$section:$section") ;;
        ?*:"Set up a relay and agents") after "one host" ;;
        *:"Install the gateway") after "many hosts" ;;
        esac
        previous=$section
        try_block
    done
    after "$previous"
}

# Machines, their link and connections are in separate namespaces: everything ends with this process, and nothing else
# sees it.
if [ "${1:-}" = inside ]; then
    began=$2
    package=$3
    parent=$4
    trap 'exit 1' INT TERM
    (sleep $limit && echo "== not done after $limit s" && kill -TERM 1) &
    cut_guide
    start_machines
    try_guide
    say "the guide holds: $(ls "$out"/steps/*.body | wc -l) blocks, $total checks of its text"
    exit 0
fi

began=$(date +%s)
for tool in linux.uml:user-mode-linux qemu-system-x86_64:qemu-system-x86 nft:nftables ethtool:ethtool debootstrap:debootstrap ssh:openssh-client mke2fs:e2fsprogs; do
    command -v "${tool%%:*}" >/dev/null || fail "${tool%%:*} is missing: apt-get install ${tool##*:}"
done
[ "$(id -u)" -eq 0 ] || fail "needs root"
rm -rf "$out"
mkdir -p "$out"
exec 9>"$out.lock"
flock -n 9 || fail "another trial is running"
[ -f "${1:-}" ] || fail "usage: try-guide.sh PACKAGES"
mkdir "$out/packages"
cp "$@" "$out/packages"
package=$(ls "$out"/packages/bifrost_*.deb)
# The same packages with a newer version, to upgrade to.
mkdir "$out/next"
for file in "$package" "$out"/packages/bifrost-gateway_*.deb; do
    dpkg-deb -R "$file" "$out/next/root"
    sed -i 's/^Version: .*/&+next/' "$out/next/root/DEBIAN/control"
    dpkg-deb -Zgzip -z1 -b "$out/next/root" "$out/next/$(basename "$file")" >/dev/null
    rm -rf "$out/next/root"
done
make_image
exec unshare --net --mount --pid --fork --kill-child --mount-proc sh "$here/scripts/try-guide.sh" inside "$began" "$package" $$
