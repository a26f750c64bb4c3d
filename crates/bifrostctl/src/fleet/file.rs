//! Objects in a file of YAML, of which JSON is a part.

use std::io::Read as _;
use std::path::Path;

use bifrost_intent::{Change, Key, Op};
use serde_json::Value;

use crate::failure::Failure;

/// The largest file, bytes.
const MAX_FILE: u64 = 64 << 20;

/// The objects of a file, to be set.
pub(super) fn read(path: &Path) -> Result<Vec<Change>, Failure> {
    let location = path.display().to_string();
    let wrong = |what: String| Failure::Usage {
        what,
        location: location.clone(),
        hint: "write objects as YAML or JSON, each with its key; see `bifrostctl fleet help apply`",
    };
    let mut text = String::new();
    let read = match location.as_str() {
        "-" => std::io::stdin().lock().take(MAX_FILE).read_to_string(&mut text),
        _ => std::fs::File::open(path).and_then(|file| file.take(MAX_FILE).read_to_string(&mut text)),
    };
    read.map_err(|e| wrong(format!("cannot be read: {e}")))?;
    parse(&text).map_err(wrong)
}

fn parse(text: &str) -> Result<Vec<Change>, String> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|e| e.to_string())?;
    let mut changes = Vec::new();
    for document in documents {
        match document {
            Value::Null => {}
            Value::Array(list) => {
                list.into_iter().try_for_each(|one| object(one).map(|change| changes.push(change)))?
            }
            one => changes.push(object(one)?),
        }
    }
    Ok(changes)
}

fn object(value: Value) -> Result<Change, String> {
    let Value::Object(mut spec) = value else {
        return Err(format!("{value} is not an object with a key"));
    };
    let key = match spec.remove("key") {
        Some(Value::String(key)) => key.parse::<Key>()?,
        Some(other) => return Err(format!("key: {other} is not a text")),
        None => return Err(format!("an object has no key: {}", Value::Object(spec))),
    };
    Ok(Change { op: Op::Set, key, spec: Some(spec.into()), if_generation: None })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_read_from_yaml_and_json() {
        let yaml = "key: vpc/demo/net\n---\n# a comment\n- key: subnet/demo/a\n  vpc: net\n  prefix: 10.0.0.0/24\n- {key: host/h1, addresses: [192.0.2.1, 'fd00::1']}\n";
        let json = r#"[{"key": "vpc/demo/net"}, {"key": "subnet/demo/a", "vpc": "net", "prefix": "10.0.0.0/24"},
                       {"key": "host/h1", "addresses": ["192.0.2.1", "fd00::1"]}]"#;
        let changes = parse(yaml).unwrap();
        assert_eq!(changes, parse(json).unwrap());
        assert_eq!(changes[2].key, Key::host("h1").unwrap());
        assert_eq!(changes[2].spec, Some(json!({"addresses": ["192.0.2.1", "fd00::1"]})));
        assert_eq!(parse("").unwrap(), []);
    }

    /// What the documentation and the help show is what the schema says.
    #[test]
    fn examples_are_as_the_schema_says() {
        let validator = jsonschema::validator_for(&bifrost_intent::api::schema("Document").unwrap()).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations/fleet.md");
        let guide = std::fs::read_to_string(path).unwrap();
        let blocks = guide.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let help = super::super::FILE_HELP.split("\n\n").nth(1).unwrap().replace("\n  ", "\n");
        let mut documents = 0;
        for text in blocks.chain([help.trim_start()]) {
            for document in serde_saphyr::from_multiple::<Value>(text).unwrap() {
                let wrong: Vec<String> = validator.iter_errors(&document).map(|e| e.to_string()).collect();
                assert!(wrong.is_empty(), "{document}: {wrong:?}");
                documents += 1;
            }
            parse(text).unwrap();
        }
        assert!(documents >= 5, "{documents}");
    }

    #[test]
    fn what_is_no_object_is_told() {
        for (text, expected) in [
            ("vpc: net", "an object has no key: {\"vpc\":\"net\"}"),
            ("key: 7", "key: 7 is not a text"),
            ("key: vpc/net", "a vpc belongs to a project"),
            ("- 7", "7 is not an object with a key"),
            ("a: [", ""),
            ("key: host/a\nkey: host/b", "duplicate"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
