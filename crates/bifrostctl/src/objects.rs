//! Objects one at a time: what there is, and changes.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{
    ApplyItem, ApplyOp, ApplyReport, ApplySpec, MAX_APPLY_BYTES, ObjectEntry, ObjectsDigest, ObjectsQuery,
};
use bifrost_control::config::Kind;
use clap::{Args, Subcommand};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::output::Output;

pub(crate) const APPLY_EXAMPLES: &str = "\
Examples:
  bifrostctl apply -f web2.toml                 the ports, routes, ... of the file are to be as it says
  bifrostctl apply -f web2.toml --wait 10       and their guests' namespaces or machines are there
  bifrostctl apply -f batch.json                a batch as the API takes it, with deletions
  some-program | bifrostctl apply -f -";

pub(crate) const LIST_EXAMPLES: &str = "\
Examples:
  bifrostctl objects                            all of them, whose and which version
  bifrostctl objects --kind port --key web1     one
  bifrostctl objects --owner agent --digest     one number for each VPC, to be compared
  bifrostctl --json objects --kind route | jq '.[].spec'";

pub(crate) const CHANGE_EXAMPLES: &str = "\
Keys are those of the object's table in the configuration file; a list is written with commas. What a list of tables says, such as a group's rules, is
written as in the file: 'ingress=[{ protocol = \"tcp\", ports = [80] }]'.

Examples:
  bifrostctl port add web2 vni=100 mac=02:00:00:00:00:05 addresses=10.0.0.5/24 netns=web2 --wait 10
  bifrostctl port set web2 tx_mbit=500 security_groups=web,db
  bifrostctl port delete web2
  bifrostctl route add 100/10.0.0.9/32 peer=host-b mac=02:00:00:00:00:09
  bifrostctl sg add web 'ingress=[{ protocol = \"tcp\", ports = [80, 443] }]'";

/// Keys whose value is a list of texts or numbers.
const LISTS: [&str; 9] =
    ["addresses", "routed", "shared", "security_groups", "gateway", "dns", "vpcs", "ports", "prefixes"];
/// How often it is asked whether ports are there.
const POLL: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    /// What to apply; `-` is standard input
    #[arg(long, short, value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, Args)]
pub(crate) struct How {
    /// Who says so: only the owner of an object changes it. A batch in JSON says it itself
    #[arg(long, value_name = "NAME", default_value = "cli")]
    owner: String,
    /// Wait until the ports that were set are in use, for at most SECONDS
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct ObjectsArgs {
    /// Of this kind, such as port, route, security_group, vpc
    #[arg(long, value_name = "KIND", value_parser = kind)]
    kind: Option<Kind>,
    /// With this key: the name, or VNI/PREFIX of routes
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Of this owner; `file` is the configuration file
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// Of this VPC
    #[arg(long, value_name = "N")]
    vni: Option<u32>,
    /// Only a number for each owner and VPC: equal where the objects are
    #[arg(long)]
    digest: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ObjectCommand {
    /// Add one; refused if there is another one of that key
    #[command(after_help = CHANGE_EXAMPLES)]
    Add(ChangeArgs),
    /// Change what is named, and leave the rest of the object as it is
    #[command(after_help = CHANGE_EXAMPLES)]
    Set(ChangeArgs),
    /// Delete one
    #[command(after_help = CHANGE_EXAMPLES)]
    Delete {
        /// Its name; of a route VNI/PREFIX
        key: String,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ChangeArgs {
    /// Its name; of a route VNI/PREFIX
    key: String,
    /// What it says
    #[arg(value_name = "KEY=VALUE", required = true)]
    pairs: Vec<String>,
    #[command(flatten)]
    how: How,
}

fn kind(name: &str) -> Result<Kind, String> {
    let known = || Kind::ALL.map(Kind::name).join(", ");
    Kind::of_name(name).ok_or_else(|| format!("there is no such kind; there are: {}", known()))
}

/// `bifrostctl objects`
pub(crate) fn list(client: &Client, args: &ObjectsArgs, out: Output) -> Result<(), Failure> {
    let (key, owner) = (args.key.clone(), args.owner.clone());
    let mut query = ObjectsQuery { kind: args.kind, key, owner, vni: args.vni, ..ObjectsQuery::default() };
    if args.digest {
        return out.print(&client.object_digests(&query)?, |v| digests(v));
    }
    let mut objects = Vec::new();
    loop {
        let list = client.objects(&query)?;
        objects.extend(list.objects);
        // Where it does not go on, it ends.
        if list.next.is_none() || list.next == query.from {
            break;
        }
        query.from = list.next;
    }
    out.print(&objects, |v| table(v))
}

/// `bifrostctl apply`
pub(crate) fn apply(client: &Client, args: &ApplyArgs, out: Output) -> Result<(), Failure> {
    let location = args.file.display().to_string();
    let wrong = |what: String| Failure::Usage {
        what,
        location: location.clone(),
        hint: "write tables as in the configuration file, such as [[port]], or a batch as POST /v1/apply takes it",
    };
    let mut text = String::new();
    let most = MAX_APPLY_BYTES as u64;
    let read = if location == "-" {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(&args.file).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let items = if text.trim_start().starts_with('{') {
        serde_json::from_str::<ApplySpec>(&text).map_err(|e| wrong(e.to_string()))?.items
    } else {
        of_tables(&text, &args.how.owner).map_err(wrong)?
    };
    send(client, items, &args.how, out)
}

/// `bifrostctl port`, `route`, `sg`
pub(crate) fn change(client: &Client, kind: Kind, command: ObjectCommand, out: Output) -> Result<(), Failure> {
    let (op, key, pairs, how, adds) = match command {
        ObjectCommand::Add(args) => (ApplyOp::Set, args.key, args.pairs, args.how, true),
        ObjectCommand::Set(args) => (ApplyOp::Set, args.key, args.pairs, args.how, false),
        ObjectCommand::Delete { key, how } => (ApplyOp::Delete, key, Vec::new(), how, false),
    };
    let wrong = |what: String| Failure::Usage { what, location: key.clone(), hint: kind.key_form() };
    let canonical = kind.canonical(&key).ok_or_else(|| wrong(format!("{key:?} is no key of a {kind}")))?;
    let mut item =
        ApplyItem { op, kind, key: Some(canonical.clone()), generation: None, owner: how.owner.clone(), spec: None };
    if op == ApplyOp::Set {
        let mut spec = Map::new();
        if adds {
            // There is none yet, so that this is the first version.
            item.generation = Some(1);
            named(kind, &canonical, &mut spec);
        } else {
            let query = ObjectsQuery { kind: Some(kind), key: Some(canonical), ..ObjectsQuery::default() };
            let found = client.objects(&query)?.objects.into_iter().next();
            let ObjectEntry { generation, spec: old, .. } =
                found.ok_or_else(|| wrong(format!("there is no such {kind}")))?;
            item.generation = Some(generation.saturating_add(1));
            spec.extend(old.as_object().cloned().unwrap_or_default());
        }
        for pair in &pairs {
            let (name, value) = pair.split_once('=').ok_or_else(|| wrong(format!("{pair:?} is no KEY=VALUE")))?;
            spec.insert(name.to_owned(), value_of(name, value));
        }
        item.spec = Some(Value::Object(spec));
    }
    send(client, vec![item], &how, out)
}

/// What an object's key says of it.
fn named(kind: Kind, key: &str, spec: &mut Map<String, Value>) {
    match key.split_once('/').filter(|_| kind == Kind::Route) {
        Some((vni, prefix)) => {
            spec.insert("vni".to_owned(), vni.parse::<u32>().map_or(Value::Null, Value::from));
            spec.insert("prefix".to_owned(), prefix.into());
        }
        None => drop(spec.insert("name".to_owned(), key.into())),
    }
}

/// A value as the file would have it, where it is one; otherwise a text, or a list of them.
pub(crate) fn value_of(key: &str, text: &str) -> Value {
    let literal = |text: &str| {
        let table = toml::from_str::<Map<String, Value>>(&format!("value = {text}")).ok();
        // TOML's dates are objects, too, and meant as texts.
        let is_table = text.trim_start().starts_with('{');
        table.and_then(|mut table| table.remove("value")).filter(|value| is_table || !value.is_object())
    };
    let one = |text: &str| literal(text).unwrap_or_else(|| Value::from(text));
    match one(text) {
        Value::Array(list) => Value::Array(list),
        _ if LISTS.contains(&key) => text.split(',').filter(|part| !part.is_empty()).map(one).collect(),
        value => value,
    }
}

/// The objects of tables such as `[[port]]`, to be set.
fn of_tables(text: &str, owner: &str) -> Result<Vec<ApplyItem>, String> {
    let tables: Map<String, Value> = toml::from_str(text).map_err(|e| e.to_string())?;
    let mut items = Vec::new();
    for (name, list) in tables {
        let Some(kind) = Kind::of_name(&name) else {
            let known = Kind::ALL.map(Kind::name).join(", ");
            return Err(format!("{name:?} is no kind of object; there are: {known}"));
        };
        let Value::Array(specs) = list else { return Err(format!("{name} is no list of tables; write [[{name}]]")) };
        items.extend(specs.into_iter().map(|spec| ApplyItem {
            op: ApplyOp::Set,
            kind,
            key: None,
            generation: None,
            owner: owner.to_owned(),
            spec: Some(spec),
        }));
    }
    Ok(items)
}

fn send(client: &Client, items: Vec<ApplyItem>, how: &How, out: Output) -> Result<(), Failure> {
    let name = |item: &ApplyItem| item.spec.as_ref()?.get("name")?.as_str().map(str::to_owned);
    let ports = items.iter().filter(|item| item.kind == Kind::Port && item.op == ApplyOp::Set).filter_map(name);
    let ports: Vec<String> = ports.collect();
    let report = client.apply(&ApplySpec { items, wait_for_devices: true })?;
    if let Some(seconds) = how.wait {
        wait(client, &ports, Duration::from_secs(seconds))?;
    }
    out.print(&report, applied)
}

/// Waits until ports are in use.
fn wait(client: &Client, ports: &[String], limit: Duration) -> Result<(), Failure> {
    let start = Instant::now();
    loop {
        let all = client.ports()?;
        let mut missing = ports.iter().filter(|name| !all.iter().any(|p| p.name == **name && !p.waiting && !p.failed));
        let Some(first) = missing.next() else { return Ok(()) };
        if start.elapsed() >= limit {
            return Err(Failure::Usage {
                what: format!("applied, but not in use within {} s", limit.as_secs()),
                location: format!("port {first:?}"),
                hint: "is its network namespace there, its machine started? `bifrostctl ports` shows what it waits for",
            });
        }
        std::thread::sleep(POLL);
    }
}

fn applied(report: &ApplyReport) -> String {
    let ApplyReport { set, deleted, unchanged, took_us, .. } = report;
    format!("{set} set, {deleted} deleted, {unchanged} unchanged, in {:.1} ms", *took_us as f64 / 1000.0)
}

fn table(objects: &[ObjectEntry]) -> String {
    let line = |o: &ObjectEntry| {
        format!("{} {}  owner {}, generation {}\n    {}", o.kind, o.key, o.owner, o.generation, o.spec)
    };
    let lines: Vec<String> = objects.iter().map(line).collect();
    if lines.is_empty() { "no objects".to_owned() } else { lines.join("\n") }
}

fn digests(digests: &[ObjectsDigest]) -> String {
    let line = |d: &ObjectsDigest| {
        let vni = d.vni.map_or("no single VPC".to_owned(), |vni| format!("VNI {vni}"));
        format!("{}  {}, {vni}: {} objects", d.digest, d.owner, d.objects)
    };
    let lines: Vec<String> = digests.iter().map(line).collect();
    if lines.is_empty() { "no objects".to_owned() } else { lines.join("\n") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_read_as_in_the_configuration_file() {
        for (key, text, expected) in [
            ("mtu", "1500", json!(1500)),
            ("netns", "web", json!("web")),
            ("addresses", "10.0.0.1,10.0.0.2", json!(["10.0.0.1", "10.0.0.2"])),
            ("ingress", "[{protocol=\"icmp\"}]", json!([{"protocol": "icmp"}])),
            ("quota", "{vpcs=2,ports=100}", json!({"vpcs": 2, "ports": 100})),
            // A name, though TOML has dates.
            ("netns", "2026-01-01", json!("2026-01-01")),
        ] {
            assert_eq!(value_of(key, text), expected, "{key}={text}");
        }
    }
}
