//! Virtual machines that move to another host while they run: QEMU without KVM, with the kernel that
//! `scripts/install-debian-packages.sh` unpacks and only Busybox as user space.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::netns::Namespace;
use crate::{command, interrupt, process};

/// Directory of the kernel and its modules.
const KERNEL: &str = "/var/cache/bifrost-lab/kernel";
/// Modules that a machine loads, in order.
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
/// Time limit for a machine to start, and to move.
const PATIENCE: Duration = Duration::from_secs(120);

/// The kernel and root file system of machines.
#[derive(Debug)]
pub struct Image {
    kernel: PathBuf,
    initrd: PathBuf,
}

/// The host's end of a machine's network device.
#[derive(Debug, Clone, Copy)]
pub enum Device<'a> {
    /// QEMU creates this socket, and a vhost-user port connects to it.
    VhostUser(&'a Path),
    /// A TAP device with this name.
    Tap(&'a str),
}

/// A running machine. Dropping it ends it.
#[derive(Debug)]
pub struct Qemu {
    child: Child,
    name: String,
    control: PathBuf,
    console: PathBuf,
}

/// QEMU's report about a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moved {
    /// Time from the machine's stop here to its start there, ms.
    pub downtime_ms: f64,
    /// Time from the request to that start, ms.
    pub total_ms: f64,
}

impl Image {
    /// Packs the root file system of a machine that answers pings and whose `script` serves requests.
    ///
    /// # Errors
    /// The kernel is missing.
    pub fn build(directory: &Path, address: Ipv4Addr, mtu: u32, script: &str) -> Result<Image> {
        let kernel = one(&Path::new(KERNEL).join("boot"), "vmlinuz-")?;
        let modules = one(&Path::new(KERNEL).join("lib/modules"), "")?.join("kernel");
        let root = directory.join("root");
        for place in ["bin", "proc", "sys", "dev", "modules"] {
            fs::create_dir_all(root.join(place)).with_context(|| format!("creating {}", root.display()))?;
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).context("copying Busybox")?;
        let mut loads = String::new();
        for module in MODULES {
            let name = module.rsplit('/').next().unwrap_or(module);
            fs::copy(modules.join(format!("{module}.ko")), root.join(format!("modules/{name}.ko")))
                .with_context(|| format!("copying the module {module}"))?;
            loads += &format!("insmod /modules/{name}.ko\n");
        }
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nmount -t proc proc /proc\nmount -t sysfs sys /sys\n\
             mount -t devtmpfs dev /dev\n{loads}ip link set lo up\nip link set eth0 mtu {mtu} up\n\
             ip address add {address}/24 dev eth0\necho \"machine: up\"\n{script}\n"
        );
        fs::write(root.join("init"), init).context("writing what the machine starts")?;
        let initrd = directory.join("initrd");
        let pack = format!(
            "cd '{}' && chmod +x init bin/busybox && find . | busybox cpio -o -H newc 2>/dev/null > '{}'",
            root.display(),
            initrd.display()
        );
        command::run("sh", &["-c", &pack])?;
        Ok(Image { kernel, initrd })
    }
}

impl Qemu {
    /// Starts a machine in a host's namespace. With `incoming`, it waits there for a migration.
    ///
    /// # Errors
    /// QEMU is missing.
    pub fn start(
        image: &Image,
        host: &Namespace,
        (name, mac): (&str, &str),
        device: Device<'_>,
        (directory, logs): (&Path, &Path),
        incoming: Option<&Path>,
    ) -> Result<Qemu> {
        for path in [directory, logs] {
            fs::create_dir_all(path).with_context(|| format!("creating {}", path.display()))?;
        }
        let (control, console) = (directory.join(format!("{name}.qmp")), logs.join(format!("{name}.console")));
        let output = File::create(&console).with_context(|| format!("creating {}", console.display()))?;
        let mut command = host.command("setpriv");
        command
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "tcg", "-nodefaults", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio", "-m", "128M", "-machine", "pc,memory-backend=memory"])
            .args(["-object", "memory-backend-memfd,id=memory,size=128M,share=on"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", control.display())]);
        match device {
            Device::VhostUser(socket) => command
                .args(["-chardev", &format!("socket,id=port,path={},server=on,wait=off", socket.display())])
                .args(["-netdev", "vhost-user,id=net,chardev=port"]),
            Device::Tap(tap) => {
                command.args(["-netdev", &format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=off")])
            }
        };
        // Without KVM, QEMU 7.2 crashes when an MSI-X vector of a vhost device is masked.
        command
            .args(["-device", &format!("virtio-net-pci,netdev=net,romfile=,vectors=0,mac={mac}")])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd)
            .args(["-append", "console=ttyS0 quiet"]);
        if let Some(at) = incoming {
            command.args(["-incoming", &format!("unix:{}", at.display())]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| command::missing("qemu-system-x86_64"))?;
        Ok(Qemu { child, name: name.to_owned(), control, console })
    }

    /// Waits until its network is up.
    ///
    /// # Errors
    /// The machine has ended, or does not start in time.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        self.wait("does not start", |machine| Ok(machine.console().contains("machine: up").then_some(())))
    }

    /// Migrates to the machine that waits at `to`. When this returns, that machine is running.
    ///
    /// # Errors
    /// QEMU refuses, or the migration takes too long.
    pub fn migrate(&mut self, to: &Path) -> Result<Moved> {
        let mut control = self.wait("has no control socket", |machine| Ok(Control::open(&machine.control).ok()))?;
        control.ask("migrate", json!({"uri": format!("unix:{}", to.display())}))?;
        self.wait("does not move", |machine| {
            let said = control.ask("query-migrate", json!({}))?;
            match said["status"].as_str() {
                Some("completed") => {
                    let ms = |key: &str| said[key].as_f64().with_context(|| format!("QEMU says no {key}: {said}"));
                    Ok(Some(Moved { downtime_ms: ms("downtime")?, total_ms: ms("total-time")? }))
                }
                Some("failed" | "cancelled") => bail!("the machine {} has not moved: {said}", machine.name),
                _ => Ok(None),
            }
        })
    }

    fn wait<T>(&mut self, failed: &str, mut look: impl FnMut(&Self) -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            let ended = self.child.try_wait().context("asking for a machine's status")?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("the machine {} {failed} ({ended:?}); its console:\n{}", self.name, self.console());
            }
            interrupt::sleep(Duration::from_millis(1))?;
        }
    }

    fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        process::end(&mut self.child);
    }
}

/// QEMU's control socket (QMP).
struct Control(BufReader<UnixStream>);

impl Control {
    fn open(path: &Path) -> Result<Control> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut control = Control(BufReader::new(stream));
        control.next()?;
        control.ask("qmp_capabilities", json!({}))?;
        Ok(control)
    }

    /// Sends a command and returns its result. Events are skipped.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.0.get_mut().write_all(format!("{request}\n").as_bytes()).context("asking QEMU")?;
        loop {
            let mut answer = self.next()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line).context("waiting for QEMU")?;
        serde_json::from_str(&line).with_context(|| format!("QEMU says {line:?}"))
    }
}

/// The only entry of a directory whose name starts with `prefix`.
fn one(directory: &Path, prefix: &str) -> Result<PathBuf> {
    let hint = "scripts/install-debian-packages.sh unpacks a kernel there";
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}: {hint}", directory.display()))?;
    let mut found = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let found =
        found.next().with_context(|| format!("nothing is called {prefix}... in {}: {hint}", directory.display()))?;
    Ok(found.path())
}
