//! The forms of a pod for service managers (`packaging/gateway`) say what [`container`] says.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// What Podman's generator, `quadlet`, makes of a file of this name; or what it says is wrong with it.
fn generated(name: &str, text: &str) -> Result<String, String> {
    let quadlet = std::env::var_os("BIFROST_QUADLET").expect("set BIFROST_QUADLET, as by `scripts/install-quadlet.sh`");
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(name), text).unwrap();
    let output = Command::new(quadlet).arg("-dryrun").env("QUADLET_UNIT_DIRS", directory.path()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// The words of a command, where a value is part of the word of its option.
fn joined(command: &str) -> BTreeSet<String> {
    let mut words = command.split_whitespace();
    let mut all = BTreeSet::new();
    while let Some(word) = words.next() {
        let option = match word {
            "-v" => "--volume",
            "--name" | "--network" | "--cap-drop" | "--env" | "--label" => word,
            _ => {
                all.insert(word.to_owned());
                continue;
            }
        };
        all.insert(format!("{option}={}", words.next().unwrap_or_default()));
    }
    all
}

#[test]
#[ignore = "needs BIFROST_QUADLET"]
fn podmans_generator_makes_a_unit_of_quadlet_that_starts_the_same_container() {
    let name = "bifrost-gw@.container";
    let text = std::fs::read_to_string(packaged(name)).unwrap();
    let unit = generated(name, &text).unwrap();
    let command = value(&unit, "ExecStart");
    let given = joined(command.strip_prefix("/usr/bin/podman run ").unwrap());
    // What the generator adds: systemd knows the container by its file, and is told when it runs.
    let added = "--cidfile=%t/%N.cid --replace --rm --cgroups=split --sdnotify=conmon -d".split(' ');
    let wanted: BTreeSet<String> = wanted().into_iter().chain(added.map(str::to_owned)).collect();
    assert_eq!(given, wanted);
    // Podman ends the container, which withdraws its addresses on SIGTERM.
    assert_eq!(value(&unit, "ExecStop"), "/usr/bin/podman rm -v -f -i --cidfile=%t/%N.cid");
    for (key, wanted) in [("Restart", "always"), ("RestartSec", "100ms"), ("WantedBy", "multi-user.target")] {
        assert_eq!(value(&unit, key), wanted);
    }
    assert!(unit.contains("\nAfter=bifrost-nicd.service\n") && unit.contains("\nStartLimitIntervalSec=0\n"));
    // It knows all keys.
    let error = generated(name, &text.replace("\nReadOnly=", "\nReadOnl=")).unwrap_err();
    assert!(error.contains("ReadOnl"), "{error}");
}
