//! `cni`: how long a container runtime waits for a container's network: `bifrost-cni` compared with the standard
//! `bridge` plugin, both with addresses from `host-local`.
//!
//! The lab plays the runtime: it runs the plugins as the specification requires, one container at a time, alternating
//! between the plugins. With the switch, the container is attached when the plugin returns; with the bridge, when the
//! veth pair exists.

use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::progress::Progress;
use crate::report::{Table, factor, number};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, distinct, median_of, percentile};
use crate::topology::Host;

/// The directory of Debian's plugins.
const PLUGINS: &str = "/usr/lib/cni";
/// The containers' VPC.
const VNI: u32 = 301;
/// Bound for the ratio of bifrost-cni's time to that of `bridge`.
const MOST: f64 = 1.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Cni;

/// The plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plugin {
    /// `bifrost-cni`, with a daemon.
    Bifrost,
    /// A veth pair and the kernel's bridge.
    Bridge,
}

impl Plugin {
    const ALL: [Plugin; 2] = [Plugin::Bifrost, Plugin::Bridge];
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Plugin::Bifrost => "bifrost",
            Plugin::Bridge => "bridge",
        })
    }
}

/// The result for one container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The plugin.
    #[serde(rename = "mode")]
    pub plugin: Plugin,
    /// Containers that the plugin had attached before and that stayed.
    pub standing: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of ADD, from the plugin's start to its end, ms.
    pub add_ms: f64,
    /// Duration of DEL, ms.
    pub del_ms: f64,
}

impl Experiment for Cni {
    fn name(&self) -> &'static str {
        "cni"
    }

    fn summary(&self) -> &'static str {
        "How long a container runtime waits for a container's network, compared with the standard bridge plugin"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.options.repetitions.unwrap_or(if lab.options.quick { 30 } else { 200 });
        let standing: &[u32] = if lab.options.quick { &[0, 20] } else { &[0, 100] };
        let mut progress = Progress::new(standing.len() as u64);
        let mut rows = Vec::new();
        for &standing in standing {
            progress.begin(&format!("{standing} containers before, then {repetitions}, one by one"));
            let vpc = format!("[[vpc]]\nvni = {VNI}\nreliability = \"off\"\n");
            let settings = Settings { more: vec![vpc], ..lab.settings() };
            let mut network = lab.network_with(Mode::Off, &format!("cni-{standing}"), settings)?;
            let runtime = Runtime {
                host: &network.topology.hosts[0],
                socket: network.overlay.daemons[0].remote().socket().to_owned(),
                directory: network.directory().to_owned(),
                plugin: lab.binaries.cni()?.to_owned(),
            };
            let namespace = |name: &str| Namespace::create(format!("{}-{standing}-{name}", lab.run.id()));
            let mut others = Vec::new();
            for plugin in Plugin::ALL {
                for n in 0..standing {
                    let other = namespace(&format!("{plugin}s{n}"))?;
                    runtime.call(plugin, "ADD", &other)?;
                    others.push((plugin, other));
                }
            }
            for repetition in 0..repetitions {
                interrupt::check()?;
                let mut turns = Plugin::ALL;
                turns.rotate_left(repetition as usize % 2);
                for plugin in turns {
                    let container = namespace(&format!("{plugin}{repetition}"))?;
                    let add_ms = runtime.call(plugin, "ADD", &container)?;
                    let del_ms = runtime.call(plugin, "DEL", &container)?;
                    rows.push(Row { plugin, standing, repetition, add_ms, del_ms });
                }
            }
            for (plugin, other) in &others {
                runtime.call(*plugin, "DEL", other)?;
            }
            let of = |plugin| number(p50(&rows, plugin, standing, |row| row.add_ms).unwrap_or_default());
            let [ours, theirs] = Plugin::ALL.map(of);
            progress.end(&format!("{standing:>4} containers before: ADD {ours} ms, bridge {theirs} ms"));
            network.check()?;
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = "Containers are attached (ADD) and detached (DEL) one after the other, alternating between the \
                        plugins. Times are from the start of the plugin's process to its end; both plugins get an \
                        address from `host-local`. `before`: containers that were attached before and stayed.\n\n"
            .to_owned();
        let mut table =
            Table::new(&["before", "plugin", "ADD P50 ms", "P99 ms", "of bridge's P50", "DEL P50 ms", "P99 ms"]);
        for standing in distinct(&rows, |row| row.standing) {
            for plugin in Plugin::ALL {
                let of = |field: fn(&Row) -> f64| -> Vec<f64> { some(&rows, plugin, standing).map(field).collect() };
                let (add, del) = (of(|row| row.add_ms), of(|row| row.del_ms));
                let middle = |plugin| p50(&rows, plugin, standing, |row| row.add_ms).unwrap_or(f64::NAN);
                table.row(vec![
                    standing.to_string(),
                    plugin.to_string(),
                    number(percentile(&add, 50.0)),
                    number(percentile(&add, 99.0)),
                    factor(middle(plugin), middle(Plugin::Bridge)),
                    number(percentile(&del, 50.0)),
                    number(percentile(&del, 99.0)),
                ]);
            }
        }
        text += &table.render();
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let standing = distinct(&rows, |row| row.standing);
        let kinds = [(plot::Series::on("bifrost"), Plugin::Bifrost), (plot::Series::off("bridge"), Plugin::Bridge)];
        let x = ("containers before", standing.as_slice());
        let panel = Panel::over("ADD", x, ("ms", false), &kinds, |plugin, standing| {
            Spread::of(some(&rows, plugin, *standing).map(|row| row.add_ms))
        });
        Ok(vec![plot::draw(&directory.join("cni.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut standing = distinct(&rows, |row| row.standing);
        if standing.is_empty() {
            standing.push(0);
        }
        let bar = |standing| {
            let of = |plugin| p50(&rows, plugin, standing, |row: &Row| row.add_ms);
            let measured = of(Plugin::Bifrost).zip(of(Plugin::Bridge)).map(|(ours, theirs)| ours / theirs);
            let name = format!("P50 of ADD with {standing} containers there, of that of the bridge plugin");
            Bar::new(name, measured, Sense::AtMost, MOST, "x")
        };
        Ok(standing.into_iter().map(bar).collect())
    }
}

/// The environment that plugins run in.
struct Runtime<'a> {
    host: &'a Host,
    /// The control socket of the host's daemon.
    socket: PathBuf,
    /// The directory where `host-local` stores allocated addresses.
    directory: PathBuf,
    /// `bifrost-cni`.
    plugin: PathBuf,
}

impl Runtime<'_> {
    /// Runs a plugin on the host and returns how long it took, ms.
    fn call(&self, plugin: Plugin, command: &str, container: &Namespace) -> Result<f64> {
        let network = self.network(plugin).to_string();
        let program = match plugin {
            Plugin::Bifrost => self.plugin.clone(),
            Plugin::Bridge => Path::new(PLUGINS).join("bridge"),
        };
        let mut process = Command::new(&program);
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container.name())
            .env("CNI_NETNS", format!("/run/netns/{}", container.name()))
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", PLUGINS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let (took, output) = self.host.namespace.enter(move || {
            let began = Instant::now();
            let mut child = process.spawn().with_context(|| format!("starting {}", program.display()))?;
            if let Some(mut stdin) = child.stdin.take() {
                // A plugin that does not read its input reports the error itself.
                let _ = stdin.write_all(network.as_bytes());
            }
            let output = child.wait_with_output()?;
            Ok((began.elapsed(), output))
        })?;
        if !output.status.success() {
            bail!("{command} with the plugin {plugin} failed: {}", String::from_utf8_lossy(&output.stdout));
        }
        Ok(took.as_secs_f64() * 1e3)
    }

    fn network(&self, plugin: Plugin) -> Value {
        let mut network = match plugin {
            Plugin::Bifrost => json!({"type": "bifrost-cni", "vni": VNI, "socket": self.socket}),
            Plugin::Bridge => json!({"type": "bridge", "bridge": "cni0", "isGateway": true}),
        };
        network["cniVersion"] = "1.0.0".into();
        network["name"] = plugin.to_string().into();
        network["ipam"] = json!({
            "type": "host-local", "dataDir": self.directory.join("addresses"),
            "ranges": [[{"subnet": "10.3.0.0/16", "gateway": "10.3.0.1"}]], "routes": [{"dst": "0.0.0.0/0"}],
        });
        network
    }
}

fn some(rows: &[Row], plugin: Plugin, standing: u32) -> impl Iterator<Item = &Row> + Clone {
    rows.iter().filter(move |row| row.plugin == plugin && row.standing == standing)
}

/// The median; `None` if it was not measured.
fn p50(rows: &[Row], plugin: Plugin, standing: u32, field: fn(&Row) -> f64) -> Option<f64> {
    median_of(some(rows, plugin, standing).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(ours: f64, theirs: f64) -> Vec<Value> {
        let row = |plugin, add_ms| Row { plugin, standing: 0, repetition: 0, add_ms, del_ms: 1.0 };
        to_values(&[row(Plugin::Bifrost, ours), row(Plugin::Bridge, theirs)]).unwrap()
    }

    #[test]
    fn the_bar_can_fail() {
        let passes = |rows: &[Value]| Cni.bars(rows).unwrap().iter().all(Bar::passes);
        assert!(passes(&rows(9.0, 10.0)));
        assert!(!passes(&rows(11.0, 10.0)));
        assert!(!passes(&[]));
    }

    #[test]
    fn the_report_compares_with_the_bridge() {
        let report = Cni.report(&rows(5.0, 10.0)).unwrap();
        assert!(report.contains("0.50x"), "{report}");
    }
}
