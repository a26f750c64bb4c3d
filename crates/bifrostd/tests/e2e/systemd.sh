# systemd with the packaged unit, in its own namespaces: the daemon is killed, restarted, upgraded, stopped and started again.
#   systemd.sh DIRECTORY UNIT DAEMON     in new mount, PID and network namespaces
#   systemd.sh clean DIRECTORY           in a new mount namespace, afterwards
# DIRECTORY contains bifrostd.toml, and gets the state after each step (steps) and the daemon's log (daemon.log).
set -eu
# Mounts cgroup2, which systemd needs, whatever the machine has mounted. systemd runs in its own control group.
mount_groups() {
    umount -R /sys/fs/cgroup 2>/dev/null || true
    mount -t cgroup2 none /sys/fs/cgroup
}

mount --make-rprivate /
if [ "$1" = clean ]; then
    mount_groups
    groups=/sys/fs/cgroup/${2##*/}
    [ ! -d "$groups" ] || find "$groups" -depth -type d -exec rmdir {} +
    exit
fi
if [ -z "${IN_GROUP:-}" ]; then
    mount -t proc proc /proc
    mount_groups
    groups=/sys/fs/cgroup/${1##*/}
    mkdir "$groups"
    echo $$ >"$groups/cgroup.procs"
    IN_GROUP=yes exec unshare --cgroup sh "$0" "$@"
fi
directory=$1 unit=$2 daemon=$3
mount_groups
mount -t tmpfs tmpfs /run
ip link set lo up
mkdir -p /run/netns
ip netns add guest

# The unit hides /tmp and /home, and makes the rest read-only.
mkdir -p /run/test /run/systemd/system/bifrostd.service.d
cp "$directory/bifrostd.toml" /run/test
cp "$daemon" /run/test/bifrostd
cp "$unit" /run/systemd/system/bifrostd.service
cat >/run/systemd/system/bifrostd.service.d/test.conf <<END
[Unit]
DefaultDependencies=no
Wants=
After=
[Service]
ExecStartPre=
ExecStart=
ExecStart=/run/test/bifrostd --config /run/test/bifrostd.toml
StandardError=append:/run/test/daemon.log
END
cat >/run/systemd/system/steps.service <<END
[Unit]
DefaultDependencies=no
After=bifrostd.service
Wants=bifrostd.service
[Service]
Type=oneshot
ExecStart=/bin/sh /run/test/steps
StandardOutput=append:$directory/steps
StandardError=append:$directory/steps
END
cat >/run/systemd/system/test.target <<END
[Unit]
DefaultDependencies=no
Wants=bifrostd.service steps.service
END
cat >/run/test/steps <<END
show() {
    index=\$(ip -n guest -o link show eth0 2>/dev/null | cut -d: -f1)
    echo "\$1: device \${index:-none}, \$(systemctl show bifrostd -p ActiveState -p NRestarts -p NFileDescriptorStore | sort | tr '\n' ' ')"
}
show started
systemctl kill --signal=KILL bifrostd
for _ in \$(seq 100); do
    [ "\$(systemctl show bifrostd -p NRestarts -p ActiveState --value | sort | tr -d '\n')" = 1active ] && break
    sleep 0.1
done
show killed
systemctl restart bifrostd
show restarted
former=\$(systemctl show bifrostd -p MainPID --value)
curl --silent --show-error --unix-socket /run/bifrost/bifrostd.sock --data '{}' http://bifrostd/v1/upgrade >/run/test/upgrade.json
for _ in \$(seq 100); do
    kill -0 "\$former" 2>/dev/null || break
    sleep 0.1
done
show "upgraded"
pid=\$(systemctl show bifrostd -p MainPID --value)
echo "main process: \$former \$pid, which answers \$(sed 's/.*"pid":\([0-9]*\).*/\1/' /run/test/upgrade.json) \$(kill -0 "\$pid" && echo alive)"
systemctl kill --signal=KILL bifrostd
for _ in \$(seq 100); do
    [ "\$(systemctl show bifrostd -p NRestarts -p ActiveState --value | sort | tr -d '\n')" = 1active ] && break
    sleep 0.1
done
show "killed again"
systemctl reset-failed bifrostd
systemctl stop bifrostd
show stopped
systemctl start bifrostd
show "started again"
systemctl stop bifrostd
/run/test/bifrostd --config /run/test/bifrostd.toml --remove-devices
show removed
cp /run/test/daemon.log "$directory"
systemctl exit 0 --no-block
END
export container=other
exec /lib/systemd/systemd --system --unit=test.target --log-target=console
