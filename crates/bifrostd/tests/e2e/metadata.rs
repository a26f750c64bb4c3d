//! The metadata service, accessed by curl and by plain TCP from guests' namespaces.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::host::vpc;
use crate::common::{Guest, Lab, Options, eventually};

/// Runs curl in a guest's namespace; returns status and body.
fn get(lab: &Lab, guest: &str, url: &str) -> (String, String) {
    get_within(lab, guest, url, "10")
}

/// The same, with a timeout in seconds.
fn get_within(lab: &Lab, guest: &str, url: &str, seconds: &str) -> (String, String) {
    let arguments = ["-s", "-m", seconds, "-g", "-w", "\n%{http_code}", url];
    let output = lab.net(guest).run("curl", &arguments, "");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n').unwrap_or(("", ""));
    (status.to_owned(), body.to_owned())
}

/// `a` and `d` have the same addresses in two VPCs, and metadata; `b` has no metadata; `e` is on the other host.
fn lab(workers: usize) -> Lab {
    let more = "gateway = [\"10.0.0.254\", \"fd00::fe\"]\ndomain = \"vpc1.internal\"\n";
    let vpcs = format!("{}{more}{}gateway = [\"10.0.0.254\"]\n", vpc(100, "tcp", "flow"), vpc(200, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers, vpcs, ..Options::default() });
    let guests = [
        (0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"])),
        (0, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"])),
        (0, Guest::new("d", 1, &["10.0.0.1/24"]).vni(200)),
        (1, Guest::new("e", 5, &["10.0.0.5/24"])),
    ];
    for (host, guest) in guests {
        lab.add(host, guest.gateway("10.0.0.254"));
    }
    let metadata = "[port.metadata]\ninstance_id = \"i-NAME\"\npublic_keys = [\"ssh-ed25519 AAAA NAME\"]\n\
                    user_data = \"#!/bin/sh\\necho NAME\\n\"\n";
    for (host, name) in [(0, "a"), (0, "d"), (1, "e")] {
        let config = &mut lab.hosts[host].config;
        let at = config.find(&format!("name = \"{name}\"\n")).unwrap();
        let end = config[at..].find("\n[[").map_or(config.len(), |end| at + end + 1);
        config.insert_str(end, &metadata.replace("NAME", name));
    }
    lab.start();
    lab.net("a").ip("route add default via fd00::fe\n");
    lab
}

#[test]
fn guests_get_their_metadata() {
    let lab = lab(2);
    let base = "http://169.254.169.254/latest";
    for (guest, host) in [("a", "a.vpc1.internal"), ("d", "d"), ("e", "e.vpc1.internal")] {
        let ask = |path: &str| get(&lab, guest, &format!("{base}/{path}"));
        assert_eq!(ask("meta-data/instance-id"), ("200".into(), format!("i-{guest}")), "{guest}");
        assert_eq!(ask("meta-data/local-hostname").1, host);
        assert_eq!(ask("user-data").1, format!("#!/bin/sh\necho {guest}\n"));
        assert_eq!(ask("meta-data/nothing").0, "404");
    }
    assert_eq!(get(&lab, "a", "http://[fd00:ec2::254]/latest/meta-data/ipv6").1, "fd00::1");
    // Without metadata there is no answer, and the drop is counted.
    assert_eq!(get_within(&lab, "b", &format!("{base}/meta-data/"), "0.5").0, "000");
    assert!(lab.hosts[0].drops("b", "gateway_service") > 0);
    // Idle connections of one guest do not block another guest.
    let silent: Vec<TcpStream> = lab.net("a").enter(|| {
        let to = "169.254.169.254:80".parse().unwrap();
        (0..6).filter_map(|_| TcpStream::connect_timeout(&to, Duration::from_millis(300)).ok()).collect()
    });
    assert!(!silent.is_empty());
    assert_eq!(get(&lab, "d", &format!("{base}/meta-data/instance-id")).1, "i-d");
    drop(silent);
    eventually(5.0, "closed connections are freed", || {
        get(&lab, "a", &format!("{base}/meta-data/instance-id")).1 == "i-a"
    });
    // A request may arrive byte by byte.
    let reply = lab.net("a").enter(|| {
        let mut stream = TcpStream::connect("169.254.169.254:80").unwrap();
        stream.set_nodelay(true).unwrap();
        for byte in b"GET /latest/meta-data/mac HTTP/1.1\r\n\r\n" {
            stream.write_all(&[*byte]).unwrap();
        }
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    });
    assert!(reply.ends_with("\r\n\r\n02:00:00:00:00:01"), "{reply}");
    let host = &lab.hosts[0];
    assert!(host.sample("avs.to_host_packets") > 0 && host.sample("metadata.answered_requests") > 0);
    host.assert_balanced();
}

/// A reload changes a guest's metadata without a restart.
#[test]
fn a_reload_changes_metadata() {
    let mut lab = lab(1);
    let url = "http://169.254.169.254/latest/meta-data/instance-id";
    assert_eq!(get(&lab, "a", url).1, "i-a");
    lab.hosts[0].config = lab.hosts[0].config.replace("\"i-a\"", "\"i-new\"");
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    assert_eq!(get(&lab, "a", url).1, "i-new");
}

/// cloud-init's EC2 metadata reader understands the service.
#[test]
#[ignore = "needs the Debian package cloud-init, or its Python modules: docs/VERIFICATION.md"]
fn cloud_init_reads_metadata() {
    let lab = lab(1);
    let script = "from cloudinit.sources.helpers import ec2\n\
                  at = {'api_version': '2009-04-04', 'metadata_address': 'http://169.254.169.254'}\n\
                  about = ec2.get_instance_metadata(**at)\n\
                  print(about['instance-id'], about['local-hostname'], about['local-ipv4'])\n\
                  print(list(about['public-keys'].values()))\n\
                  print(about['network']['interfaces']['macs'].keys(), ec2.get_instance_userdata(**at))\n";
    let output = lab.net("a").run("/usr/bin/python3", &["-c", script], "");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for expected in
        ["i-a a.vpc1.internal 10.0.0.1\n['ssh-ed25519 AAAA a']", "02:00:00:00:00:01", "#!/bin/sh\\necho a\\n"]
    {
        assert!(text.contains(expected), "{expected} is not in {text}{}", String::from_utf8_lossy(&output.stderr));
    }
}
