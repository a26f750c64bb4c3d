//! Pods in containers of Podman, created by `bifrostctl gw pod`, next to a pod whose packets are counted. If Podman
//! cannot run containers, the test is skipped and prints that.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::site::Site;
use crate::world::{Options, World, in_namespace};
use crate::{FLOWS, PATIENT_US, reordered};

const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum time of a pod from the command to its first packet, ms.
const ELASTIC_MS: u64 = 10_000;

/// `bifrostctl`, built from the current sources.
pub(crate) fn ctl() -> &'static Path {
    static CTL: OnceLock<PathBuf> = OnceLock::new();
    CTL.get_or_init(|| {
        if let Some(built) = std::env::var_os("BIFROST_CTL") {
            return built.into();
        }
        // With the whole workspace and a test, dependencies get the same features as with `cargo test`, so that nothing
        // is built twice.
        let arguments = ["build", "--quiet", "--locked", "--workspace", "--bin", "bifrostctl", "--test", "program"];
        assert!(Command::new(env!("CARGO")).args(arguments).status().unwrap().success(), "bifrostctl cannot be built");
        Path::new(env!("CARGO_BIN_EXE_bifrost-gw")).with_file_name("bifrostctl")
    })
}

/// Podman with separate storage, which is removed with this.
struct Podman {
    directory: tempfile::TempDir,
}

impl Podman {
    /// Builds the image of a pod. Returns an error if there are no containers here.
    fn start() -> Result<Podman, String> {
        let podman = Podman { directory: tempfile::tempdir().unwrap() };
        let at = |name: &str| podman.directory.path().join(name).display().to_string();
        // Sets limits that do not exceed those of a container that runs the tests.
        let settings = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n\
                        [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nruntime = \"runc\"\n";
        std::fs::write(at("containers.conf"), settings).unwrap();
        let script = format!(
            "#!/bin/sh\nexport CONTAINERS_CONF={}\n\
             exec podman --storage-driver vfs --root {} --runroot {} --tmpdir {} \"$@\"\n",
            at("containers.conf"),
            at("root"),
            at("run"),
            at("tmp"),
        );
        std::fs::write(podman.program(), script).unwrap();
        std::fs::set_permissions(podman.program(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/gw-image.sh");
        let mut image = Command::new(script);
        image.arg(env!("CARGO_BIN_EXE_bifrost-gw")).env("PODMAN", podman.program());
        output(&mut image)?;
        podman.run(&["run", "--rm", "--network=none", "localhost/bifrost-gw", "--version"])?;
        Ok(podman)
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("podman")
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        output(Command::new(self.program()).args(arguments))
    }

    /// The PID of a pod's container.
    fn pid(&self, pod: &str) -> Pid {
        let pid = self.run(&["inspect", "--format", "{{.State.Pid}}", &format!("bifrost-gw-{pod}")]).unwrap();
        Pid::from_raw(pid.parse().unwrap()).expect("the container runs")
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.run(&["rm", "--force", "--all", "--time", "0"]);
    }
}

pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// `bifrostctl gw pod`, for one or several pipelines.
struct Tool<'a> {
    podman: &'a Podman,
    nicd: Vec<PathBuf>,
}

impl Tool<'_> {
    fn run(&self, words: &[&str]) -> Result<Value, String> {
        let mut command = Command::new(ctl());
        command.args(["--json", "gw"]);
        for nicd in &self.nicd {
            command.arg("--nicd").arg(nicd);
        }
        command.args(["pod", "--podman"]).arg(self.podman.program());
        command.arg("--directory").arg(self.podman.directory.path().join("pods")).args(words);
        output(&mut command).map(|text| serde_json::from_str(&text).unwrap())
    }

    fn template(&self, name: &str, text: &str) -> String {
        let path = self.podman.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// For each pod: name, state of the container, and whether all its interfaces are connected.
    fn list(&self) -> Vec<(String, String, bool)> {
        let list = self.run(&["list"]).unwrap();
        let pod = |pod: &Value| {
            let up = pod["pipeline"]["interfaces_up"].as_array();
            let text = |value: &Value| value.as_str().unwrap_or("none").to_owned();
            (text(&pod["name"]), text(&pod["container"]), up.is_some_and(|up| up.iter().all(|up| *up == true)))
        };
        list.as_array().unwrap().iter().map(pod).filter(|pod| pod.0 != "vpc").collect()
    }

    fn until(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is(self) {
            assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}: {:?}", self.list());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Pods of 64 MiB with one core, whose frames have VLAN 9.
const TEMPLATE: &str = r#"
[pod]
cores = 1
memory_mib = 64
vlans = [9]
links = ["10.9.0.11", "10.9.0.12", "10.9.0.13"]
[gateway]
addresses = ["10.9.9.1"]
on_link = ["10.9.0.0/24"]
sessions = 1024
"#;

#[test]
#[ignore = "takes half a minute, a whole one on a busy machine"]
fn pods_in_containers_die_hang_and_scale_while_another_one_loses_nothing() {
    let podman = match Podman::start() {
        Ok(podman) => podman,
        Err(why) => return println!("SKIPPED: Podman runs no containers on this machine: {why}"),
    };
    in_namespace(move || {
        let mut world = World::start(&Options { timeout_us: PATIENT_US, ..Options::default() });
        let tool = Tool { podman: &podman, nicd: vec![world.path("nicd.sock")] };
        std::thread::scope(|scope| {
            let life = scope.spawn(|| live(&tool));
            let (mut packets, mut exchanges) = (0, 0);
            while !life.is_finished() || exchanges == 0 {
                let received = world.exchange(2_000, FLOWS, |_, _| {});
                assert_eq!((received.len(), reordered(&received)), (2_000, 0), "after {packets} packets");
                (packets, exchanges) = (packets + received.len(), exchanges + 1);
            }
            life.join().unwrap();
            assert_eq!(["timed_out_packets", "sent_late_packets"].map(world.order()), [0, 0]);
            println!("{packets} packets in {exchanges} exchanges, none lost");
        });
    });
}

/// Other pods are created, fail and are removed.
fn live(tool: &Tool<'_>) {
    let template = tool.template("svc.toml", TEMPLATE);
    let took = |done: &Value| done["created"][0]["took_ms"].as_u64().unwrap();
    for name in ["one", "two"] {
        let done = tool.run(&["create", name, "--template", &template, "--cpus", "0"]).unwrap();
        assert!(took(&done) <= ELASTIC_MS, "{done}");
        println!("{name}: connected after {} ms", took(&done));
    }
    let running = |name: &str| (name.to_owned(), "running".to_owned(), true);
    assert_eq!(tool.list(), [running("one"), running("two")]);
    // Each pod has a separate address, number and MAC address, and only its share of the machine.
    let list = tool.run(&["list"]).unwrap();
    let of = |name: &str, what: &str| {
        let pod = list.as_array().unwrap().iter().find(|pod| pod["name"] == name).unwrap();
        pod.pointer(what).unwrap().clone()
    };
    assert_eq!([of("one", "/pipeline/own/0"), of("two", "/pipeline/own/0")], ["10.9.0.11", "10.9.0.12"]);
    assert_eq!(of("two", "/pipeline/mac"), "02:bf:0a:09:00:0c");
    assert_ne!(of("one", "/pipeline/number"), of("two", "/pipeline/number"));
    let limits = tool.podman.run(&[
        "inspect",
        "--format",
        "{{.HostConfig.Memory}} {{.HostConfig.CpusetCpus}}",
        "bifrost-gw-one",
    ]);
    assert_eq!(limits.unwrap(), format!("{} 0", 64 << 20));

    // One pod hangs. Another one dies, and is restarted automatically.
    let (hangs, dies) = (tool.podman.pid("one"), tool.podman.pid("two"));
    kill_process(hangs, Signal::STOP).unwrap();
    kill_process(dies, Signal::KILL).unwrap();
    tool.until("a pod that died comes back", |tool| tool.list()[1] == running("two") && tool.podman.pid("two") != dies);
    tool.run(&["delete", "one"]).unwrap();
    assert_eq!(tool.list(), [running("two")]);
    tool.run(&["delete", "two"]).unwrap();

    let scaled = tool.run(&["scale", "svc", "3", "--template", &template]).unwrap();
    assert_eq!(scaled["created"].as_array().unwrap().len(), 3, "{scaled}");
    assert_eq!(tool.list(), [running("svc-1"), running("svc-2"), running("svc-3")]);
    let full = tool.run(&["scale", "svc", "4", "--template", &template]).unwrap_err();
    assert!(full.contains("pods have all of them") && full.contains("[pod] links"), "{full}");
    tool.run(&["scale", "svc", "1", "--template", &template]).unwrap();
    assert_eq!(tool.list(), [running("svc-1")]);

    // A failed creation leaves nothing behind.
    let other = tool.template("other.toml", &TEMPLATE.replace("cores = 1", "cores = 1\nimage = \"localhost/nothing\""));
    let error = tool.run(&["create", "bad", "--template", &other]).unwrap_err();
    assert!(error.contains("make gw-image"), "{error}");
    let other = tool.template("other.toml", &TEMPLATE.replace("on_link", "on_lin"));
    let error = tool.run(&["create", "bad", "--template", &other]).unwrap_err();
    assert!(error.contains("unknown field"), "the pod's own words: {error}");
    for (words, text) in [
        (vec!["create", "svc-1", "--template", &template], "there is a pod of this name"),
        (vec!["create", "../x", "--template", &template], "not a pod's name"),
        (vec!["delete", "nobody"], "there is no such pod"),
        (vec!["delete", "vpc"], "is in the configuration file"),
    ] {
        let error = tool.run(&words).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
    assert_eq!(tool.list(), [running("svc-1")]);
    tool.run(&["scale", "svc", "0", "--template", &template]).unwrap();
    assert_eq!(tool.list(), []);
    assert_eq!(std::fs::read_dir(tool.podman.directory.path().join("pods")).unwrap().count(), 0);
}

#[test]
#[ignore = "runs containers: some seconds"]
fn a_pod_has_links_behind_two_pipelines() {
    let podman = match Podman::start() {
        Ok(podman) => podman,
        Err(why) => return println!("SKIPPED: Podman runs no containers on this machine: {why}"),
    };
    let site = Site::empty("tp", &["gw", "sw"]);
    let nicds: Vec<_> = (0..2)
        .map(|number| {
            let device = format!("gw{number}");
            site.link(("gw", &device), ("sw", &device));
            let (pods, socket) = (site.path(&format!("pods{number}")), site.path(&format!("nicd{number}.sock")));
            let text = format!(
                "pods_directory = {pods:?}\ncontrol = {{ socket = {socket:?} }}\n\
                 device = {{ name = \"{device}\", mtu = 1600, mode = \"packet\" }}\n"
            );
            (site.start_nicd("gw", &format!("nicd{number}"), &text), socket)
        })
        .collect();
    let tool = Tool { podman: &podman, nicd: nicds.iter().map(|nicd| nicd.1.clone()).collect() };
    let networks = (0..4).map(|link| {
        let pipeline = link / 2;
        format!(
            "[[pod.networks]]\npipeline = {pipeline}\nvlan = {}\nlinks = [\"10.9.{link}.11\", \"10.9.{link}.12\"]\n\
             on_link = [\"10.9.{link}.0/24\"]\n",
            link + 1
        )
    });
    let networks: String = networks.collect();
    let template = format!(
        "[pod]\ncores = 1\nmemory_mib = 64\n{networks}[gateway]\naddresses = [\"10.9.9.1\"]\nsessions = 1024\n"
    );
    let template = tool.template("svc.toml", &template);
    let running = |name: &str| (name.to_owned(), "running".to_owned(), true);
    let pods_of = |number: usize| {
        let state = crate::site::state(&nicds[number].1);
        let pods = state["pods"].as_array().unwrap().iter();
        pods.map(|pod| (pod["name"].as_str().unwrap().to_owned(), pod["interfaces_up"].clone())).collect::<Vec<_>>()
    };
    let both_up = || serde_json::json!([true, true]);

    tool.run(&["create", "svc-1", "--template", &template]).unwrap();
    assert_eq!(tool.list(), [running("svc-1")]);
    for number in 0..2 {
        assert_eq!(pods_of(number), [("svc-1".to_owned(), both_up())], "pipeline {number}");
    }
    // A pod with links behind two pipelines cannot be created with one of them.
    let one = Tool { podman: &podman, nicd: vec![nicds[0].1.clone()] };
    assert!(one.run(&["create", "svc-2", "--template", &template]).unwrap_err().contains("--nicd"));
    assert_eq!((pods_of(0).len(), pods_of(1).len()), (1, 1), "nothing is left of it");
    tool.run(&["scale", "svc", "2", "--template", &template]).unwrap();
    assert_eq!(tool.list(), [running("svc-1"), running("svc-2")]);
    assert_eq!((pods_of(0).len(), pods_of(1).len()), (2, 2));
    tool.run(&["drain", "svc-1"]).unwrap();
    tool.run(&["delete", "svc-1"]).unwrap();
    assert_eq!(tool.list(), [running("svc-2")]);
    tool.run(&["scale", "svc", "0", "--template", &template]).unwrap();
    assert_eq!((pods_of(0).len(), pods_of(1).len(), tool.list().len()), (0, 0, 0));
}

/// A file of `packaging/gateway`, with another directory for pods.
fn packaged(name: &str, directory: &Path) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/gateway").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    text.replace("/var/lib/bifrost/gw", &directory.display().to_string())
}

#[test]
#[ignore = "runs containers: some seconds"]
fn the_packaged_forms_of_a_pod_run() {
    let podman = match Podman::start() {
        Ok(podman) => podman,
        Err(why) => return println!("SKIPPED: Podman runs no containers on this machine: {why}"),
    };
    in_namespace(move || {
        let world = World::start(&Options { timeout_us: PATIENT_US, ..Options::default() });
        let tool = Tool { podman: &podman, nicd: vec![world.path("nicd.sock")] };
        let (name, pods) = ("vpc-1", podman.directory.path().join("pods"));
        let directory = pods.join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let text = format!(
            "name = \"{name}\"\nnumber = 7\ncores = 1\nown = [\"10.9.9.1\"]\nmac = \"02:00:00:00:09:01\"\n\
             interfaces = [{{ vlan = 9, socket = {:?} }}]\n",
            directory.join("0.sock")
        );
        let command = serde_json::json!({ "command": "add_pod", "settings": text });
        assert_eq!(crate::site::post(&world.path("nicd.sock"), &command), serde_json::json!({}));
        let text = format!(
            "control = {{ socket = {:?} }}\n[gateway]\npod = 7\ncores = 1\ninterfaces = [{:?}]\n\
             addresses = [\"10.9.9.1\"]\nmac = \"02:00:00:00:09:01\"\nmtu = 1400\non_link = [\"10.9.0.0/24\"]\nsessions = 64\n",
            directory.join("gw.sock"),
            directory.join("0.sock"),
        );
        std::fs::write(directory.join("gw.toml"), text).unwrap();
        let connected = |tool: &Tool<'_>, is: bool| tool.list().iter().any(|pod| pod.0 == name && pod.2 == is);

        // The command of the systemd unit, until SIGTERM.
        let unit = packaged("bifrost-gw@.service", &pods).replace("%i", name).replace("\\\n", " ");
        let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/podman ")).unwrap();
        let mut service = Command::new(podman.program());
        let mut service = service.args(command.split_whitespace()).stdin(Stdio::null()).spawn().unwrap();
        tool.until("the service's pod is connected", |tool| connected(tool, true));
        assert_eq!(tool.list()[0].1, "running", "it is a pod as others");
        kill_process(Pid::from_child(&service), Signal::TERM).unwrap();
        assert!(service.wait().unwrap().success());
        tool.until("the service's pod is gone", |tool| connected(tool, false));
        assert_eq!(tool.list()[0].1, "none");

        // The Kubernetes manifest, run by Podman.
        if !Path::new("/usr/libexec/podman/catatonit").exists() {
            return println!("SKIPPED: `podman play kube` needs the package catatonit");
        }
        let file = tool.template("kubernetes.yaml", &packaged("kubernetes.yaml", &pods));
        podman.run(&["play", "kube", "--network", "none", &file]).unwrap();
        tool.until("the pod of the manifest is connected", |tool| connected(tool, true));
        podman.run(&["play", "kube", "--down", &file]).unwrap();
        tool.until("the pod of the manifest is gone", |tool| connected(tool, false));
    });
}
