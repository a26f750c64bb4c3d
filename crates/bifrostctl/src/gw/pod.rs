//! `bifrostctl gw pod`: pods in containers of Podman. Which pods there are is what Podman and `bifrost-nicd` say; nothing else is kept.

mod autoscale;
mod gate;
mod handover;
mod migrate;
#[cfg(test)]
mod packaged;
mod scaler;
mod upgrade;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{ErrorKind, PipelineCommand, PipelinePod};
use bifrost_control::client::ClientError;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use self::autoscale::AutoscaleArgs;
use self::gate::Gate;
use self::upgrade::UpgradeArgs;
use super::show::get;
use super::template::{self, Choice, Template};
use super::{known, pipeline};
use crate::failure::Failure;
use crate::output::Output;
use crate::table::{Column, Number, Text, listing};

const DIRECTORY: &str = "/var/lib/bifrost/gw";
/// What marks our containers; its value is the pod's name.
const LABEL: &str = "bifrost.gw.pod";
/// What tells which image and template a pod was made of.
const LABEL_VERSION: &str = "bifrost.gw.version";
/// How long a pod may take until it is connected with the pipeline.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_NAME: usize = 31;
/// Pods of a service.
const MOST: u16 = 256;
/// Seconds that a container has to end by itself.
const STOP_SECONDS: &str = "2";

#[derive(Debug, Args)]
pub(crate) struct PodArgs {
    /// The program Podman
    #[arg(long, value_name = "PATH", global = true, default_value = "podman")]
    podman: PathBuf,
    /// Where each pod has a directory, with its configuration and its sockets
    #[arg(long, value_name = "PATH", global = true, default_value = DIRECTORY)]
    directory: PathBuf,
    #[command(subcommand)]
    command: PodCommand,
}

#[derive(Debug, Subcommand)]
enum PodCommand {
    /// Add a pod to the pipeline, start its container, and wait until they are connected
    Create(CreateArgs),
    /// Pods: their containers, and what the pipeline says of them
    List,
    /// Have COUNT pods of a service, named SERVICE-1, SERVICE-2 and so on: create those that are missing, or delete the last ones
    Scale(ScaleArgs),
    /// Have a pod withdraw what it announces by BGP, and wait until nothing comes to it any more; it goes on forwarding
    Drain(DrainArgs),
    /// Replace a pod by a new one without losing a packet: create the new one, watch it for a while, drain the old one, delete it
    ///
    /// Both announce the same addresses in the meantime. If the new pod does not announce what the old one does, or stops doing so while it is watched, it is deleted, and the old
    /// one stays as it was. Sessions of translation go on in the new pod, if it has the old one's pools.
    Migrate(MigrateArgs),
    /// Replace all pods of a service by new ones of another image or template, one after the other, without losing a packet
    ///
    /// Each is replaced as by `migrate`, and the new pod has the processors of the old one. Pods that are of this image and template already stay: given again after an
    /// error, the command goes on. The template needs one address more among its `links` than the service has pods.
    Upgrade(UpgradeArgs),
    /// Keep as many pods as the load of a service needs: create one when it is high for a while, drain and delete one when it is low
    ///
    /// The load is the mean share of their time that the workers of the pods are busy; a pod that drops packets for want of room counts as full. A pod goes only if the others
    /// stay below --high without it, and after each change the load is watched again from the start. It runs until it is ended, and prints what it does; what fails is tried again.
    Autoscale(AutoscaleArgs),
    /// Stop a pod's container, and take the pod out of the pipeline. Other pods lose nothing by it; what is under way in this one is lost
    Delete(DeleteArgs),
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// Its name: at most 31 of a-z, 0-9 and -
    name: String,
    /// What the service's pods have in common: the configuration of bifrost-gw, and a section [pod]
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// The processors of the container, of which its workers get the first ones, as in 2-3,6; by default all
    #[arg(long, value_name = "LIST")]
    cpus: Option<String>,
}

#[derive(Debug, Args)]
struct ScaleArgs {
    /// The service's name
    service: String,
    /// How many pods it is to have
    #[arg(value_parser = clap::value_parser!(u16).range(0..=i64::from(MOST)))]
    count: u16,
    /// What the service's pods have in common
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
}

#[derive(Debug, Args)]
struct DrainArgs {
    /// Its name
    name: String,
    /// Announce again
    #[arg(long)]
    undo: bool,
}

#[derive(Debug, Args)]
struct MigrateArgs {
    /// The old pod
    from: String,
    /// The new pod's name
    to: String,
    /// What both have in common
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// The processors of the new pod's container
    #[arg(long, value_name = "LIST")]
    cpus: Option<String>,
    #[command(flatten)]
    gate: Gate,
}

#[derive(Debug, Args)]
struct DeleteArgs {
    /// Its name
    name: String,
}

/// A pod, as Podman and the pipeline see it.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    name: String,
    /// As Podman calls it: `running`, `exited`, ...; nothing: there is no container.
    container: Option<String>,
    /// Of its image and template; nothing: the container has none.
    version: Option<String>,
    /// Nothing: the pipeline does not know the pod.
    pipeline: Option<PipelinePod>,
}

/// What `podman ps --format json` says of a container.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    state: String,
}

/// What was done.
#[derive(Debug, Default, Serialize)]
struct Done {
    created: Vec<Created>,
    drained: Vec<String>,
    announcing: Vec<String>,
    deleted: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Created {
    name: String,
    /// From the command until the pod was connected.
    took_ms: u64,
    /// Sessions of translation of the pod whose place it took; nothing: it had none to hand over.
    sessions: Option<u64>,
    /// Those of them that cannot go on in it.
    refused_sessions: u64,
}

pub(crate) fn run(args: PodArgs, nicd: Vec<PathBuf>, out: Output) -> Result<(), Failure> {
    let PodArgs { podman, directory, command } = args;
    let site = Site { podman, directory, nicd };
    let mut done = Done::default();
    match command {
        PodCommand::List => return out.print(&site.rows()?, |rows| table(rows)),
        PodCommand::Create(CreateArgs { name, template, cpus }) => {
            done.created.push(site.create(&name, &read(&template)?, cpus.as_deref(), false)?);
        }
        PodCommand::Scale(ScaleArgs { service, count, template }) => {
            check_name(&format!("{service}-{count}"))?;
            let template = read(&template)?;
            let all = site.rows()?;
            let names: Vec<&str> = all.iter().map(|row| row.name.as_str()).collect();
            let (missing, surplus) = to_scale(&service, count, &names);
            for name in missing {
                done.created.push(site.create(&name, &template, None, false)?);
            }
            for name in surplus {
                site.delete(&name)?;
                done.deleted.push(name);
            }
        }
        PodCommand::Drain(DrainArgs { name, undo: true }) => {
            site.announce(&name)?;
            done.announcing.push(name);
        }
        PodCommand::Drain(DrainArgs { name, undo: false }) => {
            site.drain(&name)?;
            done.drained.push(name);
        }
        PodCommand::Upgrade(upgrade) => done = site.upgrade(&upgrade)?,
        PodCommand::Autoscale(autoscale) => return site.autoscale(&autoscale, out),
        PodCommand::Migrate(MigrateArgs { from, to, template, cpus, gate }) => {
            done.created.push(site.migrate(&from, &to, &read(&template)?, cpus.as_deref(), &gate)?);
            done.drained.push(from.clone());
            done.deleted.push(from);
        }
        PodCommand::Delete(DeleteArgs { name }) => {
            site.delete(&name)?;
            done.deleted.push(name);
        }
    }
    out.print(&done, |done| {
        let created = done.created.iter().map(Created::text);
        let drained = done.drained.iter().map(|name| format!("{name} is drained: nothing comes any more"));
        let announcing = done.announcing.iter().map(|name| format!("{name} announces its addresses again"));
        let deleted = done.deleted.iter().map(|name| format!("{name} is deleted"));
        let lines: Vec<_> = created.chain(announcing).chain(drained).chain(deleted).collect();
        if lines.is_empty() { "nothing to do".to_owned() } else { lines.join("\n") }
    })
}

impl Created {
    fn text(&self) -> String {
        let Created { name, took_ms, sessions, refused_sessions } = self;
        let connected = format!("{name} is connected after {took_ms} ms");
        match (sessions, refused_sessions) {
            (None, _) => connected,
            (Some(sessions), 0) => format!("{connected}; {sessions} sessions of translation go on in it"),
            (Some(sessions), refused) => {
                format!("{connected}; {sessions} sessions of translation go on in it, and {refused} cannot")
            }
        }
    }
}

/// Where pods are.
struct Site {
    podman: PathBuf,
    directory: PathBuf,
    /// The pipelines, by their numbers in templates.
    nicd: Vec<PathBuf>,
}

impl Site {
    /// `drained`: it announces nothing until it is told to.
    fn create(&self, name: &str, template: &Template, cpus: Option<&str>, drained: bool) -> Result<Created, Failure> {
        let began = Instant::now();
        check_name(name)?;
        if self.rows()?.iter().any(|row| row.name == name) {
            return Err(failure(
                name,
                "there is a pod of this name",
                format!("`bifrostctl gw pod delete {name}` removes it"),
            ));
        }
        let processors = cpus.map_or_else(|| Ok(Vec::new()), template::processors);
        let mut processors = processors.map_err(|error| failure("--cpus", error, String::new()))?;
        processors.truncate(template.pod.cores.into());
        let last = template.last_pipeline();
        if last >= self.nicd.len() {
            let what = format!("there is no pipeline {last}: --nicd is given {} times", self.nicd.len());
            let hint = "give --nicd for each pipeline, in the order of their numbers".to_owned();
            return Err(failure("[[pod.networks]] pipeline", what, hint));
        }
        let pods = self.pods()?;
        let own: Vec<IpAddr> =
            pods.iter().flat_map(|pod| &pod.own).filter_map(|address| address.parse().ok()).collect();
        let links = template.free_links(&own).map_err(|link| {
            let place = if template.last_pipeline() == 0 && link == 0 {
                "[pod] links".to_owned()
            } else {
                format!("[[pod.networks]] {link}: links")
            };
            failure(&place, "pods have all of them", "add one to the template".to_owned())
        })?;
        let number = (1..=u16::MAX).find(|number| pods.iter().all(|pod| pod.number != *number));
        let number = number.ok_or_else(|| failure(name, "pods have all numbers", String::new()))?;
        let directory = self.directory.join(name);
        let version = self.version(template)?;
        let plan = template.plan(&Choice { name, number, links, processors, directory: &directory });
        let start = || {
            let configuration = if drained { template::drained(&plan.configuration) } else { None };
            write(&directory, configuration.as_ref().unwrap_or(&plan.configuration))?;
            for (pipeline, settings) in &plan.settings {
                self.ask(&self.nicd[*pipeline], &PipelineCommand::AddPod { settings: settings.clone() })?;
            }
            self.podman(&container(name, template, cpus, &directory, &version))?;
            // Podman's own time does not count.
            self.await_connected(name, Instant::now())?;
            // Only the first start of its container is one into a drained pod.
            if drained { write(&directory, &plan.configuration) } else { Ok(()) }
        };
        let took_ms = || began.elapsed().as_millis() as u64;
        match start() {
            Ok(()) => Ok(Created { name: name.to_owned(), took_ms: took_ms(), sessions: None, refused_sessions: 0 }),
            Err(error) => {
                // Nothing of it stays: what is wrong can be put right, and the command be given again.
                let _ = self.remove(name);
                Err(error)
            }
        }
    }

    fn await_connected(&self, name: &str, began: Instant) -> Result<(), Failure> {
        loop {
            let pods = self.pods()?;
            let pod = pods.iter().find(|pod| pod.name == name);
            if pod.is_some_and(|pod| pod.interfaces_up.iter().all(|up| *up)) {
                return Ok(());
            }
            let container = self.containers()?.remove(name).unwrap_or_default();
            let ended = ["exited", "stopped", "dead"].contains(&container.state.as_str());
            if ended || began.elapsed() > PATIENCE {
                let logs = self.podman(&["logs", "--tail", "5", &container_name(name)].map(str::to_owned));
                let what = if ended {
                    "its container has ended".to_owned()
                } else {
                    format!("not connected within {PATIENCE:?}")
                };
                return Err(failure(name, what, format!("it said last: {}", logs.unwrap_or_default())));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn delete(&self, name: &str) -> Result<(), Failure> {
        self.check_exists(name)?;
        self.remove(name)
    }

    /// Removes what there is of a pod.
    fn remove(&self, name: &str) -> Result<(), Failure> {
        if self.containers()?.contains_key(name) {
            let container = container_name(name);
            self.podman(&["rm", "--force", "--time", STOP_SECONDS, &container].map(str::to_owned))?;
        }
        let mut result = Ok(());
        for nicd in &self.nicd {
            match self.ask(nicd, &PipelineCommand::RemovePod { pod: name.to_owned() }) {
                Err(Failure::Client(ClientError::Api(error))) if error.kind == ErrorKind::NotFound => {}
                // The others are rid of it anyway.
                other => result = result.and(other),
            }
        }
        result?;
        let directory = self.directory.join(name);
        match fs::remove_dir_all(&directory) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Failure::File { path: directory, source }),
            _ => Ok(()),
        }
    }

    /// All pods that are in a container, or were added to the pipeline by this command.
    fn rows(&self) -> Result<Vec<Row>, Failure> {
        Ok(join(self.containers()?, self.pods()?))
    }

    /// The pods of all pipelines.
    fn pods(&self) -> Result<Vec<PipelinePod>, Failure> {
        let of_each = self.nicd.iter().map(|nicd| Ok(pipeline(nicd)?.pods));
        Ok(merge(of_each.collect::<Result<_, Failure>>()?))
    }

    fn ask(&self, nicd: &Path, command: &PipelineCommand) -> Result<(), Failure> {
        let asked = Client::new(nicd)?.command_pipeline(command);
        asked.map(drop).map_err(|error| known("bifrost-nicd", nicd, error))
    }

    /// Our containers, by the pods' names.
    fn containers(&self) -> Result<BTreeMap<String, Container>, Failure> {
        let list = ["ps", "--all", "--filter", &format!("label={LABEL}"), "--format", "json"].map(str::to_owned);
        let list: Vec<Container> = serde_json::from_str(&self.podman(&list)?)?;
        let named = |mut container: Container| Some((container.labels.remove(LABEL)?, container));
        Ok(list.into_iter().filter_map(named).collect())
    }

    fn podman(&self, arguments: &[String]) -> Result<String, Failure> {
        let shown = self.podman.display().to_string();
        let output = Command::new(&self.podman).args(arguments).stdin(Stdio::null()).output().map_err(|error| {
            failure(&shown, format!("cannot be run: {error}"), "install it, or name it with --podman".to_owned())
        })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            // What a container has logged comes as it was written: to standard error.
            let logs = arguments.first().is_some_and(|command| command == "logs");
            return Ok(text(if logs { &output.stderr } else { &output.stdout }));
        }
        let errors = text(&output.stderr);
        let no_image = ["image not known", "no such image", "did not resolve to an alias"];
        let hint = match no_image.iter().any(|text| errors.contains(text)) {
            true => "/usr/share/bifrost/gateway/gw-image.sh, or `make gw-image` of the source, builds it".to_owned(),
            false => format!("the command was: {shown} {}", arguments.join(" ")),
        };
        Err(failure(&shown, errors, hint))
    }
}

/// The arguments with which Podman starts a pod's container.
fn container(name: &str, template: &Template, cpus: Option<&str>, directory: &Path, version: &str) -> Vec<String> {
    let directory = directory.display();
    let mut all = [
        "run",
        "--detach",
        "--pull=never",
        // A pod that ends comes back, and connects again.
        "--restart=always",
        // Packets come and go over memif alone.
        "--network=none",
        "--read-only",
        "--cap-drop=all",
        "--security-opt=no-new-privileges",
        "--pids-limit=1024",
        "--env=NO_COLOR=1",
    ]
    .map(str::to_owned)
    .to_vec();
    all.extend([format!("--name={}", container_name(name)), format!("--label={LABEL}={name}")]);
    all.push(upgrade::label(version));
    all.push(format!("--volume={directory}:{directory}"));
    all.extend(cpus.map(|cpus| format!("--cpuset-cpus={cpus}")));
    // Memory that is swapped out is as good as none.
    all.extend(
        template
            .pod
            .memory_mib
            .into_iter()
            .flat_map(|mib| [format!("--memory={mib}m"), format!("--memory-swap={mib}m")]),
    );
    all.extend([template.pod.image.clone(), "--config".to_owned(), format!("{directory}/gw.toml")]);
    all
}

fn container_name(pod: &str) -> String {
    format!("bifrost-gw-{pod}")
}

/// A pod's directory, with its configuration, for root alone.
fn write(directory: &Path, configuration: &str) -> Result<(), Failure> {
    let path = directory.join("gw.toml");
    let write = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        io::Write::write_all(&mut file, configuration.as_bytes())
    };
    write().map_err(|source| Failure::File { path: path.clone(), source })
}

fn read(path: &Path) -> Result<Template, Failure> {
    let text = fs::read_to_string(path).map_err(|source| Failure::ReadFile { path: path.to_owned(), source })?;
    let template = Template::parse(&text);
    template.map_err(|error| failure(&path.display().to_string(), error, String::new()))
}

/// Which pods of a service are to be created, and which deleted, so that there are `count`; `names`: all pods.
fn to_scale(service: &str, count: u16, names: &[&str]) -> (Vec<String>, Vec<String>) {
    let mut there: Vec<u32> = names.iter().filter_map(|name| of_service(service, name)).collect();
    there.sort_unstable();
    let name = |number: u32| format!("{service}-{number}");
    let (have, count) = (there.len(), usize::from(count));
    let free = (1..).filter(|number| !there.contains(number));
    let missing = free.take(count.saturating_sub(have)).map(name).collect();
    let surplus = there.iter().rev().take(have.saturating_sub(count)).map(|number| name(*number)).collect();
    (missing, surplus)
}

/// The number of a pod of a service.
fn of_service(service: &str, name: &str) -> Option<u32> {
    name.strip_prefix(service)?.strip_prefix('-')?.parse().ok()
}

/// The pods of several pipelines: one that is behind several is one pod, with all of its interfaces and the sums of its counters.
fn merge(pipelines: Vec<Vec<PipelinePod>>) -> Vec<PipelinePod> {
    let mut all: Vec<PipelinePod> = Vec::new();
    for pod in pipelines.into_iter().flatten() {
        let Some(known) = all.iter_mut().find(|known| known.name == pod.name) else {
            all.push(pod);
            continue;
        };
        known.interfaces_up.extend(pod.interfaces_up);
        let more: Vec<String> = pod.own.into_iter().filter(|own| !known.own.contains(own)).collect();
        known.own.extend(more);
        known.queues.extend(pod.queues);
        for (sums, counts) in
            [(&mut known.counters, pod.counters), (&mut known.order, pod.order), (&mut known.limiter, pod.limiter)]
        {
            counts.into_iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
        }
    }
    all
}

/// Containers beside what the pipeline has.
fn join(mut containers: BTreeMap<String, Container>, pods: Vec<PipelinePod>) -> Vec<Row> {
    let row = |name: String, container: Option<Container>, pipeline| {
        let (container, version) =
            container.map(|mut container| (container.state, container.labels.remove(LABEL_VERSION))).unzip();
        Row { name, container, version: version.flatten(), pipeline }
    };
    let mut rows: Vec<Row> =
        pods.into_iter().map(|pod| row(pod.name.clone(), containers.remove(&pod.name), Some(pod))).collect();
    rows.extend(containers.into_iter().map(|(name, container)| row(name, Some(container), None)));
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}

fn table(rows: &[Row]) -> String {
    const COLUMNS: [Column; 7] = [
        Text("POD"),
        Text("CONTAINER"),
        Text("INTERFACES"),
        Text("LINK ADDRESS"),
        Number("NUMBER"),
        Number("DELIVERED"),
        Number("SENT"),
    ];
    let cells = rows.iter().map(|row| {
        let container = row.container.clone().unwrap_or_else(|| "none".to_owned());
        let Some(pod) = &row.pipeline else {
            let rest = ["not in the pipeline", "-", "-", "-", "-"].map(str::to_owned);
            return [row.name.clone(), container].into_iter().chain(rest).collect();
        };
        let up = pod.interfaces_up.iter().filter(|up| **up).count();
        vec![
            row.name.clone(),
            container,
            format!("{up} of {} up", pod.interfaces_up.len()),
            pod.own.first().cloned().unwrap_or_else(|| "-".to_owned()),
            pod.number.to_string(),
            get(&pod.counters, "delivered_packets").to_string(),
            get(&pod.counters, "sent_packets").to_string(),
        ]
    });
    listing(&COLUMNS, cells, "no pods")
}

/// The pipeline accepts no other names; they are parts of paths and names of containers, too.
fn check_name(name: &str) -> Result<(), Failure> {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(good) && !name.starts_with('-') {
        return Ok(());
    }
    Err(failure(name, "not a pod's name", format!("use 1 to {LONGEST_NAME} of a-z, 0-9 and -")))
}

fn failure(location: &str, what: impl Into<String>, hint: String) -> Failure {
    Failure::Pod { what: what.into(), location: location.to_owned(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_gets_as_many_pods_as_it_is_to_have() {
        let names = ["vpc-1", "vpc-3", "vpc-x", "other-2", "vpc", "vpc-10"];
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(to_scale("vpc", 5, &names), (owned(&["vpc-2", "vpc-4"]), vec![]));
        assert_eq!(to_scale("vpc", 3, &names), (vec![], vec![]));
        assert_eq!(to_scale("vpc", 1, &names), (vec![], owned(&["vpc-10", "vpc-3"])));
        assert_eq!(to_scale("new", 2, &names), (owned(&["new-1", "new-2"]), vec![]));
    }

    #[test]
    fn what_podman_and_the_pipeline_say() {
        let json = r#"[{"Id": "1", "Labels": {"bifrost.gw.pod": "b", "bifrost.gw.version": "7"}, "State": "running"},
                       {"Labels": {"bifrost.gw.pod": "c"}, "State": "exited"}]"#;
        let containers: Vec<Container> = serde_json::from_str(json).unwrap();
        let named = containers.into_iter().map(|mut c| (c.labels.remove(LABEL).unwrap(), c));
        let named: BTreeMap<_, _> = named.collect();
        let own = vec!["10.1.0.11".to_owned()];
        let pod =
            |name: &str| PipelinePod { name: name.to_owned(), number: 7, own: own.clone(), ..PipelinePod::default() };
        let rows = join(named, vec![pod("b"), pod("a")]);
        let versions: Vec<_> = rows.iter().map(|row| row.version.as_deref()).collect();
        assert_eq!(versions, [None, Some("7"), None]);
        let text = table(&rows);
        let words: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["a", "none", "0", "of", "0", "up", "10.1.0.11", "7", "0", "0"]);
        assert_eq!(words[1][..2], ["b", "running"]);
        assert_eq!(words[2][..3], ["c", "exited", "not"]);
    }

    #[test]
    fn a_pod_behind_two_pipelines_is_one() {
        let pod = |name: &str, own: &str, up: bool, sent: u64| PipelinePod {
            name: name.to_owned(),
            own: vec![own.to_owned(), "10.0.0.1".to_owned()],
            interfaces_up: vec![up],
            counters: [("sent_packets".into(), sent)].into_iter().collect(),
            ..PipelinePod::default()
        };
        let first = vec![pod("a", "10.1.0.11", true, 3), pod("b", "10.1.0.12", true, 7)];
        let all = merge(vec![first, vec![pod("a", "10.1.1.11", false, 4)]]);
        assert_eq!(all.iter().map(|pod| &*pod.name).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(all[0].own, ["10.1.0.11", "10.0.0.1", "10.1.1.11"]);
        assert_eq!((&all[0].interfaces_up[..], get(&all[0].counters, "sent_packets")), (&[true, false][..], 7));
    }

    #[test]
    fn containers_have_no_more_than_they_need() {
        let template =
            Template::parse("[pod]\ncores = 1\nmemory_mib = 64\nlinks = [\"10.1.0.11\"]\n[gateway]\n").unwrap();
        let all = container("a", &template, Some("1"), Path::new("/pods/a"), "7").join(" ");
        for part in [
            "--network=none",
            "--cap-drop=all",
            "--read-only",
            "--cpuset-cpus=1",
            "--memory=64m",
            "--volume=/pods/a:/pods/a",
            "--label=bifrost.gw.pod=a",
            "--label=bifrost.gw.version=7",
        ] {
            assert!(all.contains(part), "{part}: {all}");
        }
        assert!(all.ends_with(" localhost/bifrost-gw --config /pods/a/gw.toml"));
        for bad in ["", "-a", "A", "a/b", "..", &"a".repeat(32)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
