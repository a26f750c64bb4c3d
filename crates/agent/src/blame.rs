//! Which changes of a batch a refusal is about.

use std::collections::BTreeMap;

use bifrost_control::config::Kind;
use bifrost_control::objects::Id;

use crate::plan::Change;
use crate::relations::needs;

/// Finds the changes that an error of `POST /v1/apply` names, with what it says of them. `known` is what `bifrostd` had before.
/// Nothing: it names none, as one of a device may not.
pub(crate) fn blame<'a>(
    error: &str,
    batch: &[Change],
    known: impl Fn(&Id) -> Option<&'a bifrost_control::config::Object>,
) -> BTreeMap<usize, String> {
    let mut blamed = BTreeMap::new();
    for line in error.lines() {
        if let Some((place, what)) = item(line) {
            if place < batch.len() {
                blamed.entry(place).or_insert_with(|| what.to_owned());
            }
            continue;
        }
        let Some((id, _)) = object(line) else { continue };
        if let Some(place) = batch.iter().position(|change| change.id == id) {
            blamed.entry(place).or_insert_with(|| line.to_owned());
        } else if let Some(other) = known(&id) {
            // It was good before: what it needs, or what is in its way, is in the batch. What it needs can be told.
            let needed = needs(other);
            for (place, change) in batch.iter().enumerate().filter(|(_, change)| needed.contains(&change.id)) {
                blamed.entry(place).or_insert_with(|| format!("{} would not be right then: {line}", change.id));
            }
        }
    }
    blamed
}

/// `items[2]: port "web1": mac: ...`: the number, and the rest.
fn item(line: &str) -> Option<(usize, &str)> {
    let (number, rest) = line.strip_prefix("items[")?.split_once(']')?;
    Some((number.parse().ok()?, rest.trim_start_matches([':', ' '])))
}

/// `port "web1": ...`, or `port web1: ...` of a device: the object, and the rest.
fn object(line: &str) -> Option<(Id, &str)> {
    let (kind, rest) = line.split_once(' ')?;
    let kind = Kind::of_name(kind)?;
    if rest.starts_with('"') {
        let mut texts = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let key = texts.next()?.ok()?;
        return Some((Id { kind, key }, rest.get(texts.byte_offset()..)?));
    }
    let (key, rest) = rest.split_once(": ")?;
    Some((Id { kind, key: key.to_owned() }, rest))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bifrost_control::config::Object;
    use serde_json::json;

    use super::*;

    fn change(kind: Kind, key: &str) -> Change {
        Change { id: Id { kind, key: key.to_owned() }, old: None, new: None }
    }

    #[test]
    fn errors_name_items_or_objects() {
        let spec = json!({"name": "p9", "vni": 1, "mac": "02:00:00:00:00:01", "addresses": ["10.0.0.1/24"], "security_groups": ["web"]});
        let p9 = Arc::new(Object::parse(Kind::Port, &spec, 1).unwrap());
        let known = |id: &Id| (id.key == "p9").then_some(&*p9);
        let batch = [change(Kind::Port, "p1"), change(Kind::SecurityGroup, "web"), change(Kind::Vpc, "7")];
        let of = |error: &str| blame(error, &batch, known).into_keys().collect::<Vec<_>>();
        assert_eq!(of("items[0]: port \"p1\": vni: no VPC (nothing was changed)"), [0]);
        assert_eq!(of("2 errors\nitems[2]: vpc \"7\": x\nitems[0]: y\nand 3 more (nothing was changed)"), [0, 2]);
        assert_eq!(of("port p1: cannot enter network namespace n (nothing was changed)"), [0]);
        assert_eq!(of("port \"p9\": security_groups[0]: no security group named \"web\""), [1]);
        for none in ["", "the disk is full", "items[9]: z", "items[x]", "port \"p9", "port \"p8\": x", "ports p1: x"] {
            assert_eq!(of(none), [0usize; 0], "{none}");
        }
        // Each device has a line, and each object only its own.
        let two = [change(Kind::Port, "demo.a"), change(Kind::Port, "office.b")];
        let said =
            blame("2 errors\nport demo.a: no namespace\nport office.b: no such (nothing was changed)", &two, |_| None);
        assert_eq!(said.len(), 2);
        assert!(!said[&0].contains("office") && !said[&1].contains("demo"), "{said:?}");
        let said = blame("items[0]: port \"p1\": mac: is taken", &batch, known);
        assert_eq!(said[&0], "port \"p1\": mac: is taken");
    }
}
