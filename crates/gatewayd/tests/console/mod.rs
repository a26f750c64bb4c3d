//! The console, with a pipeline and a pod that forward packets.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::world::{Options, World, in_namespace};

struct Console {
    program: Child,
    address: SocketAddr,
}

impl Console {
    /// Starts a console that finds the world's pod in `directory`, where its control socket is.
    fn start(directory: &Path, name: &str, arguments: &[&str]) -> Console {
        let log = directory.join(format!("console-{name}.log"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_bifrost-gw-console"));
        command.args(["--listen", "127.0.0.1:0", "--interval", "1", "--name", name]).args(arguments);
        command.arg("--nicd").arg(directory.join("nicd.sock")).arg("--pods").arg(directory).env("NO_COLOR", "1");
        let program = command.stdin(Stdio::null()).stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let address = loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some((_, rest)) = text.split_once("http://")
                && let Some((address, _)) = rest.split_once('/')
            {
                break address.parse().unwrap();
            }
            assert!(Instant::now() < deadline, "the console is not ready\n{text}");
            std::thread::sleep(Duration::from_millis(10));
        };
        Console { program, address }
    }

    fn servers(&self) -> Vec<Value> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        write!(stream, "GET /v1/servers HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// A world and two consoles for it. The second console asks the first one, and another one that does not exist.
fn with_consoles(test: impl FnOnce(World, Console, Console) + Send + 'static) {
    in_namespace(move || {
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let world = World::start(&Options::default());
        let directory = world.path("");
        symlink(&directory, world.path("vpc")).unwrap();
        let one = Console::start(&directory, "gw-1", &[]);
        let other = format!("http://{}", one.address);
        let two = Console::start(&directory, "gw-2", &["--server", &other, "--server", "http://127.0.0.1:1"]);
        test(world, one, two);
    });
}

/// Sends packets until a sample of all servers meets the condition.
fn sends_until(world: &mut World, console: &Console, mut holds: impl FnMut(&[Value]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        world.exchange(2_000, 10, |_, _| {});
        let servers = console.servers();
        if holds(&servers) {
            return;
        }
        assert!(Instant::now() < deadline, "{servers:#?}");
    }
}

#[test]
fn the_console_shows_the_pods_of_all_servers_and_their_load() {
    with_consoles(|mut world, _one, two| {
        sends_until(&mut world, &two, |servers| {
            let [second, first, gone] = servers else { panic!("{servers:?}") };
            assert_eq!((&second["name"], &first["name"]), (&"gw-2".into(), &"gw-1".into()));
            assert_eq!(gone["name"], "http://127.0.0.1:1");
            assert!(gone["error"].as_str().unwrap().contains("cannot connect"), "{gone}");
            [second, first].into_iter().all(|server| {
                let latest = |line: &str| {
                    let line = server["history"]["pods"]["vpc"][line].as_array();
                    line.and_then(|line| line.last()).and_then(Value::as_f64).unwrap_or(0.0)
                };
                let cores = server["history"]["cores_percent"]["vpc"].as_array().map_or(0, Vec::len);
                latest("arrived_pps") > 100.0 && latest("busiest_percent") > 0.0 && cores == 2
            })
        });
        // The console reports a pod that is gone.
        world.kill_pod();
        let deadline = Instant::now() + Duration::from_secs(20);
        while two.servers()[0]["pod_errors"]["vpc"].is_null() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

#[test]
fn alerts_and_dashboards_ask_for_metrics_that_there_are() {
    in_namespace(|| {
        let world = World::start(&Options::default());
        let names: Vec<String> = ["nicd.sock", "gw.sock"]
            .iter()
            .flat_map(|socket| {
                let mut stream = UnixStream::connect(world.path(socket)).unwrap();
                write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                let name = |line: &str| line.split([' ', '{']).next().map(str::to_owned);
                text.lines().filter_map(name).collect::<Vec<_>>()
            })
            .collect();
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
        let mut asked = 0;
        for file in ["prometheus/bifrost.rules.yml", "grafana/bifrost-gateway.json"] {
            let text = std::fs::read_to_string(packaging.join(file)).unwrap();
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let is_ours = |word: &&str| word.starts_with("bifrost_nicd_") || word.starts_with("bifrost_gw_");
            // Metrics of top tenants exist only after some tenants have sent much.
            for word in words.filter(is_ours).filter(|word| !word.ends_with("_top_tenant_percent")) {
                asked += 1;
                assert!(names.iter().any(|name| name == word), "{file}: {word}\n{names:?}");
            }
        }
        assert!(asked > 20, "{asked}");
    });
}

/// `BIFROST_BROWSER` is a Chromium. With `BIFROST_SCREENSHOTS=DIRECTORY`, the test stores pictures of the pages there.
#[test]
#[ignore = "needs BIFROST_BROWSER"]
fn a_browser_shows_the_gateway() {
    let browser = std::env::var("BIFROST_BROWSER").expect("BIFROST_BROWSER: the path of chromium");
    let pictures = std::env::var("BIFROST_SCREENSHOTS").ok();
    with_consoles(move |mut world, _one, two| {
        let mut samples = 0;
        sends_until(&mut world, &two, |servers| {
            samples = servers[0]["history"]["times_ms"].as_array().map_or(0, Vec::len);
            samples > 8
        });
        let profile = world.path("browser");
        let show = |page: &str, name: &str, expected: &[&str]| {
            let run = |argument: &str| {
                let mut command = Command::new(&browser);
                command.args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]);
                command.args(["--virtual-time-budget=5000", argument]);
                command.arg(format!("--user-data-dir={}", profile.display()));
                let output = command.arg(format!("http://{}/{page}", two.address)).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            if let Some(to) = &pictures {
                run(&format!("--screenshot={to}/{name}"));
            }
            let dom = run("--dump-dom");
            for text in expected {
                assert!(dom.contains(text), "{page}: {text:?} is missing\n{dom}");
            }
        };
        show("", "gw-overview.png", &["gw-1/vpc", "gw-2/vpc", "cannot connect", "Servers (3)", "PLB"]);
        show("#server/gw-1", "gw-server.png", &["dispatch", "ns a packet"]);
        show("#pod/gw-2/vpc", "gw-pod.png", &["The last hour", "10.0.0.1", "arrived_packets", "Order queues"]);
        show("#tenants", "gw-tenants.png", &["pod/gw-1/vpc"]);
    });
}
