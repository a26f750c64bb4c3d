//! Containers that a runtime attaches, through the CNI plugin: the plugin alone, cnitool, Podman, and containerd.
//!
//! The last three need tools: `BIFROST_CNI_TOOLS=$(scripts/install-cni.sh) cargo test -p bifrostd --test e2e cni -- --ignored`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use bifrost_control::api::{ApplyItem, ApplyOp, ApplySpec, ObjectsQuery};
use bifrost_control::config::Kind;
use serde_json::{Value, json};

use crate::common::host::{Guest, Host, PATIENT};
use crate::common::traffic::{exchange, ping};
use crate::common::{Lab, Net, Options, eventually, netns};

/// The plugin, built from the current source.
fn plugin() -> &'static Path {
    static PLUGIN: OnceLock<PathBuf> = OnceLock::new();
    PLUGIN.get_or_init(|| {
        // With the whole workspace and a test, dependencies have the same features as in `cargo test`, so that nothing
        // is built twice.
        let arguments = ["build", "--quiet", "--locked", "--workspace", "--bin", "bifrost-cni", "--test", "program"];
        let status = Command::new(env!("CARGO")).args(arguments).status().unwrap();
        assert!(status.success(), "the plugin cannot be built");
        Path::new(env!("CARGO_BIN_EXE_bifrostd")).with_file_name("bifrost-cni")
    })
}

/// Directory of the tools.
fn tools() -> PathBuf {
    std::env::var_os("BIFROST_CNI_TOOLS").expect("set BIFROST_CNI_TOOLS, as by `scripts/install-cni.sh`").into()
}

/// A container's interface, attached by running the plugin directly.
struct Container<'a> {
    host: &'a Host,
    id: &'static str,
    net: &'a Net,
    network: Value,
}

impl<'a> Container<'a> {
    fn new(host: &'a Host, id: &'static str, net: &'a Net, address: &str) -> Container<'a> {
        let network = json!({
            "cniVersion": "1.1.0", "name": "pods", "type": "bifrost-cni", "vni": 100, "socket": host.socket(),
            "runtimeConfig": {"ips": [address]},
        });
        Container { host, id, net, network }
    }

    fn call(&self, command: &str) -> Result<Value, Value> {
        self.call_with(command, &json!({}))
    }

    fn call_with(&self, command: &str, more: &Value) -> Result<Value, Value> {
        let mut network = self.network.clone();
        network.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut program = Command::new(plugin());
        program
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", self.id)
            .env("CNI_NETNS", format!("/run/netns/{}", self.net.name()))
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/nowhere");
        answer(&run(&mut program, &network))
    }

    fn ports(&self) -> Vec<String> {
        let query = ObjectsQuery { owner: Some("cni.pods".into()), ..ObjectsQuery::default() };
        self.host.client.objects(&query).unwrap().objects.into_iter().map(|object| object.key).collect()
    }
}

fn run(program: &mut Command, input: &Value) -> Output {
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that does not read its input is no reason to fail.
    let _ = child.stdin.take().unwrap().write_all(input.to_string().as_bytes());
    child.wait_with_output().unwrap()
}

/// The plugin's answer: a result (null if there is no output), or an error.
fn answer(output: &Output) -> Result<Value, Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "", "the plugin has written to standard error");
    let value = if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout).unwrap() };
    if output.status.success() { Ok(value) } else { Err(value) }
}

/// Adds a route to a container on another host.
fn route(host: &Host, peer: &str, address: &str, mac: &str) {
    set(host, Kind::Route, json!({"vni": 100, "prefix": format!("{address}/32"), "peer": peer, "mac": mac}));
}

fn set(host: &Host, kind: Kind, spec: Value) {
    let (op, owner) = (ApplyOp::Set, "test".to_owned());
    let item = ApplyItem { op, kind, key: None, generation: None, owner, spec: Some(spec) };
    host.client.apply(&ApplySpec { items: vec![item], ..ApplySpec::default() }).unwrap();
}

/// Two hosts: the first one has a state directory, the second one has the guest `b`, 10.0.0.2.
fn lab() -> Lab {
    let mut lab = Lab::new(Options { transport: PATIENT.into(), ..Options::default() });
    std::fs::create_dir_all(lab.hosts[0].state_directory()).unwrap();
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.start();
    lab
}

#[test]
fn a_container_is_attached_and_detached() {
    let lab = lab();
    let net = Net::new(lab.tag(), "c");
    let container = Container::new(&lab.hosts[0], "c1", &net, "10.0.0.5/24");
    let added = container.call("ADD").unwrap();
    let mac = added["interfaces"][0]["mac"].as_str().unwrap().to_owned();
    assert_eq!((&added["cniVersion"], &added["interfaces"][0]["name"]), (&json!("1.1.0"), &json!("eth0")));
    assert_eq!((&added["ips"][0]["address"], &added["ips"][0]["interface"]), (&json!("10.0.0.5/24"), &json!(0)));
    route(&lab.hosts[1], "host-a", "10.0.0.5", &mac);
    // When the plugin answers, packets pass, even the first one.
    assert_eq!(ping(&net, "10.0.0.2", 3, 56), 3);
    exchange(&net, lab.net("b"), "10.0.0.2", 5001, 1 << 20);
    let previous = json!({"prevResult": added});
    assert_eq!(container.call_with("CHECK", &previous), Ok(Value::Null));

    // A second ADD is an error, and the attachment stays, whatever else is wrong with that call.
    for more in [json!({}), json!({"runtimeConfig": {}}), json!({"mtu": 9000}), json!({"ipam": {"type": "host-local"}})]
    {
        let again = container.call_with("ADD", &more).unwrap_err();
        assert!(again["code"] == 102 && again["msg"].as_str().unwrap().contains("already"), "{more}: {again}");
        assert_eq!(ping(&net, "10.0.0.2", 1, 56), 1);
    }
    // An address is removed, then the device.
    net.ip("addr del 10.0.0.5/24 dev eth0\n");
    let changed = container.call_with("CHECK", &previous).unwrap_err();
    assert!(changed["code"] == 101 && changed["msg"].as_str().unwrap().contains("10.0.0.5/24"), "{changed}");
    net.ip("link del eth0\n");
    let gone = container.call_with("CHECK", &previous).unwrap_err();
    assert!(gone["code"] == 101 && gone["msg"].as_str().unwrap().contains("eth0 is gone"), "{gone}");

    assert_eq!(container.call("DEL"), Ok(Value::Null));
    assert_eq!(container.ports(), Vec::<String>::new());
    assert_eq!(container.call_with("CHECK", &previous).unwrap_err()["code"], 3);
    // A runtime may repeat DEL, also after the namespace is deleted.
    assert_eq!(container.call("DEL"), Ok(Value::Null));
    assert!(container.call("ADD").is_ok());
    drop(Net::new(lab.tag(), "other"));
    assert_eq!(container.call("DEL"), Ok(Value::Null));
}

#[test]
fn a_container_that_cannot_be_attached_leaves_nothing() {
    let lab = lab();
    let net = Net::new(lab.tag(), "c");
    let container = Container::new(&lab.hosts[0], "c1", &net, "10.0.0.5/24");
    for (more, code, says) in [
        (json!({"vni": 999}), 100, "999"),
        (json!({"mtu": 9000}), 100, "mtu"),
        (json!({"security_groups": ["nobody"]}), 100, "nobody"),
        (json!({"runtimeConfig": {}}), 7, "ipam"),
        (json!({"ipam": {"type": "host-local"}}), 5, "/nowhere"),
        (json!({"ipam": {"type": "../evil"}}), 7, "evil"),
        (json!({"vpc": 1}), 2, "vpc"),
        (json!({"cniVersion": "9.9.9"}), 1, "1.1.0"),
        (json!({"socket": "/nowhere/bifrostd.sock"}), 11, "not running"),
    ] {
        let error = container.call_with("ADD", &more).unwrap_err();
        assert!(error["code"] == code && error["msg"].as_str().unwrap().contains(says), "{more}: {error}");
        assert!(error["cniVersion"] == "1.1.0", "{error}");
        assert!(!net.has_device("eth0"), "{more}");
    }
    // An existing interface of that name stays.
    net.ip("link add eth0 type bridge\n");
    let error = container.call("ADD").unwrap_err();
    assert!(error["msg"].as_str().unwrap().contains("eth0"), "{error}");
    assert!(net.has_device("eth0"));
    // A namespace that does not exist.
    let mut program = Command::new(plugin());
    program.env("CNI_COMMAND", "ADD").env("CNI_CONTAINERID", "c1").env("CNI_IFNAME", "eth0");
    let error = answer(&run(program.env("CNI_NETNS", "/run/netns/nobody-has-this"), &container.network)).unwrap_err();
    assert!(error["code"] == 4 && error["msg"].as_str().unwrap().contains("nobody-has-this"), "{error}");
    assert_eq!(container.ports(), Vec::<String>::new());
}

#[test]
fn stale_attachments_are_collected() {
    let mut lab = lab();
    let nets = ["c", "d", "e"].map(|role| Net::new(lab.tag(), role));
    let containers = ["c1", "d1", "e1"].iter().zip(&nets).zip(5..);
    let containers: Vec<_> =
        containers.map(|((id, net), n)| Container::new(&lab.hosts[0], id, net, &format!("10.0.0.{n}/24"))).collect();
    for container in &containers {
        container.call("ADD").unwrap();
    }
    let valid = |ids: &[&str]| {
        let valid: Vec<_> = ids.iter().map(|id| json!({"containerID": id, "ifname": "eth0"})).collect();
        json!({"cni.dev/valid-attachments": valid})
    };
    assert_eq!(containers[0].call_with("GC", &valid(&["c1", "e1", "f1"])), Ok(Value::Null));
    assert_eq!(containers[0].ports().len(), 2);
    assert!(nets[0].has_device("eth0") && !nets[1].has_device("eth0") && nets[2].has_device("eth0"));
    // Attachments of another network are not collected.
    let mut other = Container::new(&lab.hosts[0], "c1", &nets[0], "10.0.0.9/24");
    other.network["name"] = json!("others");
    assert_eq!(other.call_with("GC", &valid(&[])), Ok(Value::Null));
    assert_eq!(containers[0].ports().len(), 2);
    assert_eq!(containers[0].call("STATUS"), Ok(Value::Null));
    let socket = lab.hosts[0].socket();
    drop(containers);
    lab.hosts[0].stop();
    let mut program = Command::new(plugin());
    let network = json!({"cniVersion": "1.1.0", "name": "pods", "type": "bifrost-cni", "vni": 100, "socket": socket});
    let error = answer(&run(program.env("CNI_COMMAND", "STATUS"), &network)).unwrap_err();
    assert!(error["code"] == 50 && error["msg"].as_str().unwrap().contains("not running"), "{error}");
}

#[test]
fn a_port_of_the_host_reaches_its_containers() {
    let lab = lab();
    let net = Net::new(lab.tag(), "c");
    let container = Container::new(&lab.hosts[0], "c1", &net, "10.0.0.5/24");
    container.call("ADD").unwrap();
    let spec = json!({"name": "node", "vni": 100, "mac": "02:00:00:00:00:64", "addresses": ["10.0.0.100/24"], "device": "vpc0"});
    set(&lab.hosts[0], Kind::Port, spec);
    let node = &lab.hosts[0].net;
    assert_eq!(ping(node, "10.0.0.5", 3, 56), 3);
    exchange(node, &net, "10.0.0.5", 8080, 1 << 20);
    exchange(&net, node, "10.0.0.100", 8081, 1 << 20);
}

/// Writes a network configuration for a runtime into its own directory: with both families, and addresses from
/// host-local.
fn configure(lab: &Lab, version: &str) -> PathBuf {
    let directory = netns::directory(lab.tag()).join(format!("net.d-{version}"));
    std::fs::create_dir_all(&directory).unwrap();
    let network = json!({"cniVersion": version, "name": "pods", "plugins": [{
        "type": "bifrost-cni", "vni": 100, "socket": lab.hosts[0].socket(), "mtu": 1400,
        "capabilities": {"bandwidth": true},
        "ipam": {
            "type": "host-local", "dataDir": netns::directory(lab.tag()).join("addresses"),
            "ranges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.10", "gateway": "10.0.0.2"}],
                       [{"subnet": "fd00:10::/64", "gateway": "fd00:10::1"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.9.0.0/16", "gw": "10.0.0.2"}],
        },
    }]});
    std::fs::write(directory.join("10-pods.conflist"), network.to_string()).unwrap();
    // All plugins are in one directory.
    let programs = netns::directory(lab.tag()).join("plugins");
    std::fs::create_dir_all(&programs).unwrap();
    for (name, file) in [("host-local", tools().join("host-local")), ("bifrost-cni", plugin().to_owned())] {
        let _ = std::os::unix::fs::symlink(file, programs.join(name));
    }
    directory
}

#[test]
#[ignore = "needs BIFROST_CNI_TOOLS"]
fn cnitool_attaches_in_every_version() {
    let lab = lab();
    for (number, version) in ["0.4.0", "1.0.0", "1.1.0"].into_iter().enumerate() {
        let directory = configure(&lab, version);
        let net = Net::new(lab.tag(), &format!("c{number}"));
        let tool = |command: &str, more: &[&str]| {
            let mut program = Command::new(tools().join("cnitool"));
            program
                .args([command, "pods", &format!("/run/netns/{}", net.name())])
                .args(more)
                .env("NETCONFPATH", &directory)
                .env("CNI_PATH", netns::directory(lab.tag()).join("plugins"))
                .env("CAP_ARGS", r#"{"bandwidth": {"egressRate": 100000000, "egressBurst": 1}}"#);
            let output = run(&mut program, &Value::Null);
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() { Ok(output.stdout) } else { Err(text) }
        };
        let added: Value = serde_json::from_slice(&tool("add", &[]).unwrap()).unwrap();
        assert_eq!(added["cniVersion"], version);
        let address = added["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
        route(&lab.hosts[1], "host-a", &address, added["interfaces"][0]["mac"].as_str().unwrap());
        assert_eq!(ping(&net, "10.0.0.2", 2, 56), 2);
        let routes = net.run("ip", &["route"], "").stdout;
        let routes = String::from_utf8_lossy(&routes);
        assert!(routes.contains("default via 10.0.0.2") && routes.contains("10.9.0.0/16 via 10.0.0.2"), "{routes}");
        let routes = net.run("ip", &["-6", "route"], "").stdout;
        let routes = String::from_utf8_lossy(&routes);
        assert!(routes.contains("default via fd00:10::1"), "{routes}");
        let query = ObjectsQuery { owner: Some("cni.pods".into()), ..ObjectsQuery::default() };
        let ports = lab.hosts[0].client.objects(&query).unwrap().objects;
        assert_eq!((&ports[0].spec["tx_mbit"], &ports[0].spec["mtu"]), (&json!(100), &json!(1400)));
        assert_eq!(tool("check", &[]), Ok(vec![]));
        net.ip("link set eth0 down\n");
        let error = tool("check", &[]).unwrap_err();
        assert!(error.contains("eth0 is down"), "{error}");
        if version == "1.1.0" {
            tool("status", &[]).unwrap();
        }
        tool("del", &[]).unwrap();
        assert!(!net.has_device("eth0"));
        assert!(lab.hosts[0].client.objects(&query).unwrap().objects.is_empty());
        // A container that the switch refuses keeps no address.
        let file = directory.join("10-pods.conflist");
        let network = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, network.replace("\"vni\":100", "\"vni\":999")).unwrap();
        let error = tool("add", &[]).unwrap_err();
        assert!(error.contains("999"), "{error}");
        // The addresses are returned to host-local.
        let leases = std::fs::read_dir(netns::directory(lab.tag()).join("addresses/pods")).unwrap();
        let leases: Vec<_> =
            leases.map(|entry| entry.unwrap().file_name()).filter(|n| n.to_string_lossy().contains(".0.")).collect();
        assert!(leases.iter().all(|name| name.to_string_lossy().starts_with("last_reserved")), "{leases:?}");
    }
}

/// Podman with its own storage, which is removed with it.
struct Podman {
    directory: PathBuf,
    networks: PathBuf,
}

impl Podman {
    fn new(lab: &Lab, networks: PathBuf) -> Podman {
        let directory = netns::directory(lab.tag()).join("podman");
        std::fs::create_dir_all(&directory).unwrap();
        let settings = format!(
            "[network]\nnetwork_backend = \"cni\"\nnetwork_config_dir = {networks:?}\ncni_plugin_dirs = [{:?}]\n\
             [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nruntime = \"runc\"\n",
            netns::directory(lab.tag()).join("plugins")
        );
        std::fs::write(directory.join("containers.conf"), settings).unwrap();
        Podman { directory, networks }
    }

    fn run(&self, arguments: &[&str], input: Option<&Path>) -> Result<String, String> {
        let input = input.map_or_else(Stdio::null, |file| std::fs::File::open(file).unwrap().into());
        let output = Command::new("podman")
            .env("CONTAINERS_CONF", self.directory.join("containers.conf"))
            .args(["--storage-driver", "vfs", "--root"])
            .arg(self.directory.join("root"))
            .arg("--runroot")
            .arg(self.directory.join("run"))
            .arg("--tmpdir")
            .arg(self.directory.join("tmp"))
            .args(arguments)
            .stdin(input)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    fn make_image(&self) {
        let (files, archive) = (shell(&self.directory), self.directory.join("image.tar"));
        let [files, archive] = [&files, &archive].map(|path| path.to_str().unwrap());
        netns::run("tar", &["-C", files, "-cf", archive, "."], "");
        self.run(&["import", "-", "shell"], Some(Path::new(archive))).unwrap();
    }
}

/// If a runtime cannot run a container without a network either, for example for lack of control groups, that is not
/// the plugin's fault.
fn skip(runtime: &str, why: &str) {
    println!("SKIPPED: {runtime} cannot run containers on this machine: {why}");
}

/// A container's files: only a static shell.
fn shell(directory: &Path) -> PathBuf {
    let files = directory.join("files");
    std::fs::create_dir_all(files.join("bin")).unwrap();
    std::fs::copy("/bin/busybox", files.join("bin/busybox")).unwrap();
    for name in ["sh", "sleep", "ping", "ip", "true"] {
        std::os::unix::fs::symlink("busybox", files.join("bin").join(name)).unwrap();
    }
    files
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.run(&["rm", "--force", "--all", "--time", "0"], None);
        let _ = std::fs::remove_dir_all(&self.networks);
    }
}

#[test]
#[ignore = "needs BIFROST_CNI_TOOLS"]
fn podman_runs_containers() {
    let lab = lab();
    let podman = Podman::new(&lab, configure(&lab, "0.4.0"));
    podman.make_image();
    // With low limits: if the tests run in a container, Podman's default limits cannot be set.
    let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"];
    let mut alone = vec!["run", "--rm", "--network", "none"];
    alone.extend(limits);
    alone.extend(["localhost/shell", "true"]);
    if let Err(why) = podman.run(&alone, None) {
        return skip("Podman", &why);
    }
    for name in ["one", "two"] {
        let mut arguments = vec!["run", "--detach", "--name", name, "--network", "pods", "--cap-add", "NET_RAW"];
        arguments.extend(limits);
        arguments.extend(["localhost/shell", "sleep", "600"]);
        podman.run(&arguments, None).unwrap();
    }
    let inspect = |name: &str, what: &str| podman.run(&["inspect", "--format", what, name], None).unwrap();
    let address = |name: &str| inspect(name, "{{.NetworkSettings.Networks.pods.IPAddress}}");
    let mac = inspect("one", "{{.NetworkSettings.Networks.pods.MacAddress}}");
    route(&lab.hosts[1], "host-a", &address("one"), &mac);
    for target in [address("two"), "10.0.0.2".to_owned()] {
        let pings = podman.run(&["exec", "one", "ping", "-c", "2", "-W", "2", &target], None).unwrap();
        assert!(pings.contains("2 packets received"), "{pings}");
    }
    assert_eq!(lab.hosts[0].client.ports().unwrap().len(), 2);
    // Containers keep their interfaces when the daemon crashes.
    let mut lab = lab;
    lab.hosts[0].crash();
    lab.hosts[0].start();
    let pings = podman.run(&["exec", "one", "ping", "-c", "2", "-W", "2", "10.0.0.2"], None).unwrap();
    assert!(pings.contains("2 packets received"), "{pings}");
    podman.run(&["rm", "--force", "--time", "0", "two"], None).unwrap();
    assert_eq!(lab.hosts[0].client.ports().unwrap().len(), 1);
    podman.run(&["rm", "--force", "--time", "0", "one"], None).unwrap();
    assert!(lab.hosts[0].client.ports().unwrap().is_empty());
    lab.hosts[0].stop();
}

/// containerd with its own storage. Dropping it ends the process.
struct Containerd {
    directory: PathBuf,
    child: Child,
}

impl Containerd {
    fn start(lab: &Lab) -> Containerd {
        let directory = netns::directory(lab.tag()).join("containerd");
        std::fs::create_dir_all(&directory).unwrap();
        let of = |name: &str| directory.join(name);
        let settings = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = {:?}\n",
            of("root"),
            of("state"),
            of("containerd.sock")
        );
        std::fs::write(of("config.toml"), settings).unwrap();
        let log = std::fs::File::create(of("log")).unwrap();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "containerd", "--config"])
            .arg(of("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let socket = of("containerd.sock");
        eventually(20.0, "containerd answers", || {
            Command::new("ctr").arg("--address").arg(&socket).arg("version").output().unwrap().status.success()
        });
        Containerd { directory, child }
    }

    /// Runs a program in a container on the networks of a directory. ctr searches networks and plugins in fixed paths,
    /// so it gets its own /etc and /opt.
    fn run(&self, networks: &Path, plugins: &Path, name: &str, program: &[&str]) -> Result<String, String> {
        self.ctr(networks, plugins, &["--cni"], name, program)
    }

    fn ctr(
        &self,
        networks: &Path,
        plugins: &Path,
        options: &[&str],
        name: &str,
        program: &[&str],
    ) -> Result<String, String> {
        let script = "mount -t tmpfs none /etc && mount -t tmpfs none /opt && mkdir /etc/cni /opt/cni && \
                      ln -s \"$1\" /etc/cni/net.d && ln -s \"$2\" /opt/cni/bin && shift 2 && exec \"$@\"";
        let output = Command::new("timeout")
            .args(["60", "unshare", "--mount", "sh", "-c", script, "sh"])
            .args([networks, plugins])
            .args(["ctr", "--address"])
            .arg(self.directory.join("containerd.sock"))
            .args(["run", "--rm"])
            .args(options)
            .arg("--rootfs")
            .arg(self.directory.join("files"))
            .arg(name)
            .args(program)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stdout) + &text(&output.stderr))
        }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // Shims outlive containerd, and so does a container that could not be attached.
        let socket = self.directory.join("containerd.sock");
        let ctr = || {
            let mut ctr = Command::new("ctr");
            ctr.arg("--address").arg(&socket).arg("tasks").stderr(Stdio::null());
            ctr
        };
        let tasks = ctr().args(["list", "--quiet"]).output().unwrap().stdout;
        for task in String::from_utf8_lossy(&tasks).lines() {
            let _ = ctr().args(["remove", "--force", task]).stdout(Stdio::null()).status();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs BIFROST_CNI_TOOLS"]
fn containerd_runs_containers() {
    let lab = lab();
    let networks = configure(&lab, "1.0.0");
    let plugins = netns::directory(lab.tag()).join("plugins");
    let containerd = Containerd::start(&lab);
    shell(&containerd.directory);
    if let Err(why) = containerd.ctr(&networks, &plugins, &[], "alone", &["/bin/true"]) {
        return skip("containerd", &why);
    }
    // host-local allocates addresses in order.
    for (name, address) in [("one", "10.0.0.10"), ("two", "10.0.0.11")] {
        route(&lab.hosts[1], "host-a", address, &format!("02:42:0a:00:00:{}", if name == "one" { "0a" } else { "0b" }));
        let pings =
            containerd.run(&networks, &plugins, name, &["/bin/ping", "-c", "2", "-W", "2", "10.0.0.2"]).unwrap();
        assert!(pings.contains("2 packets received"), "{pings}");
        assert!(lab.hosts[0].client.ports().unwrap().is_empty(), "the container has ended, and its port is removed");
    }
    // The runtime reports the error of the switch.
    let file = networks.join("10-pods.conflist");
    let network = std::fs::read_to_string(&file).unwrap().replace("\"vni\":100", "\"vni\":999");
    std::fs::write(&file, network).unwrap();
    let error = containerd.run(&networks, &plugins, "three", &["/bin/ip", "link"]).unwrap_err();
    assert!(error.contains("999"), "{error}");
}
