//! The console over TLS in a real browser: operators show certificates, and see what their roles allow.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::browser::{browse, program};
use crate::eventually;
use crate::world::World;

/// Somebody with a browser of its own, which has a certificate, or none.
struct Person {
    home: PathBuf,
}

impl Person {
    /// `certificate`: a PEM file of the certificate and its key.
    fn new(world: &World, name: &str, certificate: Option<&Path>) -> Person {
        let home = world.directory().join(format!("home-{name}"));
        let store = home.join(".pki/nssdb");
        std::fs::create_dir_all(&store).unwrap();
        let of = format!("sql:{}", store.display());
        let authority = world.directory().join("ca.pem").display().to_string();
        run("certutil", &["-N", "-d", &of, "--empty-password"]);
        run("certutil", &["-A", "-d", &of, "-n", "fleet", "-t", "C,,", "-i", &authority]);
        if let Some(certificate) = certificate {
            // As the guide says.
            let (from, to) = (certificate.display().to_string(), home.join("own.p12").display().to_string());
            run("openssl", &["pkcs12", "-export", "-in", &from, "-out", &to, "-passout", "pass:"]);
            run("pk12util", &["-i", &to, "-d", &of, "-W", ""]);
        }
        // The browser would ask which certificate to show.
        let policies = home.join("policies");
        std::fs::create_dir(&policies).unwrap();
        let pattern = format!(r#"{{"pattern":"https://{}","filter":{{}}}}"#, world.beside_relay(4793));
        let policy = serde_json::json!({ "AutoSelectCertificateForUrls": [pattern] });
        std::fs::write(policies.join("policy.json"), policy.to_string()).unwrap();
        Person { home }
    }

    /// What a page shows.
    fn sees(&self, world: &World, page: &str) -> String {
        self.looks(world, page, None)
    }

    fn looks(&self, world: &World, page: &str, picture: Option<&Path>) -> String {
        // Policies are in a fixed place: this browser has one of its own.
        let script = "mount -t tmpfs none /etc/chromium && mkdir -p /etc/chromium/policies/managed && \
                      cp \"$1\"/* /etc/chromium/policies/managed && shift && exec \"$@\"";
        let command = || -> Command {
            let mut command = world.command_beside_relay("unshare");
            command.args(["--mount", "sh", "-c", script, "sh"]).arg(self.home.join("policies")).arg(program());
            command.env("HOME", &self.home);
            command
        };
        let address = format!("https://{}/{page}", world.beside_relay(4793));
        browse(command, &self.home.join("profile"), &address, picture)
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The program is a Chromium, and there are openssl, and certutil and pk12util (libnss3-tools).
#[test]
#[ignore = "needs BIFROST_BROWSER"]
fn a_browser_shows_each_operator_what_the_roles_allow() {
    let mut world = World::new(2);
    let (key, api) = (world.directory().join("ca.key").display().to_string(), world.beside_relay(4793));
    world.argue(&["--ca-key", &key, "--api", &api]);
    world.run_all();
    let (web, desk) = (world.guest("web"), world.guest("desk"));
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n\
         - key: vpc/shop/net\n- {{key: subnet/shop/front, vpc: net, prefix: 10.0.0.0/28}}\n\
         - key: vpc/office/lan\n- {{key: subnet/office/desks, vpc: lan, prefix: 10.1.0.0/24}}\n\
         - {{key: security_group/shop/web, ingress: [{{protocol: tcp, ports: [443]}}]}}\n\
         - {{key: port/shop/web1, subnets: [front], host: h1, netns: {}, security_groups: [web]}}\n\
         - {{key: port/office/desk1, subnets: [desks], host: h2, netns: {}}}\n",
        web.name(),
        desk.name()
    ));
    // Each project has a port that its host refuses, with a reason that is HTML.
    for (port, name) in
        [("port/shop/bad subnets=front", "<b>hostname"), ("port/office/worse subnets=desks", "<b>hostname2")]
    {
        let file = world.directory().join(name);
        std::fs::write(&file, "no namespace").unwrap();
        let refused = world.tool(0).run(&format!("add {port} host=h2 netns={} --wait 20", file.display()));
        assert!(refused.as_ref().is_err_and(|error| error.contains("refused on h2")), "{refused:?}");
    }
    eventually(20.0, "the relay knows what is refused", || {
        let hosts = world.fleet_json("hosts");
        hosts[1]["problems"].as_array().is_some_and(|problems| problems.len() == 2)
    });
    let person = |name: &str, roles: &[&str]| {
        let to = world.directory().join(format!("{name}.pem"));
        let roles: Vec<String> = roles.iter().map(|role| format!("--role {role}")).collect();
        world.fleet(&format!("certificate {name} {} --out {}", roles.join(" "), to.display()));
        Person::new(&world, name, Some(&to))
    };
    let (viewer, editor) = (person("vera", &["viewer:shop"]), person("ed", &["editor:office"]));
    let (auditor, admin) = (person("aud", &["viewer:*"]), person("ada", &["admin:*"]));

    let check = |who: &Person, page: &str, shown: &[&str], hidden: &[&str]| {
        let dom = who.sees(&world, page);
        for text in shown {
            assert!(dom.contains(text), "{:?} {page}: {text:?} is missing\n{dom}", who.home);
        }
        for text in hidden {
            assert!(!dom.contains(text), "{:?} {page}: {text:?} is shown\n{dom}", who.home);
        }
        assert!(!dom.contains("<b>hostname"), "a text of a host became HTML\n{dom}");
    };
    let html = "&lt;b&gt;hostname";
    // Each sees hosts, and objects of the own projects; of what hosts refuse, others are only counted.
    check(&viewer, "", &["2 / 2", "#vpc/shop/net", "shop.bad", html], &["office", "worse"]);
    check(&editor, "", &["2 / 2", "#vpc/office/lan", "office.worse", html], &["shop", "shop.bad"]);
    for who in [&auditor, &admin] {
        let all = ["#vpc/shop/net", "#vpc/office/lan", "and 1 more", html];
        check(who, "", &all, &[]);
        check(who, "#host/h2", &["shop.bad", "office.worse", html], &["and 1 more"]);
    }
    check(&viewer, "#host/h2", &["shop.bad", "and 1 more", html], &["office"]);
    check(&viewer, "#vpc/shop/net", &["10.0.0.0/28", "web1", "Ports (2)"], &["office"]);
    check(&viewer, "#port/shop/web1", &["Who may open connections", "443", "in force"], &["office"]);
    // Who knows the name of another project's object learns nothing from it, not even that there is one.
    for page in ["#port/office/desk1", "#port/office/none"] {
        check(&viewer, page, &["there is no such object"], &["10.1.0", "02:"]);
    }
    check(&viewer, "#vpc/office/lan", &["There is no such network"], &["10.1.0"]);
    check(&editor, "#port/office/desk1", &["in force", "10.1.0.2"], &["shop"]);

    // The certificate of a host, one without a role, and none show no console.
    let both = ["h1.pem", "h1.key"].map(|name| std::fs::read_to_string(world.directory().join(name)).unwrap()).concat();
    let of_host = world.directory().join("h1-both.pem");
    std::fs::write(&of_host, both).unwrap();
    let host = Person::new(&world, "host", Some(&of_host));
    check(&host, "", &["hosts have no role in this API"], &["#vpc", "Alarms"]);
    let nobody = Person::new(&world, "nobody", None);
    check(&nobody, "", &[], &["#vpc", "Alarms", "10.0.0."]);

    if let Ok(to) = std::env::var("BIFROST_SCREENSHOTS") {
        viewer.looks(&world, "", Some(&Path::new(&to).join("console-of-a-viewer.png")));
    }
}
