//! The trace of a packet predicts what happens to it, and changes nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, By, Check, Direction, DropReason, GroupId, GroupRule, Hop, Pattern, PeerId, Permission, PortId,
    SecurityGroup, Switch, Verdict,
};
use bifrost_nic::{Offload, parse};
use common::any::*;
use common::*;

#[test]
fn a_trace_predicts_the_verdict_and_changes_nothing() {
    let (mut dropped, mut passed, mut sessions) = (vec![0; DropReason::ALL.len()], 0, 0);
    for seed in 0..if cfg!(miri) { 1 } else { 600 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let crowded = rng.bool();
        let mut switch = Switch::build(&any_tables(&mut rng, crowded), seed).unwrap();
        let mut now = 1000 * SECOND;
        for step in 0..if cfg!(miri) { 20 } else { 80 } {
            now += u64::from(rng.u32(0..40)) * SECOND / 4;
            switch.advance(now);
            if rng.u8(0..40) == 0 {
                switch.replace(&any_tables(&mut rng, crowded)).unwrap();
            }
            // Formatting the whole state is slow, so it is compared only sometimes.
            let before = (step == 79).then(|| format!("{switch:?}"));
            let n = rng.u8(0..4);
            let frame = any_frame(&mut rng, n + 1, crowded);
            let parsed = parse(&frame, frame.len()).unwrap();
            let (told, checks, happened, reason);
            if n < 2 {
                let (port, offload) = (PortId(u32::from(n)), Offload::default());
                let trace = switch.trace_from_guest(port, &frame, frame.len(), offload, &parsed);
                assert!(before.is_none_or(|before| before == format!("{switch:?}")), "seed {seed} step {step}");
                let verdict = *switch.from_guest(port, &frame, frame.len(), offload, &parsed);
                assert!(trace.admitted.is_ok() || trace.verdict == Verdict::drop(trace.admitted.unwrap_err()));
                reason = verdict.drop_reason();
                (told, checks, happened) = (format!("{:?}", trace.verdict), trace.checks, format!("{verdict:?}"));
            } else {
                let (vni, peer) = (vni(100), PeerId(u32::from(n - 1)));
                let trace = switch.trace_from_underlay(vni, peer, &frame, &parsed);
                assert!(before.is_none_or(|before| before == format!("{switch:?}")), "seed {seed} step {step}");
                let verdict = *switch.from_underlay(vni, peer, &frame, &parsed);
                reason = verdict.drop_reason();
                (told, checks, happened) = (format!("{:?}", trace.verdict), trace.checks, format!("{verdict:?}"));
            }
            assert_eq!(told, happened, "seed {seed} step {step}");
            // A failed check is the last one, and its result is the drop reason.
            if let Some(failed) = checks.iter().position(|check| check.result.is_err()) {
                assert_eq!(
                    (failed + 1, checks[failed].result.err()),
                    (checks.len(), reason),
                    "seed {seed} step {step}"
                );
            }
            sessions += usize::from(checks.iter().any(|check| matches!(check.by, By::Session { .. })));
            match reason {
                Some(reason) => dropped[reason.index()] += 1,
                None => passed += 1,
            }
        }
    }
    if cfg!(miri) {
        return;
    }
    // The random worlds must be interesting enough to test this.
    for reason in [
        DropReason::Acl,
        DropReason::GroupEgress,
        DropReason::GroupIngress,
        DropReason::PathMtu,
        DropReason::SpoofedMac,
        DropReason::NoRoute,
        DropReason::UnknownMac,
    ] {
        assert!(dropped[reason.index()] > 10, "{reason}: {}", dropped[reason.index()]);
    }
    assert!(passed > 1000 && sessions > 100, "{passed} {sessions}");
}

/// Guest 1 accepts port 80 by its second rule; its network denies port 23 by its first.
fn guarded() -> Switch {
    let mut tables = tables();
    let to = |port: u16| Pattern { protocol: Some(6), dst_ports: port..=port, ..Pattern::default() };
    let ingress = |port| GroupRule::new(Direction::Ingress, to(port));
    tables.groups = vec![SecurityGroup::new(vec![ingress(22)]), SecurityGroup::new(vec![ingress(80)])];
    tables.ports[0].groups = vec![GroupId(0), GroupId(1)];
    tables.vpcs[0].acl = vec![AclRule { direction: Direction::Ingress, pattern: to(23), allow: false, log: None }];
    let mut switch = Switch::build(&tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

#[test]
fn a_trace_reports_every_check_with_its_rule() {
    let mut switch = guarded();
    let from_peer = |switch: &Switch, frame: &[u8]| {
        switch.trace_from_underlay(vni(100), PeerId(1), frame, &parse(frame, frame.len()).unwrap())
    };
    let check = |by, result| Check { port: PortId(0), direction: Direction::Ingress, by, result, logged: false };
    let groups = |permission| By::Groups { ends: None, permission };

    let syn = segment(3, 1, (5000, 80), SYN, 0, true);
    let trace = from_peer(&switch, &syn);
    assert_eq!(trace.checks, [check(By::Acl(None), Ok(())), check(groups(Permission::Rule(1)), Ok(()))]);
    assert_eq!(trace.port, Some(PortId(0)));
    assert_eq!(from_peer(&switch, &syn).checks, trace.checks, "the same checks twice: no session was created");
    assert_eq!(switch.session_counters().created, 0);

    underlay(&mut switch, 100, 1, &syn).unwrap();
    switch.advance(1007 * SECOND);
    let session = By::Session { state: "opening", origin: Direction::Ingress, idle_s: 7 };
    assert_eq!(from_peer(&switch, &syn).checks[1], check(session, Ok(())));

    let closed = segment(3, 1, (5000, 81), SYN, 0, true);
    let refused = check(groups(Permission::None), Err(DropReason::GroupIngress));
    assert_eq!(from_peer(&switch, &closed).checks[1], refused);
    let denied = segment(3, 1, (5000, 23), SYN, 0, true);
    assert_eq!(from_peer(&switch, &denied).checks, [check(By::Acl(Some(0)), Err(DropReason::Acl))]);
    let error = By::Error { known: false, permission: Permission::None };
    let about_nothing = icmp_error(3, 1, (9, 9), 0);
    assert_eq!(from_peer(&switch, &about_nothing).checks[1], check(error, Err(DropReason::GroupIngress)));
}

#[test]
fn a_trace_reports_the_next_hop() {
    let switch = guarded();
    let hop = |frame: &[u8]| {
        let parsed = parse(frame, frame.len()).unwrap();
        switch.trace_from_guest(PortId(0), frame, frame.len(), Offload::default(), &parsed).hop
    };
    let direct = Hop { routed: false, mac: mac(3), peer: Some(PeerId(1)), vni: vni(100), mtu: 1500 };
    assert_eq!(hop(&tcp((mac(1), mac(3)), "10.0.0.1", "10.0.0.3")), Some(direct));
    assert_eq!(hop(&tcp((mac(1), mac(2)), "10.0.0.1", "10.0.0.2")), Some(Hop { mac: mac(2), peer: None, ..direct }));
    let routed = Hop { routed: true, mac: mac(4), peer: Some(PeerId(2)), ..direct };
    assert_eq!(hop(&tcp((mac(1), bifrost_avs::GATEWAY_MAC), "10.0.0.1", "10.1.2.3")), Some(routed));
    assert_eq!(hop(&tcp((mac(1), bifrost_avs::GATEWAY_MAC), "10.0.0.1", "10.9.0.1")), None);
    assert_eq!(hop(&tcp((mac(1), mac(9)), "10.0.0.1", "10.0.0.3")), None);
}
