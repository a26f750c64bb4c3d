//! Virtual machines with a real virtio_net driver: user-mode Linux, whose read-only root file system is that of the
//! test machine, and QEMU with only BusyBox.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// The guest's init script.
const INIT: &str = r#"#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /run
export TMPDIR=/run HOME=/run
for argument in $(cat /proc/cmdline); do case "$argument" in bf_*=*) export "$argument";; esac; done
modules=/usr/lib/uml/modules/$(uname -r)/kernel
for module in net/core/failover drivers/net/net_failover drivers/net/virtio_net; do insmod $modules/$module.ko; done
ip link set lo up
ip link set eth0 up
ip address add $bf_address dev eth0
cd /run
echo "guest: up, MTU $(cat /sys/class/net/eth0/mtu), MAC $(cat /sys/class/net/eth0/address), packed $(cut -c35 /sys/class/net/eth0/device/features)"
. $bf_script
echo "guest: done"
echo o > /proc/sysrq-trigger
sleep 10
"#;

/// Library that user-mode Linux needs on some CPUs: `scripts/uml-xstate.c`.
const UML_XSTATE: &str = "/var/cache/bifrost-lab/uml-xstate.so";
/// Where `scripts/install-debian-packages.sh` unpacks a kernel for QEMU.
const KERNEL: &str = "/var/cache/bifrost-lab/kernel";
/// Modules that QEMU's guest loads, in order.
const MODULES: [&str; 8] = [
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
];
const QEMU_INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module.ko; done
ip link set lo up
ip link set eth0 mtu $bf_mtu up
ip address add $bf_address dev eth0
echo "guest: up, packed $(cut -c35 /sys/class/net/eth0/device/features), queues $(ls -d /sys/class/net/eth0/queues/tx-* | wc -l)"
. /script
echo "guest: done"
poweroff -f
"#;

/// A running virtual machine; killed on drop.
pub struct Machine {
    name: &'static str,
    child: Child,
    console: PathBuf,
}

impl Machine {
    /// Starts a machine whose vNIC is behind `socket`. It runs `script`, then ends.
    pub fn start(directory: &Path, name: &'static str, socket: &Path, address: &str, script: &str) -> Machine {
        // Without user-mode Linux the test cannot run. This must not look like a failure of the daemon.
        let version = Command::new("linux.uml").arg("--version").output();
        assert!(
            version.as_ref().is_ok_and(|o| o.status.success()),
            "user-mode Linux does not run here ({version:?}): scripts/install-debian-packages.sh installs it"
        );
        let file = |what: &str| directory.join(format!("{name}.{what}"));
        std::fs::write(file("init"), INIT).unwrap();
        std::fs::write(file("script"), script).unwrap();
        super::netns::run("chmod", &["+x", &file("init").display().to_string()], "");
        let console = File::options().create(true).append(true).open(file("console")).unwrap();
        // It has many processes, which are killed with their session.
        let child = Command::new("setpriv")
            .env("LD_PRELOAD", UML_XSTATE)
            .args(["--pdeathsig", "KILL", "setsid", "linux.uml", "mem=160M", "quiet", "con=null", "con0=null,fd:1"])
            .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", &format!("umid={name}")])
            .arg(format!("uml_dir={}", file("uml").display()))
            .arg(format!("init={}", file("init").display()))
            .arg(format!("virtio_uml.device={}:1", socket.display()))
            .arg(format!("bf_address={address}"))
            .arg(format!("bf_script={}", file("script").display()))
            .stdin(Stdio::null())
            .stdout(console.try_clone().unwrap())
            .stderr(console)
            .spawn()
            .unwrap();
        Machine { name, child, console: file("console") }
    }

    /// Starts a QEMU machine that creates `socket` and waits for the daemon there. It has a virtual CPU for each of
    /// `queues` queue pairs, and `device` adds options of its network device. It runs without KVM.
    pub fn qemu(
        directory: &Path,
        name: &'static str,
        socket: &Path,
        address: &str,
        queues: usize,
        device: &str,
        script: &str,
    ) -> Machine {
        Machine::qemu_with(directory, name, socket, address, queues, device, script, &[])
    }

    /// As [`Machine::qemu`], with a control socket for [`Control`]. With `incoming`, the machine waits there for a
    /// migration, and then stays paused until [`Control::resume`].
    pub fn movable(
        directory: &Path,
        name: &'static str,
        socket: &Path,
        address: &str,
        device: &str,
        incoming: Option<&Path>,
        script: &str,
    ) -> Machine {
        let control = format!("unix:{},server=on,wait=off", Control::path(directory, name).display());
        let mut more = vec!["-qmp".to_owned(), control];
        let waits = |at: &&Path| ["-S".to_owned(), "-incoming".to_owned(), format!("unix:{}", at.display())];
        more.extend(incoming.iter().flat_map(waits));
        Machine::qemu_with(directory, name, socket, address, 1, device, script, &more)
    }

    #[allow(clippy::too_many_arguments)]
    fn qemu_with(
        directory: &Path,
        name: &'static str,
        socket: &Path,
        address: &str,
        queues: usize,
        device: &str,
        script: &str,
        more: &[String],
    ) -> Machine {
        let file = |what: &str| directory.join(format!("{name}.{what}"));
        let kernel = glob(&Path::new(KERNEL).join("boot"), "vmlinuz-");
        let modules = glob(&Path::new(KERNEL).join("lib/modules"), "").join("kernel");
        let root = file("root");
        for directory in ["bin", "proc", "sys", "dev", "modules"] {
            std::fs::create_dir_all(root.join(directory)).unwrap();
        }
        std::fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
        std::fs::write(root.join("init"), QEMU_INIT).unwrap();
        std::fs::write(root.join("script"), script).unwrap();
        let mut order = String::new();
        for module in MODULES {
            let (_, module_name) = module.rsplit_once('/').unwrap();
            std::fs::copy(modules.join(format!("{module}.ko")), root.join(format!("modules/{module_name}.ko")))
                .unwrap();
            order += &format!("{module_name}\n");
        }
        std::fs::write(root.join("modules/order"), order).unwrap();
        let pack = format!(
            "chmod +x init bin/busybox && find . | busybox cpio -o -H newc 2>/dev/null > {}",
            file("initrd").display()
        );
        super::netns::run("sh", &["-c", &format!("cd {} && {pack}", root.display())], "");
        let console = File::options().create(true).append(true).open(file("console")).unwrap();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "tcg", "-nodefaults", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio", "-m", "128M", "-machine", "pc,memory-backend=memory"])
            .args(["-object", "memory-backend-memfd,id=memory,size=128M,share=on"])
            .args(["-chardev", &format!("socket,id=port,path={},server=on,wait=off", socket.display())])
            .args(["-smp", &queues.to_string()])
            .args(["-netdev", &format!("vhost-user,id=net,chardev=port,queues={queues}")])
            // Without KVM, QEMU 7.2 crashes when an MSI-X vector of a vhost device is masked.
            .args(["-device", &format!("virtio-net-pci,netdev=net,romfile=,vectors=0,mac=02:00:00:00:00:01{device}")])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(file("initrd"))
            .args(["-append", &format!("console=ttyS0 quiet bf_address={address} bf_mtu=1450")])
            .args(more)
            .stdin(Stdio::null())
            .stdout(console.try_clone().unwrap())
            .stderr(console)
            .spawn()
            .unwrap();
        Machine { name, child, console: file("console") }
    }

    /// A copy of its memory.
    pub fn memory(&self) -> Vec<u8> {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().flatten();
        let is_memory = |file: &PathBuf| {
            std::fs::read_link(file).is_ok_and(|target| target.to_string_lossy().contains("memfd:memory-backend"))
        };
        let memory = files.map(|file| file.path()).find(is_memory).expect("QEMU has a memfd for the guest's memory");
        std::fs::read(memory).unwrap()
    }

    /// Its console output.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Waits until the console shows `text`.
    pub fn wait_for(&self, text: &str, seconds: f64) {
        let deadline = std::time::Instant::now() + Duration::from_secs_f64(seconds);
        while !self.console().contains(text) {
            let late = std::time::Instant::now() > deadline || self.has_ended();
            assert!(!late, "machine {} does not print {text:?} within {seconds} s:\n{}", self.name, self.console());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn has_ended(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.contains(") Z ") && !self.console().contains("guest: done")
    }

    /// The number after the last `NAME=` in its console output.
    pub fn said(&self, name: &str) -> u64 {
        let text = self.console();
        let value = text.lines().filter_map(|l| l.trim().strip_prefix(name)?.strip_prefix('=')).next_back();
        value.and_then(|v| v.parse().ok()).unwrap_or_else(|| panic!("no {name}= in\n{text}"))
    }
}

/// Control connection to a QEMU machine (QMP).
pub struct Control {
    stream: BufReader<UnixStream>,
}

impl Control {
    fn path(directory: &Path, name: &str) -> PathBuf {
        directory.join(format!("{name}.qmp"))
    }

    pub fn of(directory: &Path, name: &str) -> Control {
        let mut stream = None;
        super::eventually(30.0, "QEMU has a control socket", || {
            stream = UnixStream::connect(Control::path(directory, name)).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut control = Control { stream: BufReader::new(stream) };
        control.next();
        control.ask(json!({"execute": "qmp_capabilities"}));
        control
    }

    /// Runs a command, and returns its result. Events are ignored.
    pub fn ask(&mut self, command: Value) -> Value {
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        loop {
            let mut answer = self.next();
            if let Some(error) = answer.get("error") {
                panic!("{command}: {error}");
            }
            if answer.get("return").is_some() {
                return answer["return"].take();
            }
        }
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("QEMU has ended ({error}): {line:?}"))
    }

    /// Waits until a machine has migrated here. It is paused.
    pub fn wait_for_arrival(&mut self) {
        super::eventually(120.0, "the machine has arrived", || {
            let status = self.ask(json!({"execute": "query-status"}));
            status["status"] == "paused" || status["status"] == "prelaunch"
        });
    }

    /// Resumes a paused machine.
    pub fn resume(&mut self) {
        self.ask(json!({"execute": "cont"}));
    }

    /// Migrates the machine to a waiting one. Returns QEMU's status after the migration.
    pub fn migrate(&mut self, to: &Path) -> Value {
        self.ask(json!({"execute": "migrate", "arguments": {"uri": format!("unix:{}", to.display())}}));
        let mut status = Value::Null;
        super::eventually(120.0, "the machine has moved", || {
            status = self.ask(json!({"execute": "query-migrate"}));
            assert!(status["status"] != "failed" && status["status"] != "cancelled", "{status}");
            status["status"] == "completed"
        });
        status
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The started process leads a session. The guest's processes are in its process group and would otherwise
        // survive.
        if let Some(leader) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process_group(leader, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The one entry of a directory whose name starts with `prefix`.
fn glob(directory: &Path, prefix: &str) -> PathBuf {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|error| {
        panic!("{}: {error}: scripts/install-debian-packages.sh creates it", directory.display());
    });
    let mut found = entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(prefix));
    found.next().unwrap_or_else(|| panic!("no entry starts with {prefix:?} in {}", directory.display())).path()
}
