//! Results as text for people.

use std::collections::HashMap;
use std::fmt::Write as _;

use bifrost_intent::Key;
use bifrost_intent::api::{Applied, ChangedObject, Frozen, HostStatus, ImpairedPeer, ObjectEntry, Status, Why};
use serde_json::Value;

use crate::table::{Number, Text, table};

pub(super) fn status(s: &Status) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<10}{value}");
    };
    line("relay", s.version.clone());
    let follows = if s.in_sync { "" } else { "  NOT FOLLOWED: the relay takes no changes; see its log" };
    line("store", format!("{}, revision {}{follows}", s.store, s.revision));
    line("objects", s.objects.to_string());
    let hosts = s.hosts;
    let dead = if hosts.dead > 0 { format!(", {} DEAD", hosts.dead) } else { String::new() };
    line("hosts", format!("{}, {} connected, {} in sync{dead}", hosts.known, hosts.connected, hosts.in_sync));
    if let Some(Frozen { vanished, of }) = s.frozen {
        line("FROZEN", format!("{vanished} of {of} hosts have vanished together: none of them is taken for dead"));
    }
    for (key, why) in &s.unreadable {
        line("UNREAD", format!("{key}: {why}"));
    }
    out.trim_end().to_owned()
}

pub(super) fn hosts(hosts: &[HostStatus]) -> String {
    let state = |host: &HostStatus| match () {
        // Until a relay has marked it as alive, in a second or so.
        () if host.dead_since_ms.is_some() => if host.connected { "returns" } else { "dead" }.to_owned(),
        () if host.is_in_sync() => "in sync".to_owned(),
        () if !host.connected => "not connected".to_owned(),
        () if host.applied < host.changed => "behind".to_owned(),
        () => format!("{} refused", host.problems.len() as u64 + host.more_problems),
    };
    let rows = hosts.iter().map(|host| {
        vec![
            host.name.clone(),
            state(host),
            host.objects.to_string(),
            host.applied.to_string(),
            host.changed.to_string(),
            host.software.clone(),
        ]
    });
    let columns = [Text("HOST"), Text("STATE"), Number("OBJECTS"), Number("APPLIED"), Number("CHANGED"), Text("AGENT")];
    let mut out = if hosts.is_empty() { "no hosts".to_owned() } else { table(&columns, rows) };
    for host in hosts {
        for problem in &host.problems {
            let _ = write!(out, "\n{}: {} {}: {}", host.name, problem.kind, problem.key, problem.what);
        }
        if host.more_problems > 0 {
            let _ = write!(out, "\n{}: and {} more", host.name, host.more_problems);
        }
        for ImpairedPeer { peer, paths, working } in &host.paths.impaired {
            let _ = write!(out, "\n{}: {working} of {paths} paths to {peer} work", host.name);
        }
        if host.paths.more_impaired > 0 {
            let _ = write!(out, "\n{}: and {} more hosts with impaired paths", host.name, host.paths.more_impaired);
        }
    }
    out
}

pub(super) fn objects(objects: &[ObjectEntry]) -> String {
    let line = |o: &ObjectEntry| format!("{}  generation {}\n    {}", o.key, o.generation, o.spec);
    let lines: Vec<String> = objects.iter().map(line).collect();
    if lines.is_empty() { "no objects".to_owned() } else { lines.join("\n") }
}

pub(super) fn applied(applied: &Applied) -> String {
    let mut out = String::new();
    for ChangedObject { key, generation, spec } in &applied.changed {
        let _ = match spec {
            Some(spec) => writeln!(out, "{key}  generation {generation}\n    {spec}"),
            None => writeln!(out, "{key}  deleted"),
        };
    }
    let (changed, unchanged) = (applied.changed.len(), applied.unchanged);
    let _ = write!(out, "{changed} changed, {unchanged} unchanged, revision {}", applied.revision);
    out
}

/// What differs, key by key.
pub(super) fn diff(before: &[ObjectEntry], applied: &Applied) -> String {
    let before: HashMap<&Key, &Value> = before.iter().map(|object| (&object.key, &object.spec)).collect();
    let mut out = String::new();
    for ChangedObject { key, spec, .. } in &applied.changed {
        let (old, new) = (before.get(key).and_then(|spec| spec.as_object()), spec.as_ref().and_then(Value::as_object));
        let sign = match (old, new) {
            (None, _) => '+',
            (_, None) => '-',
            _ => '~',
        };
        let _ = writeln!(out, "{sign} {key}");
        let mut names: Vec<&String> = old.into_iter().chain(new).flat_map(|spec| spec.keys()).collect();
        names.sort();
        names.dedup();
        for name in names {
            let (old, new) = (old.and_then(|spec| spec.get(name)), new.and_then(|spec| spec.get(name)));
            if old == new {
                continue;
            }
            for (sign, value) in [('-', old), ('+', new)] {
                if let Some(value) = value {
                    let _ = writeln!(out, "    {sign} {name}: {value}");
                }
            }
        }
    }
    let _ = write!(out, "{} would change, {} would not", applied.changed.len(), applied.unchanged);
    out
}

pub(super) fn why(why: &Why) -> String {
    let object = &why.object;
    let head = format!("{}  generation {}\n    {}\n", object.key, object.generation, object.spec);
    if why.hosts.is_empty() {
        return format!("{head}no host needs it");
    }
    let rows = why.hosts.iter().map(|host| vec![host.host.clone(), host.reason.clone(), host.state.clone()]);
    head + &table(&[Text("HOST"), Text("WHY"), Text("STATE")], rows)
}
