use std::collections::BTreeSet;

use bifrost_store::Record;
use proptest::prelude::*;

use super::*;

const AFTER: Duration = Duration::from_secs(10);

fn settings(most_percent: u32) -> Settings {
    Settings { after: AFTER, most_percent, withdrawn: Withdrawn::Backends }
}

fn host(number: usize, is_connected: bool, state: State) -> Seen {
    Seen { name: format!("h{number}"), is_connected, state }
}

/// Hosts h0, h1, ... that are alive, of which some are away.
fn hosts(count: usize, away: &[usize]) -> Vec<Seen> {
    (0..count).map(|n| host(n, !away.contains(&n), State::Alive)).collect()
}

/// Looks each second; gives what the last look says.
fn look_for(absence: &mut Absence, from: Instant, seconds: u64, hosts: &[Seen]) -> Verdict {
    let mut last = Verdict::default();
    for second in 0..=seconds {
        last = absence.look(from + Duration::from_secs(second), true, hosts);
    }
    last
}

fn dead(names: &[&str]) -> Verdict {
    Verdict { dead: names.iter().map(|name| (*name).to_owned()).collect(), frozen: None }
}

fn frozen(vanished: u64, of: u64) -> Verdict {
    Verdict { dead: Vec::new(), frozen: Some(Frozen { vanished, of }) }
}

#[test]
fn a_host_is_dead_after_the_time_and_not_before() {
    let (mut absence, start) = (Absence::new(settings(20)), Instant::now());
    assert_eq!(look_for(&mut absence, start, 9, &hosts(6, &[2])), Verdict::default());
    assert_eq!(absence.look(start + AFTER, true, &hosts(6, &[2])), dead(&["h2"]));
    // A moment is enough to begin again.
    let (mut absence, start) = (Absence::new(settings(20)), Instant::now());
    look_for(&mut absence, start, 9, &hosts(6, &[2]));
    assert_eq!(absence.look(start + AFTER, true, &hosts(6, &[])), Verdict::default());
    let later = start + AFTER + Duration::from_secs(1);
    assert_eq!(look_for(&mut absence, later, 9, &hosts(6, &[2])), Verdict::default());
}

#[test]
fn too_many_at_once_are_not_believed() {
    let cases: &[(usize, &[usize], Verdict)] = &[
        (1, &[0], dead(&["h0"])),
        (3, &[1], dead(&["h1"])),
        (3, &[0, 1], frozen(2, 3)),
        (10, &[3, 7], dead(&["h3", "h7"])),
        (10, &[1, 3, 7], frozen(3, 10)),
        (6, &[0, 1, 2], frozen(3, 6)),
        (4, &[0, 1, 2, 3], frozen(4, 4)),
    ];
    for (count, away, expected) in cases {
        let mut absence = Absence::new(settings(20));
        assert_eq!(look_for(&mut absence, Instant::now(), 10, &hosts(*count, away)), *expected, "{count} {away:?}");
    }
    let mut absence = Absence::new(settings(100));
    assert_eq!(look_for(&mut absence, Instant::now(), 10, &hosts(3, &[0, 1, 2])), dead(&["h0", "h1", "h2"]));
}

/// Some die just before others would: they have vanished together. Long after, they have not.
#[test]
fn those_who_have_died_lately_count() {
    let (mut absence, start) = (Absence::new(settings(20)), Instant::now());
    let at = |second: u64| start + Duration::from_secs(second);
    look_for(&mut absence, start, 5, &hosts(10, &[0, 1]));
    // Another relay has marked the two before this one sees the third go.
    let mut marked = hosts(10, &[2]);
    marked[0] = host(0, false, State::Dead);
    marked[1] = host(1, false, State::Dead);
    assert_eq!(look_for(&mut absence, at(6), 9, &marked), Verdict::default());
    // Seen dead at 6, they count until 16.
    marked[3].is_connected = false;
    let verdict = look_for(&mut absence, at(16), 0, &marked);
    assert_eq!(verdict, frozen(2, 8), "two are away together");
    marked[3].is_connected = true;
    assert_eq!(look_for(&mut absence, at(17), 0, &marked), dead(&["h2"]));
    let mut absence = Absence::new(settings(20));
    look_for(&mut absence, start, 5, &hosts(10, &[2]));
    assert_eq!(look_for(&mut absence, at(6), 4, &marked), frozen(3, 10), "the third one vanished before they died");
}

#[test]
fn time_counts_only_while_all_is_known() {
    let (mut absence, start) = (Absence::new(settings(20)), Instant::now());
    let away = hosts(6, &[2]);
    let at = |second: u64| start + Duration::from_secs(second);
    look_for(&mut absence, start, 8, &away);
    // The store is away for long.
    for second in 9..60 {
        assert_eq!(absence.look(at(second), false, &away), Verdict::default());
    }
    assert_eq!(look_for(&mut absence, at(60), 9, &away), Verdict::default());
    assert_eq!(absence.look(at(70), true, &away), dead(&["h2"]));
    // The process stands still.
    let (mut absence, at) = (Absence::new(settings(20)), |second: u64| start + Duration::from_secs(second));
    look_for(&mut absence, start, 8, &away);
    assert_eq!(look_for(&mut absence, at(100), 9, &away), Verdict::default());
    assert_eq!(absence.look(at(110), true, &away), dead(&["h2"]));
}

#[test]
fn a_host_that_nobody_has_seen_is_not_dead() {
    let mut absence = Absence::new(settings(20));
    let mut all = hosts(6, &[]);
    all.extend((6..20).map(|n| host(n, false, State::New)));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(look_for(&mut absence, Instant::now(), 100, &all), Verdict::default());
    let mut never = Absence::new(Settings { after: Duration::ZERO, ..settings(20) });
    assert_eq!(look_for(&mut never, Instant::now(), 100, &hosts(6, &[1])), Verdict::default());
}

#[test]
fn marks_are_those_of_the_store() {
    let mut marks = Marks::default();
    let death = Death { since_ms: 7, by: "r1".into(), withdrawn: Withdrawn::Routes };
    let put = |host: &str, mark: &Mark| (key(host), Some(serde_json::to_vec(mark).unwrap()));
    let dead = Mark { dead: Some(death.clone()) };
    let changes = vec![put("h1", &dead), put("h2", &Mark::default()), ("/other".to_owned(), None)];
    assert_eq!(marks.follow(Events { revision: 5, changes }), ["h1", "h2"]);
    assert_eq!((marks.death("h1"), marks.death("h2"), marks.death("h3")), (Some(&death), None, None));
    assert_eq!(marks.iter().collect::<Vec<_>>(), [("h1", 5), ("h2", 5)]);
    // What a later version says in other words is not that a host is dead.
    let odd = vec![(key("h1"), Some(b"{\"dead\": 7}".to_vec()))];
    assert_eq!((marks.follow(Events { revision: 6, changes: odd }), marks.death("h1")), (vec!["h1".to_owned()], None));
    let record =
        |host: &str, mark: &Mark| Record { key: key(host), value: serde_json::to_vec(mark).unwrap(), revision: 8 };
    let snapshot = Snapshot { revision: 9, records: vec![record("h1", &dead), record("h3", &Mark::default())] };
    assert_eq!(marks.load(snapshot), ["h1", "h2", "h3"]);
    assert_eq!((marks.get("h2"), marks.get("h3")), (None, Some(&(Mark::default(), 8))));
    let json = serde_json::to_value(&dead).unwrap();
    assert_eq!(json, serde_json::json!({"dead": {"since_ms": 7, "by": "r1", "withdrawn": "routes"}}));
}

/// What happens between two looks.
#[derive(Clone, Debug)]
struct Step {
    /// Tenths of a second.
    pause: u64,
    is_sure: bool,
    /// Hosts that come or go.
    flips: BTreeSet<usize>,
    /// Whether verdicts are made marks, and hosts that are back are alive again.
    is_marked: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pause = prop_oneof![20 => 5..15u64, 2 => 45..51u64, 1 => 51..200u64];
    let flips = prop_oneof![3 => Just(BTreeSet::new()), 2 => prop::collection::btree_set(0..8usize, 1..3)];
    let step = (pause, prop::bool::weighted(0.97), flips, prop::bool::weighted(0.9));
    let step = step.prop_map(|(pause, is_sure, flips, is_marked)| Step { pause, is_sure, flips, is_marked });
    prop::collection::vec(step, 1..120)
}

/// A look as the oracle remembers it: everything.
struct Look {
    at: Instant,
    is_sure: bool,
    hosts: Vec<Seen>,
}

/// From the definition, with all looks in mind.
fn judge(looks: &[Look], settings: Settings) -> Verdict {
    let Some(now) = looks.last().filter(|now| now.is_sure) else { return Verdict::default() };
    // The looks from which on all is known without a gap; and from the last time on that it was not.
    let mut whole = looks.len() - 1;
    while whole > 0 && looks[whole - 1].is_sure && looks[whole].at - looks[whole - 1].at <= MOST_BETWEEN {
        whole -= 1;
    }
    let is_absent = |look: &Look, n: usize| look.hosts[n].state == State::Alive && !look.hosts[n].is_connected;
    let absent_since = |n: usize| {
        let looks = looks[whole..].iter().rev();
        looks.take_while(|look| is_absent(look, n)).last().map(|look| look.at)
    };
    // A host has died at the first look that finds it dead, and the one before did not; while nothing is known, nobody looks.
    let died_lately = |n: usize| {
        let sure: Vec<(usize, &Look)> = looks.iter().enumerate().filter(|(_, look)| look.is_sure).collect();
        let of_host = sure.iter().rev().take_while(|(_, look)| look.hosts[n].state == State::Dead).last();
        of_host.is_some_and(|(at, look)| *at > 0 && looks[at - 1].is_sure && now.at - look.at < settings.after)
    };
    let all = 0..now.hosts.len();
    let dead: Vec<String> = all
        .clone()
        .filter(|n| absent_since(*n).is_some_and(|since| now.at - since >= settings.after))
        .map(|n| now.hosts[n].name.clone())
        .collect();
    if dead.is_empty() {
        return Verdict::default();
    }
    let died = all.clone().filter(|n| died_lately(*n)).count();
    let vanished = all.clone().filter(|n| is_absent(now, *n)).count() + died;
    let of = all.filter(|n| now.hosts[*n].state == State::Alive).count() + died;
    if vanished > 1 && vanished as f64 / of as f64 > f64::from(settings.most_percent) / 100.0 {
        return frozen(vanished as u64, of as u64);
    }
    Verdict { dead, frozen: None }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Whatever comes and goes: a look says what follows from all that was seen.
    #[test]
    fn looks_say_what_an_oracle_says_that_remembers_everything(
        steps in steps(), most_percent in prop::sample::select(vec![0, 20, 40, 100]),
    ) {
        let settings = settings(most_percent);
        let (mut absence, mut now) = (Absence::new(settings), Instant::now());
        let mut all = hosts(8, &[]);
        all[7].state = State::New;
        let mut looks = Vec::new();
        for step in steps {
            now += Duration::from_millis(step.pause * 100);
            for n in step.flips {
                all[n].is_connected = !all[n].is_connected;
            }
            let verdict = absence.look(now, step.is_sure, &all);
            looks.push(Look { at: now, is_sure: step.is_sure, hosts: all.clone() });
            prop_assert_eq!(&verdict, &judge(&looks, settings));
            prop_assert!(verdict.frozen.is_none() || verdict.dead.is_empty());
            if step.is_marked {
                for host in &mut all {
                    if verdict.dead.contains(&host.name) {
                        host.state = State::Dead;
                    } else if host.is_connected {
                        host.state = State::Alive;
                    }
                }
            }
        }
    }
}
