//! A network of many hosts: what it is to be, and what its hosts have. It talks with `bifrost-relay`.

mod certificate;
mod file;
mod remote;
mod view;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::client::ClientError;
use bifrost_intent::api::{
    Applied, Certified, ChangedObject, Enroll, Enrolled, HostProblem, HostStatus, MAX_WAIT_MS, OPENAPI, ObjectEntry,
    Objects, ObjectsQuery, Status, TOKEN_S, Waited, Why, schema,
};
use bifrost_intent::{Batch, Change, Key, Kind, MAX_CHANGES, Op, UPLINK};
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::objects::value_of;
use crate::output::Output;

pub(crate) const EXAMPLES: &str = "\
Objects have keys: host/NAME, project/NAME, and KIND/PROJECT/NAME with the kinds outside_grant, vpc, subnet, address_set, security_group, port,
peering, load_balancer, nat_gateway, floating_ip, route_table, mirror and flow_log.
Values are written as in bifrostd's configuration file; a list is written with commas.

Examples: two hosts, a network, and a port of a container on each
  bifrostctl fleet add host/h1 addresses=192.0.2.1
  bifrostctl fleet add host/h2 addresses=192.0.2.2
  bifrostctl fleet add vpc/demo/net && bifrostctl fleet add subnet/demo/a vpc=net prefix=10.0.0.0/24
  bifrostctl fleet add port/demo/web subnets=a host=h1 netns=web
  bifrostctl fleet add port/demo/db subnets=a host=h2 netns=db --wait 10

  bifrostctl fleet add load_balancer/demo/lb subnet=a port=80 'backends=[{guest=\"web\",port=8080}]'

  bifrostctl fleet add flow_log/demo/audit vpc=net collector=192.0.2.9:4739 record=rejected

  bifrostctl fleet apply -f network.yaml --wait 10     the objects of the file are to be as it says
  bifrostctl fleet diff -f network.yaml                what that would change
  bifrostctl fleet host enroll h3                      a token, for the first certificate of a host
  bifrostctl fleet why port/demo/web                   which hosts need it, and whether they have it
  bifrostctl fleet hosts                               who is connected, and has everything
  bifrostctl fleet delete port/demo/web";

const FILE_HELP: &str = "\
A file is YAML or JSON: documents, each an object or a list of them, with its key and what it says:

  key: vpc/demo/net
  ---
  key: subnet/demo/a
  vpc: net
  prefix: 10.0.0.0/24";

/// Lists, besides those of a host's objects.
const LISTS: [&str; 3] = ["subnets", "vpcs", "guests"];
/// How long the relay may take for an answer, beyond what it was asked to wait.
const ANSWER: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct FleetArgs {
    #[command(flatten)]
    relay: remote::RelayArgs,
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    /// The relay: its store, how many objects and hosts there are, and what it does not understand
    Status,
    /// Objects: all, those of a kind, those of a project, or one
    Get {
        /// A kind, such as port, or a key, such as port/demo/web
        what: Option<String>,
        /// Only those of this project
        #[arg(long, value_name = "NAME")]
        project: Option<String>,
    },
    /// Add one; refused if there is one of that key
    Add(ChangeArgs),
    /// Change what is named, and leave the rest of the object as it is; `KEY=` takes a key out
    Set(ChangeArgs),
    /// Delete some, all or none
    Delete {
        /// Their keys
        #[arg(required = true)]
        keys: Vec<Key>,
        #[command(flatten)]
        how: How,
    },
    /// Have objects as a file says; what it does not name stays
    #[command(after_help = FILE_HELP)]
    Apply {
        /// The file; `-` is standard input
        #[arg(long, short, value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        how: How,
    },
    /// What `apply` would change
    #[command(after_help = FILE_HELP)]
    Diff {
        /// The file; `-` is standard input
        #[arg(long, short, value_name = "FILE")]
        file: PathBuf,
    },
    /// Hosts: whether their agents are connected, what is in force there, and what is refused
    Hosts,
    /// One host
    #[command(subcommand)]
    Host(HostCommand),
    /// Issue a certificate with which an operator calls the relay's API from another machine
    #[command(after_help = certificate::EXAMPLES)]
    Certificate(certificate::CertificateArgs),
    /// The JSON Schema of files for `apply`, for editors and checks; it asks no relay
    Schema {
        /// The relay's whole API, as OpenAPI 3.1
        #[arg(long)]
        api: bool,
    },
    /// Which hosts need an object, why, and whether they have it
    Why {
        /// Its key
        key: Key,
    },
}

#[derive(Debug, Subcommand)]
enum HostCommand {
    /// Make a token with which a host gets its first certificate, in place of an earlier one
    #[command(after_help = "The relay needs --ca-key and --enroll. On the host, in the environment of bifrost-agent:
  BIFROST_IDENTITY=/var/lib/bifrost-agent BIFROST_ENROLL=https://RELAY:4792 BIFROST_TOKEN=...")]
    Enroll {
        /// Its name; `bifrostctl fleet add host/NAME addresses=...` makes it known
        name: String,
        /// How long the token is valid, seconds
        #[arg(long, value_name = "SECONDS", default_value_t = TOKEN_S)]
        ttl: u64,
    },
}

#[derive(Debug, Args)]
struct ChangeArgs {
    /// Its key
    key: Key,
    /// What it says
    #[arg(value_name = "KEY=VALUE")]
    pairs: Vec<String>,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, Args)]
struct How {
    /// Wait until the hosts that need it have the change, for at most SECONDS
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
}

/// `bifrostctl fleet`
pub(crate) fn run(args: FleetArgs, out: Output) -> Result<(), Failure> {
    let relay = Relay(args.relay.client()?);
    match args.command {
        FleetCommand::Schema { api } => {
            let schema = if api { serde_json::from_str(OPENAPI) } else { schema("Document") };
            let schema: Value = schema.map_err(|e| usage("schema", e.to_string()))?;
            out.print(&schema, |schema| format!("{schema:#}"))
        }
        FleetCommand::Host(HostCommand::Enroll { name, ttl }) => {
            let enroll = Enroll { host: name, ttl_s: Some(ttl) };
            out.print(&relay.post::<Enrolled>("/v1/enroll", &enroll)?, |enrolled| enrolled.token.clone())
        }
        FleetCommand::Certificate(args) => {
            let certified = certificate::make(&args, |certify| relay.post::<Certified>("/v1/certificates", certify))?;
            out.print(&certified, certificate::view)
        }
        FleetCommand::Status => out.print(&relay.get::<Status>("/v1/status", ANSWER)?, view::status),
        FleetCommand::Hosts => out.print(&relay.get::<Vec<HostStatus>>("/v1/hosts", ANSWER)?, |v| view::hosts(v)),
        FleetCommand::Get { what, project } => {
            out.print(&relay.objects(what.as_deref(), project)?, |v| view::objects(v))
        }
        FleetCommand::Why { key } => out.print(&relay.get::<Why>(&format!("/v1/why?key={key}"), ANSWER)?, view::why),
        FleetCommand::Add(args) => {
            let spec = with_pairs(Map::new(), &args)?;
            let change = Change { op: Op::Set, key: args.key, spec: Some(spec), if_generation: Some(0) };
            relay.change(vec![change], &args.how, out)
        }
        FleetCommand::Set(args) => {
            let old = relay.one(&args.key)?;
            let spec = with_pairs(old.spec.as_object().cloned().unwrap_or_default(), &args)?;
            // What is changed is what was looked at.
            let if_generation = Some(old.generation);
            relay.change(vec![Change { op: Op::Set, key: args.key, spec: Some(spec), if_generation }], &args.how, out)
        }
        FleetCommand::Delete { keys, how } => {
            let delete = |key| Change { op: Op::Delete, key, spec: None, if_generation: None };
            relay.change(keys.into_iter().map(delete).collect(), &how, out)
        }
        FleetCommand::Apply { file, how } => relay.change(file::read(&file)?, &how, out),
        FleetCommand::Diff { file } => {
            let changes = file::read(&file)?;
            let before = relay.objects(None, None)?;
            let mut applied = Applied::default();
            for changes in chunks(changes) {
                let part: Applied = relay.post("/v1/apply?dry_run=true", &Batch { changes })?;
                applied.changed.extend(part.changed);
                applied.unchanged += part.unchanged;
            }
            out.print(&applied, |applied| view::diff(&before, applied))
        }
    }
}

/// A relay's API.
struct Relay(Client);

impl Relay {
    fn get<T: serde::de::DeserializeOwned>(&self, target: &str, after: Duration) -> Result<T, Failure> {
        self.0.get(target, after).map_err(of_relay)
    }

    fn post<T: serde::de::DeserializeOwned>(&self, target: &str, body: &impl serde::Serialize) -> Result<T, Failure> {
        self.0.post(target, body, ANSWER).map_err(of_relay)
    }

    /// Objects, page by page.
    fn objects(&self, what: Option<&str>, project: Option<String>) -> Result<Vec<ObjectEntry>, Failure> {
        let mut query = ObjectsQuery { project, ..ObjectsQuery::default() };
        match what {
            None => {}
            Some(what) if what.contains('/') => query.key = Some(what.parse().map_err(|e| usage(what, e))?),
            Some(what) => query.kind = Some(what.parse::<Kind>().map_err(|e| usage(what, e))?),
        }
        let mut objects = Vec::new();
        loop {
            let page: Objects = self.get(&target(&query), ANSWER)?;
            objects.extend(page.objects);
            // Where it does not go on, it ends.
            if page.next.is_none() || page.next == query.from {
                return Ok(objects);
            }
            query.from = page.next;
        }
    }

    fn one(&self, key: &Key) -> Result<ObjectEntry, Failure> {
        let found = self.objects(Some(&key.to_string()), None)?.into_iter().next();
        found.ok_or_else(|| usage(&key.to_string(), "there is no such object; add it with `add`".to_owned()))
    }

    /// Makes changes, and waits for hosts if that is wanted.
    fn change(&self, changes: Vec<Change>, how: &How, out: Output) -> Result<(), Failure> {
        let mut applied = Applied::default();
        let mut first = None;
        for changes in chunks(changes) {
            let part: Applied = self.post("/v1/apply", &Batch { changes })?;
            applied.revision = part.revision;
            first.get_or_insert(part.revision);
            applied.changed.extend(part.changed);
            applied.unchanged += part.unchanged;
        }
        if let Some(seconds) = how.wait {
            self.wait(&applied, first.unwrap_or(applied.revision), Duration::from_secs(seconds))?;
        }
        out.print(&applied, view::applied)
    }

    /// Waits until all hosts have everything of changes that were made since a revision.
    fn wait(&self, applied: &Applied, since: u64, limit: Duration) -> Result<(), Failure> {
        let revision = applied.revision;
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout_ms = (left.as_millis() as u64).min(MAX_WAIT_MS / 2);
            let target = format!("/v1/wait?revision={revision}&since={since}&timeout_ms={timeout_ms}");
            let Waited { waiting, refusing } = self.get(&target, ANSWER + Duration::from_millis(timeout_ms))?;
            let Some(first) = waiting.first() else { return refused(applied, &refusing) };
            if Instant::now() >= until {
                let (more, are) = match waiting.len() - 1 {
                    0 => (String::new(), "is"),
                    more => (format!(" and {more} more"), "are"),
                };
                let what = match first.connected {
                    true => format!("made, but not in force within {} s on {}{more}", limit.as_secs(), first.name),
                    false => format!("made, but {}{more} {are} not connected", first.name),
                };
                let hint =
                    "the hosts get the change as soon as they can; `bifrostctl fleet hosts` shows what they wait for";
                return Err(Failure::Usage { what, location: String::new(), hint });
            }
        }
    }
}

/// Tells the first of what hosts refuse, if something is of what was changed.
fn refused(applied: &Applied, refusing: &[HostStatus]) -> Result<(), Failure> {
    let is_changed = |problem: &HostProblem| applied.changed.iter().any(|changed| is_of(changed, problem));
    let all = refusing.iter().flat_map(|host| host.problems.iter().map(move |problem| (host, problem)));
    let mut ours = all.filter(|(_, problem)| is_changed(problem));
    let Some((host, problem)) = ours.next() else { return Ok(()) };
    let more = match ours.count() {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let what = format!("made, but refused on {}: {}{more}", host.name, problem.what);
    let hint = "correct it with `bifrostctl fleet set`, or remove what is in its way; hosts try again by themselves";
    Err(Failure::Usage { what, location: format!("{} {}", problem.kind, problem.key), hint })
}

/// Whether a host's problem is one of an object that was changed.
fn is_of(changed: &ChangedObject, problem: &HostProblem) -> bool {
    let says = |name: &str| changed.spec.as_ref().and_then(|spec| spec.get(name));
    match (changed.key.kind(), &*problem.kind) {
        (Kind::Vpc, "vpc") => says("vni").and_then(Value::as_u64).is_some_and(|vni| problem.key.parse() == Ok(vni)),
        // Of a VPC, and a host has few.
        (Kind::NatGateway, "nat") => true,
        (Kind::FloatingIp, "floating_ip") => {
            let address = says("address").and_then(Value::as_str).unwrap_or_default();
            problem.key.split_once('/').is_some_and(|(_, outside)| outside == address)
        }
        (Kind::Host, "uplink" | "port") => problem.key == UPLINK,
        _ => changed.key.on_host() == problem.key || changed.key.name() == problem.key,
    }
}

/// As many changes as a batch takes. What one batch refers to is in it or in an earlier one: sorted by kind.
fn chunks(mut changes: Vec<Change>) -> impl Iterator<Item = Vec<Change>> {
    if changes.len() > MAX_CHANGES {
        changes.sort_by_key(|change| change.key.kind());
    }
    let mut rest = changes.into_iter().peekable();
    std::iter::from_fn(move || {
        let chunk: Vec<Change> = rest.by_ref().take(MAX_CHANGES).collect();
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// An object's keys with those that are given; an empty value takes a key out.
fn with_pairs(mut spec: Map<String, Value>, args: &ChangeArgs) -> Result<Value, Failure> {
    for pair in &args.pairs {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(usage(&args.key.to_string(), format!("{pair:?} is no KEY=VALUE")));
        };
        let value = match value_of(name, value) {
            _ if value.is_empty() => {
                spec.remove(name);
                continue;
            }
            Value::String(text) if LISTS.contains(&name) => json!(text.split(',').collect::<Vec<_>>()),
            value => value,
        };
        spec.insert(name.to_owned(), value);
    }
    Ok(Value::Object(spec))
}

/// Path and query that ask for objects. Keys and names have no character that a query would take for something else.
fn target(query: &ObjectsQuery) -> String {
    let pairs = [
        ("kind", query.kind.map(|kind| kind.to_string())),
        ("project", query.project.clone()),
        ("key", query.key.as_ref().map(Key::to_string)),
        ("from", query.from.as_ref().map(Key::to_string)),
    ];
    let pairs = pairs.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    format!("/v1/objects?{}", pairs.collect::<Vec<_>>().join("&"))
}

fn of_relay(error: ClientError) -> Failure {
    match error {
        ClientError::NotRunning(socket) => Failure::NoRelay { socket },
        error => error.into(),
    }
}

fn usage(location: &str, what: String) -> Failure {
    let hint = "keys are host/NAME, project/NAME and KIND/PROJECT/NAME; see `bifrostctl fleet --help`";
    Failure::Usage { what, location: location.to_owned(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_of_hosts_are_of_the_object_that_was_changed() {
        let changed =
            |key: &str, spec: Value| ChangedObject { key: key.parse().unwrap(), generation: 1, spec: Some(spec) };
        let problem = |kind: &str, key: &str| HostProblem { kind: kind.into(), key: key.into(), what: String::new() };
        for (key, spec, kind, of_host, expected) in [
            ("port/demo/web", json!({}), "port", "demo.web", true),
            ("port/demo/web", json!({}), "port", "demo.db", false),
            ("host/h1", json!({}), "peer", "h1", true),
            ("host/h1", json!({}), "port", UPLINK, true),
            ("vpc/demo/net", json!({"vni": 4096}), "vpc", "4096", true),
            ("vpc/demo/net", json!({"vni": 4096}), "vpc", "409", false),
            ("nat_gateway/demo/out", json!({}), "nat", "4096", true),
            ("floating_ip/demo/f", json!({"address": "192.0.2.1"}), "floating_ip", "fleet-uplink/192.0.2.1", true),
            ("floating_ip/demo/f", json!({"address": "192.0.2.1"}), "floating_ip", "fleet-uplink/192.0.2.11", false),
            ("load_balancer/demo/web", json!({}), "load_balancer", "demo.web", true),
        ] {
            assert_eq!(is_of(&changed(key, spec), &problem(kind, of_host)), expected, "{key}: {kind} {of_host}");
        }
    }
}
