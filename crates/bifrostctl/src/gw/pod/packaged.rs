//! The forms of a pod for service managers (`packaging/gateway`) say what [`container`] says.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{container, read};

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/gateway").join(name)
}

/// The arguments of `podman run` for the pod `%i`, without what a service manager does itself.
fn wanted() -> BTreeSet<String> {
    let mut template = read(&packaged("vpc.toml")).unwrap();
    template.pod.image = "localhost/bifrost-gw".to_owned();
    let all = container("%i", &template, None, Path::new("/var/lib/bifrost/gw/%i"), "7");
    let ours = ["run", "--detach", "--restart=always", "--label=bifrost.gw.version=7"];
    all.into_iter().filter(|word| !ours.contains(&word.as_str())).collect()
}

/// The value of a key, whose lines may go on.
fn value(text: &str, key: &str) -> String {
    let (_, rest) = text.split_once(&format!("\n{key}=")).unwrap_or_else(|| panic!("no {key}"));
    let text = rest.replace("\\\n", " ");
    text.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn the_unit_of_systemd_starts_the_same_container() {
    let text = std::fs::read_to_string(packaged("bifrost-gw@.service")).unwrap();
    let command = value(&text, "ExecStart");
    let words = command.strip_prefix("/usr/bin/podman run ").unwrap().split_whitespace();
    let given: BTreeSet<String> =
        words.filter(|word| !["--rm", "--replace"].contains(word)).map(str::to_owned).collect();
    assert_eq!(given, wanted());
    assert_eq!(value(&text, "Restart"), "always");
}

#[test]
fn quadlet_starts_the_same_container() {
    let text = std::fs::read_to_string(packaged("bifrost-gw@.container")).unwrap();
    let (_, section) = text.split_once("[Container]\n").unwrap();
    let (section, rest) = section.split_once("\n\n").unwrap();
    let mut given = BTreeSet::new();
    for line in section.lines() {
        let (key, value) = line.split_once('=').unwrap();
        // What Podman's manual (podman-systemd.unit) says for each key.
        match key {
            "Exec" | "PodmanArgs" => given.extend(value.split(' ').map(str::to_owned)),
            "Image" => given.extend([value.to_owned()]),
            "ReadOnly" => assert!(given.insert("--read-only".to_owned()) && value == "true"),
            "NoNewPrivileges" => {
                assert!(given.insert("--security-opt=no-new-privileges".to_owned()) && value == "true")
            }
            _ => {
                let option = match key {
                    "ContainerName" => "name",
                    "Label" => "label",
                    "Environment" => "env",
                    "Network" => "network",
                    "DropCapability" => "cap-drop",
                    "Volume" => "volume",
                    _ => panic!("{line}"),
                };
                given.extend([format!("--{option}={value}")]);
            }
        }
    }
    assert_eq!(given, wanted());
    assert!(rest.contains("[Service]\nRestart=always\n"));
}
