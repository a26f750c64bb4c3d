use super::*;

const FILE: &str = "[[grant]]\nuid = 1000\nproject = \"demo\"\nrole = \"viewer\"\n\
                    [[grant]]\ngid = 2000\nproject = \"demo\"\nrole = \"editor\"\n\
                    [[grant]]\nuid = 1001\nproject = \"demo\"\nrole = \"admin\"\n\
                    [[grant]]\nuid = 1002\nproject = \"*\"\nrole = \"admin\"\n\
                    [[grant]]\nuid = 1003\nproject = \"*\"\nrole = \"viewer\"\n";

fn may(uid: u32, gid: u32) -> impl Fn(&str) -> (bool, bool) {
    let access = Grants::parse(FILE).unwrap().of(Peer { uid, gid, pid: None });
    move |key: &str| {
        let key: Key = key.parse().unwrap();
        let text = format!("{{\"changes\": [{{\"op\": \"delete\", \"key\": \"{key}\"}}]}}");
        (access.sees(&key), access.may_change(&serde_json::from_str(&text).unwrap()).is_ok())
    }
}

#[test]
fn roles_say_what_one_sees_and_changes() {
    let keys = ["vpc/demo/net", "project/demo", "vpc/other/net", "project/other", "host/h1", "outside_grant/demo/a"];
    let (no, see, both) = ((false, false), (true, false), (true, true));
    for (uid, gid, expected) in [
        (1, 1, [no; 6]),
        (1000, 1, [see, see, no, no, see, see]),
        (1, 2000, [both, see, no, no, see, see]),
        (1000, 2000, [both, see, no, no, see, see]),
        (1001, 1, [both, both, no, no, see, see]),
        (1002, 1, [both; 6]),
        (1003, 1, [see; 6]),
        (0, 0, [both; 6]),
    ] {
        assert_eq!(keys.map(|key| may(uid, gid)(key)), expected, "user {uid}, group {gid}");
    }
}

#[test]
fn tokens_are_made_by_those_who_may_change_everything() {
    let is_admin = |uid| {
        let access = Grants::parse(FILE).unwrap().of(Peer { uid, gid: 1, pid: None });
        access.may(Call::GiveCertificates).is_ok()
    };
    assert_eq!([0, 1002, 1003, 1001, 1].map(is_admin), [true, true, false, false, false]);
}

#[test]
fn of_hosts_only_the_own_problems_are_told() {
    use bifrost_intent::api::HostProblem;
    let problem = |key: &str| HostProblem { kind: "port".into(), key: key.into(), what: "x".into() };
    let problems = ["demo.a", "other.b", "h2"].map(problem).to_vec();
    let host = HostStatus { problems, more_problems: 1, ..HostStatus::default() };
    let of = |uid| Grants::parse(FILE).unwrap().of(Peer { uid, gid: 1, pid: None }).host(host.clone());
    assert_eq!((of(1000).problems, of(1000).more_problems), (vec![problem("demo.a")], 3));
    assert_eq!(of(1003), host);
}

#[test]
fn bad_files_are_refused() {
    for (text, expected) in [
        ("[[grant]]\nproject = \"demo\"\nrole = \"viewer\"\n", "grant[0]: name a uid or a gid, not both"),
        ("[[grant]]\nuid = 1\ngid = 1\nproject = \"demo\"\nrole = \"viewer\"\n", "grant[0]: name a uid or a gid"),
        ("[[grant]]\nuid = 1\nproject = \"Demo\"\nrole = \"viewer\"\n", "grant[0].project: \"Demo\" is not a name"),
        ("[[grant]]\nuid = 1\nproject = \"demo\"\nrole = \"owner\"\n", "unknown variant `owner`"),
        ("[[grants]]\n", "unknown field `grants`"),
    ] {
        let error = Grants::parse(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_file_that_changes_counts_at_once_if_it_is_good() {
    let path = std::env::temp_dir().join(format!("bifrost-roles-{}", std::process::id()));
    let editor = "[[grant]]\nuid = 7\nproject = \"demo\"\nrole = \"editor\"\n";
    std::fs::write(&path, editor).unwrap();
    let roles = Roles::open(&path).unwrap();
    let role = || roles.of(Peer { uid: 7, gid: 7, pid: None }).role("demo");
    assert_eq!(role(), Some(Role::Editor));
    std::fs::write(&path, "[[grant]]\nuid = 7, nonsense\n").unwrap();
    assert_eq!(role(), Some(Role::Editor));
    std::fs::write(&path, "# nobody\n").unwrap();
    assert_eq!(role(), None);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(role(), None);
    assert!(Roles::open(&path).is_err());
}

/// Of all calls and callers by certificates: the table of who may do what.
#[test]
fn certificates_may_do_what_their_roles_say_and_nothing_else() {
    const VPC: &str = "vpc/demo/net";
    let keys = [VPC, "project/demo", "vpc/other/net", "project/other", "host/h1", "outside_grant/demo/a"];
    for (roles, sees, changes, everything, gives) in [
        // Which of the keys one sees, and changes; whether one sees everything, and gives certificates.
        (&["viewer:demo"][..], "vp--hg", "------", false, false),
        (&["editor:demo"], "vp--hg", "v-----", false, false),
        (&["admin:demo"], "vp--hg", "vp----", false, false),
        (&["viewer:*"], "vpvphg", "------", true, false),
        (&["editor:*"], "vpvphg", "v-v---", true, false),
        (&["admin:*"], "vpvphg", "vpvphg", true, true),
        (&["viewer:*", "editor:demo"], "vpvphg", "v-----", true, false),
        (&["viewer:demo", "admin:other"], "vpvphg", "--vp--", false, false),
        (&["editor:elsewhere"], "----h-", "------", false, false),
    ] {
        let access = Door::Tls(None).access(Some(&holder(roles))).unwrap();
        let letter = |key: &str, is: bool| match is {
            true if key.starts_with("outside") => 'g',
            true => key.chars().next().unwrap(),
            false => '-',
        };
        let key = |key: &str| -> Key { key.parse().unwrap() };
        let seen: String = keys.iter().map(|k| letter(k, access.sees(&key(k)))).collect();
        let changed: String = keys.iter().map(|k| letter(k, access.may(Call::Change(&key(k))).is_ok())).collect();
        assert_eq!((&*seen, &*changed), (sees, changes), "{roles:?}");
        assert_eq!(access.may(Call::LookAtEverything).is_ok(), everything, "{roles:?}");
        assert_eq!(access.sees_everything(), everything, "{roles:?}");
        assert_eq!(access.may(Call::GiveCertificates).is_ok(), gives, "{roles:?}");
    }
    let access = Door::Tls(None).access(Some(&holder(&["viewer:demo"]))).unwrap();
    let why = access.may(Call::Change(&VPC.parse().unwrap())).unwrap_err();
    assert_eq!(why, "needs the role editor of \"demo\"; the certificate of \"alice\" has viewer:demo");
}

#[test]
fn each_door_knows_its_own_callers_only() {
    let user = Caller::User(Peer { uid: 0, gid: 0, pid: None });
    let admin = holder(&["admin:*"]);
    assert!(Door::Socket(None).access(Some(&user)).is_ok());
    assert!(Door::Tls(None).access(Some(&admin)).is_ok());
    // What should not happen: a layer is missing, or is at the wrong server.
    for (door, caller) in [
        (Door::Socket(None), None),
        (Door::Socket(None), Some(&admin)),
        (Door::Tls(None), None),
        (Door::Tls(None), Some(&user)),
    ] {
        assert!(door.access(caller).is_err(), "{door:?} {caller:?}");
    }
}

#[test]
fn certificates_without_use_are_refused() {
    let refusal = |change: fn(&mut Holder)| {
        let Caller::Holder(holder) = holder(&["admin:*"]) else { unreachable!() };
        let mut holder = Holder::clone(&holder);
        change(&mut holder);
        Door::Tls(None).access(Some(&Caller::Holder(Arc::new(holder)))).unwrap_err().what
    };
    let expired = refusal(|holder| holder.until = SystemTime::UNIX_EPOCH);
    assert_eq!(expired, "the certificate of \"alice\" has expired");
    assert_eq!(refusal(|holder| holder.roles = Err("no role".into())), "no role");
}

#[test]
fn revoked_certificates_are_refused_at_once() {
    let path = std::env::temp_dir().join(format!("bifrost-revoked-{}", std::process::id()));
    std::fs::write(&path, "# nothing is revoked\n").unwrap();
    let door = Door::Tls(Some(Arc::new(Roles::open(&path).unwrap())));
    let admin = holder(&["admin:*"]);
    assert!(door.access(Some(&admin)).is_ok(), "grants of users do not concern certificates");
    // Other programs write it otherwise.
    std::fs::write(&path, "revoked = [\"12\", \"0A:FF\"]\n").unwrap();
    let refused = door.access(Some(&admin)).unwrap_err();
    assert_eq!(refused.what, "the certificate of \"alice\", aff, is revoked");
    std::fs::remove_file(&path).unwrap();
    for bad in ["revoked = [\"\"]", "revoked = [\"xy\"]", "revoked = [\"0\"]"] {
        assert!(Grants::parse(bad).unwrap_err().contains("is not a serial number"), "{bad}");
    }
}

/// Alice with a certificate of some roles.
fn holder(roles: &[&str]) -> Caller {
    let roles = roles.iter().map(|role| role.parse::<ProjectRole>().unwrap());
    let roles = roles.map(|ProjectRole { project, role }| (project, role)).collect();
    let until = SystemTime::now() + std::time::Duration::from_secs(60);
    Caller::Holder(Arc::new(Holder { name: "alice".into(), serial: "aff".into(), until, roles: Ok(roles) }))
}
