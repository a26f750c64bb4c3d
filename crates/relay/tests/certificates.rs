//! The relay's API over TLS, with the program and real certificates: what each may do is what its roles say.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifrost_relay_api::pb::relay_client::RelayClient;
use bifrost_relay_api::{FromAgent, Hello};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// A relay that serves operators, which ends with the test.
struct Relay {
    directory: PathBuf,
    program: Child,
    authority: Issuer,
    api: SocketAddr,
    agents: SocketAddr,
}

/// A certificate and its key, PEM.
#[derive(Clone)]
struct Shown {
    certificate: String,
    key: String,
}

fn authority() -> Issuer {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate that somebody else than the relay has signed.
fn signed(by: &Issuer, change: impl FnOnce(&mut CertificateParams)) -> Shown {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    Shown { certificate: params.signed_by(&key, by).unwrap().pem(), key: key.serialize_pem() }
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

fn uri(role: &str) -> SanType {
    SanType::URI(format!("urn:bifrost:role:{role}").try_into().unwrap())
}

impl Relay {
    fn start(name: &str) -> Relay {
        let directory = std::env::temp_dir().join(format!("bifrost-certificates-e2e-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let file = |name: &str| directory.join(name).display().to_string();
        let authority = authority();
        let relay = signed(&authority, |params| {
            params.subject_alt_names = vec![dns("relay"), SanType::IpAddress([127, 0, 0, 1].into())];
        });
        // Of users, only this one has a role.
        let uid = std::fs::metadata(&directory).unwrap().uid();
        let roles = format!("[[grant]]\nuid = {uid}\nproject = \"*\"\nrole = \"admin\"\n");
        for (name, text) in [
            ("ca.pem", &*authority.pem()),
            ("ca.key", &authority.key().serialize_pem()),
            ("relay.pem", &relay.certificate),
            ("relay.key", &relay.key),
            ("roles.toml", &roles),
        ] {
            std::fs::write(file(name), text).unwrap();
            std::fs::set_permissions(file(name), std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_bifrost-relay"));
        command.args(["--store", "memory", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]);
        command.args(["--ca", &file("ca.pem"), "--ca-key", &file("ca.key")]);
        command.args(["--certificate", &file("relay.pem"), "--key", &file("relay.key")]);
        command.args(["--socket", &file("relay.sock"), "--roles", &file("roles.toml"), "--audit", &file("audit.json")]);
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stderr(std::fs::File::create(file("log")).unwrap());
        let mut program = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let (api, agents) = loop {
            let text = std::fs::read_to_string(file("log")).unwrap_or_default();
            let after =
                |what: &str| -> Option<SocketAddr> { text.split_once(what)?.1.split_whitespace().next()?.parse().ok() };
            if let (Some(api), Some(agents)) = (after("served at https://"), after("agents=")) {
                break (api, agents);
            }
            if Instant::now() > deadline {
                let _ = program.kill();
                panic!("the relay is not ready\n{text}");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        Relay { directory, program, authority, api, agents }
    }

    /// Over the socket, as this user.
    fn local(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        exchange(UnixStream::connect(self.directory.join("relay.sock")).unwrap(), method, path, body).unwrap()
    }

    /// Over TLS; none: there is no connection.
    fn try_ask(&self, shown: Option<&Shown>, method: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
        exchange(self.connect(shown), method, path, body)
    }

    fn connect(&self, shown: Option<&Shown>) -> impl Read + Write {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let config = match shown {
            None => config.with_no_client_auth(),
            Some(Shown { certificate, key }) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).map(Result::unwrap).collect();
                config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
            }
        };
        let name = ServerName::try_from("relay").unwrap();
        let stream = TcpStream::connect(self.api).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
    }

    fn ask(&self, shown: &Shown, method: &str, path: &str, body: &Value) -> (u16, Value) {
        self.try_ask(Some(shown), method, path, body).unwrap()
    }

    /// A certificate that the relay has issued; and its serial number.
    fn issue(&self, name: &str, roles: &[(&str, &str)]) -> (Shown, String) {
        let key = KeyPair::generate().unwrap();
        let (status, answer) = self.local("POST", "/v1/certificates", &certify(&key, name, roles));
        assert_eq!(status, 200, "{answer}");
        let text = |key: &str| answer[key].as_str().unwrap().to_owned();
        (Shown { certificate: text("certificate"), key: key.serialize_pem() }, text("serial"))
    }

    fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.directory.join("audit.json")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn certify(key: &KeyPair, name: &str, roles: &[(&str, &str)]) -> Value {
    let request = CertificateParams::default().serialize_request(key).unwrap().pem().unwrap();
    let roles: Vec<_> = roles.iter().map(|(role, project)| json!({"role": role, "project": project})).collect();
    json!({"name": name, "roles": roles, "ttl_s": 3600, "request": request})
}

/// A request and its answer. A method with a plus sign is that of another site's page, one with an equals sign that of
/// the console.
fn exchange(stream: impl Read + Write, method: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
    let text = exchange_text(stream, method, path, body)?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let body = serde_json::from_str(body).unwrap_or_else(|_| json!(body));
    Some((head.split(' ').nth(1)?.parse().ok()?, body))
}

fn exchange_text(mut stream: impl Read + Write, method: &str, path: &str, body: &Value) -> Option<String> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (method, origin) = match (method.strip_suffix('+'), method.strip_suffix('=')) {
        (Some(method), _) => (method, "Origin: https://elsewhere.example\r\n"),
        (_, Some(method)) => (method, "Origin: https://relay\r\n"),
        _ => (method, ""),
    };
    let head = format!("{method} {path} HTTP/1.1\r\nHost: relay\r\n{origin}Connection: close\r\nContent-Length: ");
    write!(stream, "{head}{}\r\n\r\n{body}", body.len()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

fn set(key: &str, spec: Value) -> Value {
    json!({"changes": [{"op": "set", "key": key, "spec": spec}]})
}

fn error(answer: &(u16, Value)) -> String {
    format!("{} {}", answer.0, answer.1["error"]["what"].as_str().unwrap_or_default())
}

#[test]
fn the_console_shows_what_a_certificate_may_see() {
    let relay = Relay::start("console");
    let admin = relay.issue("root", &[("admin", "*")]).0;
    for change in [
        set("host/h1", json!({"addresses": ["192.0.2.1"]})),
        set("project/demo", json!({})),
        set("project/other", json!({})),
        set("vpc/demo/net", json!({})),
        set("vpc/other/net", json!({})),
        set("vpc/third/net", json!({})),
    ] {
        assert_eq!(relay.ask(&admin, "POST", "/v1/apply", &change).0, 200);
    }
    let vpcs = |roles: &[(&str, &str)]| {
        let shown = relay.issue("alice", roles).0;
        let page = relay.ask(&shown, "GET", "/", &Value::Null);
        assert!(page.0 == 200 && page.1.as_str().unwrap().contains("console.js"), "{page:?}");
        assert_eq!(relay.ask(&shown, "GET", "/console.js", &Value::Null).0, 200);
        let overview = relay.ask(&shown, "GET", "/v1/overview", &Value::Null).1;
        let keys: Vec<_> = overview["vpcs"].as_array().unwrap().iter().map(|vpc| vpc["key"].clone()).collect();
        (keys, overview["objects"].clone())
    };
    let counts = |vpcs: u64, projects: u64| match projects {
        0 => json!({"host": 1, "vpc": vpcs}),
        _ => json!({"host": 1, "project": projects, "vpc": vpcs}),
    };
    let both = vec![json!("vpc/demo/net"), json!("vpc/other/net")];
    assert_eq!(vpcs(&[("viewer", "demo")]), (vec![json!("vpc/demo/net")], counts(1, 1)));
    assert_eq!(vpcs(&[("viewer", "demo"), ("admin", "other")]), (both, counts(2, 2)));
    assert_eq!(vpcs(&[("viewer", "third")]), (vec![json!("vpc/third/net")], counts(1, 0)));
    assert!(vpcs(&[("viewer", "nothing")]).0.is_empty());
    assert_eq!(vpcs(&[("viewer", "*")]).0.len(), 3);
    // A host's certificate opens no page, and pages of other sites get nothing.
    let host = signed(&relay.authority, |params| params.subject_alt_names = vec![dns("h1")]);
    assert_eq!(relay.ask(&host, "GET", "/", &Value::Null).0, 403);
    assert_eq!(relay.ask(&admin, "GET+", "/v1/overview", &Value::Null).0, 403);
    // Its own page reads, as Chromium's module scripts do, and changes nothing.
    assert_eq!(relay.ask(&admin, "GET=", "/console.js", &Value::Null).0, 200);
    assert_eq!(relay.ask(&admin, "POST=", "/v1/apply", &set("vpc/demo/net", json!({}))).0, 403);
    // A browser loads nothing from elsewhere into the page.
    let text = exchange_text(relay.connect(Some(&admin)), "GET", "/", &Value::Null).unwrap();
    let head = text.split_once("\r\n\r\n").unwrap().0.to_ascii_lowercase();
    for header in ["content-security-policy: default-src 'none'", "cache-control: no-store"] {
        assert!(head.contains(header), "{head}");
    }
}

#[test]
fn each_certificate_may_do_what_its_roles_say() {
    let relay = Relay::start("roles");
    let admin = relay.issue("root", &[("admin", "*")]).0;
    for change in [
        set("host/h1", json!({"addresses": ["192.0.2.1"]})),
        set("vpc/demo/net", json!({})),
        set("vpc/other/net", json!({})),
    ] {
        assert_eq!(relay.ask(&admin, "POST", "/v1/apply", &change).0, 200);
    }
    let key = KeyPair::generate().unwrap();
    let token = json!({"host": "h1"});
    let another = certify(&key, "another", &[("viewer", "demo")]);
    let project = set("project/demo", json!({"quota": {"vpcs": 5}}));
    let calls = [
        ("GET", "/v1/status", &Value::Null),
        ("GET", "/v1/objects", &Value::Null),
        ("GET", "/v1/hosts", &Value::Null),
        ("GET", "/v1/wait?revision=0&timeout_ms=1", &Value::Null),
        ("GET", "/v1/openapi.json", &Value::Null),
        ("GET", "/v1/why?key=vpc/demo/net", &Value::Null),
        ("GET", "/v1/why?key=vpc/other/net", &Value::Null),
        ("GET", "/v1/overview", &Value::Null),
        ("GET", "/metrics", &Value::Null),
        ("GET", "/v1/nothing", &Value::Null),
        ("POST", "/v1/apply", &set("vpc/demo/net", json!({}))),
        ("POST", "/v1/apply", &set("vpc/other/net", json!({}))),
        ("POST", "/v1/apply?dry_run=true", &set("vpc/other/net", json!({}))),
        ("POST", "/v1/apply", &project),
        ("POST", "/v1/apply", &set("host/h1", json!({"addresses": ["192.0.2.1"]}))),
        ("POST", "/v1/enroll", &token),
        ("POST", "/v1/certificates", &another),
    ];
    let no = 403;
    let of = |roles: &[(&str, &str)]| relay.issue("alice", roles).0;
    // A host's certificate, as the relay or another authority's program makes them; also one that wants more.
    let host = signed(&relay.authority, |params| params.subject_alt_names = vec![dns("h1")]);
    let greedy = signed(&relay.authority, |params| params.subject_alt_names = vec![dns("h1"), uri("admin:*")]);
    let bare = signed(&relay.authority, |params| params.distinguished_name.push(DnType::CommonName, "admin"));
    for (name, shown, expected) in [
        (
            "a viewer of demo",
            of(&[("viewer", "demo")]),
            [200, 200, 200, 200, 200, 200, 404, 200, no, 404, no, no, no, no, no, no, no],
        ),
        (
            "an editor of demo",
            of(&[("editor", "demo")]),
            [200, 200, 200, 200, 200, 200, 404, 200, no, 404, 200, no, no, no, no, no, no],
        ),
        (
            "an admin of demo",
            of(&[("admin", "demo")]),
            [200, 200, 200, 200, 200, 200, 404, 200, no, 404, 200, no, no, 200, no, no, no],
        ),
        (
            "a viewer of all",
            of(&[("viewer", "*")]),
            [200, 200, 200, 200, 200, 200, 200, 200, 200, 404, no, no, no, no, no, no, no],
        ),
        (
            "an editor of all",
            of(&[("editor", "*")]),
            [200, 200, 200, 200, 200, 200, 200, 200, 200, 404, 200, 200, 200, no, no, no, no],
        ),
        (
            "an admin of all",
            admin.clone(),
            [200, 200, 200, 200, 200, 200, 200, 200, 200, 404, 200, 200, 200, 200, 200, 200, 200],
        ),
        ("a host", host, [no; 17]),
        ("a host that wants more", greedy, [no; 17]),
        ("nobody in particular", bare, [no; 17]),
    ] {
        let answers: Vec<_> = calls.iter().map(|(method, path, body)| relay.ask(&shown, method, path, body)).collect();
        let statuses: Vec<u16> = answers.iter().map(|(status, _)| *status).collect();
        assert_eq!(statuses, expected, "{name}: {answers:?}");
    }
    // Only what one may see is listed.
    let listed = relay.ask(&of(&[("viewer", "demo")]), "GET", "/v1/objects", &Value::Null).1;
    let keys: Vec<_> = listed["objects"].as_array().unwrap().iter().map(|object| object["key"].clone()).collect();
    assert!(keys.contains(&json!("vpc/demo/net")) && !keys.contains(&json!("vpc/other/net")), "{keys:?}");
    let page = relay.ask(&admin, "POST+", "/v1/apply", &set("vpc/demo/net", json!({})));
    assert_eq!(error(&page), "403 web pages may not call this API");
    // An error names the role that is missing.
    let refused = relay.ask(&of(&[("viewer", "demo")]), "POST", "/v1/apply", &set("vpc/demo/net", json!({})));
    let expected = "403 vpc/demo/net: needs the role editor of \"demo\"; the certificate of \"alice\" has viewer:demo";
    assert_eq!(error(&refused), expected);
}

#[test]
fn whoever_has_no_certificate_of_the_authority_gets_no_answer() {
    let relay = Relay::start("strangers");
    let foreign = authority();
    let role = |params: &mut CertificateParams| params.subject_alt_names = vec![uri("admin:*")];
    let ask = |shown: Option<&Shown>| relay.try_ask(shown, "GET", "/v1/status", &Value::Null);
    let ours = signed(&relay.authority, role);
    assert_eq!(ask(Some(&ours)).map(|answer| answer.0), Some(200), "any program may sign for the authority");
    assert_eq!(ask(None), None);
    assert_eq!(ask(Some(&signed(&foreign, role))), None);
    let expired = signed(&relay.authority, |params| {
        role(params);
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    });
    assert_eq!(ask(Some(&expired)), None);
    // Somebody who says nothing keeps nobody away.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(relay.api).unwrap()).collect();
    assert_eq!(ask(Some(&ours)).map(|answer| answer.0), Some(200));
    drop(silent);
}

#[test]
fn the_log_names_the_certificate_and_a_revoked_one_counts_no_more() {
    let relay = Relay::start("audit");
    let (admin, of_admin) = relay.issue("root", &[("admin", "*")]);
    // An admin from elsewhere issues one, too.
    let key = KeyPair::generate().unwrap();
    let (status, answer) = relay.ask(&admin, "POST", "/v1/certificates", &certify(&key, "bob", &[("editor", "demo")]));
    assert_eq!(status, 200, "{answer}");
    let certificate = answer["certificate"].as_str().unwrap().to_owned();
    let bob = Shown { certificate, key: key.serialize_pem() };
    assert_eq!(relay.ask(&bob, "POST", "/v1/apply", &set("vpc/demo/net", json!({}))).0, 200);
    assert_eq!(relay.ask(&bob, "POST", "/v1/apply", &set("vpc/other/net", json!({}))).0, 403);
    assert_eq!(relay.ask(&bob, "POST", "/v1/certificates", &certify(&key, "eve", &[("admin", "*")])).0, 403);
    let serial = answer["serial"].as_str().unwrap();
    let lines: Vec<Value> = relay
        .audit()
        .iter()
        .map(|line| {
            let keys = ["name", "roles", "serial", "op", "key", "for_name", "for_roles", "outcome"];
            keys.iter().map(|key| line[key].as_str().unwrap_or("-")).collect()
        })
        .collect();
    let line = |text: &str| json!(text.split(' ').collect::<Vec<_>>());
    assert_eq!(
        lines,
        [
            line("- - - certificate - root admin:* made"),
            line(&format!("root admin:* {of_admin} certificate - bob editor:demo made")),
            line(&format!("bob editor:demo {serial} set vpc/demo/net - - made")),
            line(&format!("bob editor:demo {serial} set vpc/other/net - - refused")),
            line(&format!("bob editor:demo {serial} certificate - eve admin:* refused")),
        ]
    );
    let path = relay.directory.join("roles.toml");
    let roles = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("revoked = [\"{serial}\"]\n{roles}")).unwrap();
    let refused = relay.ask(&bob, "GET", "/v1/status", &Value::Null);
    assert_eq!(error(&refused), format!("403 the certificate of \"bob\", {serial}, is revoked"));
    assert_eq!(relay.ask(&admin, "GET", "/v1/status", &Value::Null).0, 200);
}

/// An operator's certificate is nobody's among agents, whatever name it has.
#[test]
fn an_operator_is_not_a_host() {
    let relay = Relay::start("hosts");
    assert_eq!(relay.local("POST", "/v1/apply", &set("host/h1", json!({"addresses": ["192.0.2.1"]}))).0, 200);
    let operator = relay.issue("h1", &[("admin", "*")]).0;
    let host = signed(&relay.authority, |params| params.subject_alt_names = vec![dns("h1")]);
    let follow = |shown: Shown| {
        let authority = Certificate::from_pem(relay.authority.pem());
        let tls = ClientTlsConfig::new().ca_certificate(authority).domain_name("relay");
        let tls = tls.identity(Identity::from_pem(shown.certificate, shown.key));
        let endpoint = Endpoint::from_shared(format!("https://{}", relay.agents)).unwrap().tls_config(tls).unwrap();
        let hello =
            Hello { versions: (1, 1), host: "h1".into(), instance: "i".into(), software: "test".into(), revision: 0 };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let mut client = RelayClient::new(endpoint.connect().await.unwrap());
            let says = tokio_stream::iter([FromAgent::Hello(hello).into()]);
            client.follow(says).await.map(|_| ()).map_err(|status| status.code())
        })
    };
    assert_eq!(follow(host), Ok(()));
    assert_eq!(follow(operator), Err(tonic::Code::PermissionDenied));
}
