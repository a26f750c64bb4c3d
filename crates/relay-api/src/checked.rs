//! Messages whose contents are within the limits.

use std::net::IpAddr;

use ipnet::IpNet;
use prost::bytes::Bytes;

use crate::limits::{
    MAX_ANSWERS, MAX_CHANGES, MAX_HOST, MAX_IMPAIRED, MAX_KEY, MAX_KIND, MAX_PROBLEM_TEXT, MAX_PROBLEMS, MAX_SPEC,
    MAX_TEXT, VERSIONS,
};
use crate::pb;

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromAgent {
    /// First of all.
    Hello(Hello),
    /// What is in force.
    Report(Report),
    /// Questions about routes, at most [`MAX_ANSWERS`].
    Resolve(Vec<Question>),
}

/// Where an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    /// The VPC.
    pub vni: u32,
    /// The address.
    pub address: IpAddr,
}

/// An answer about a route. It takes the place of all earlier ones about these addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The VPC.
    pub vni: u32,
    /// The addresses; no host bits are set.
    pub range: IpNet,
    /// What is known of them.
    pub what: Answered,
}

/// What is known of a range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answered {
    /// A vNIC on another host.
    Hop {
        /// The host's name.
        peer: String,
        /// The vNIC's MAC address.
        mac: [u8; 6],
    },
    /// Nobody has them.
    Nothing,
    /// What was known holds no more; it is to be asked for again.
    Withdrawn,
}

/// Who the agent is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The versions that it speaks, lowest and highest.
    pub versions: (u32, u32),
    /// The host's name.
    pub host: String,
    /// Another text with each start of the agent.
    pub instance: String,
    /// Name and version of the program.
    pub software: String,
    /// The highest revision that it has had an InSync of; 0: none.
    pub revision: u64,
}

/// What is in force on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All changes up to this revision are, but for the problems.
    pub revision: u64,
    /// How many objects of the fleet are.
    pub objects: u64,
    /// What is not, at most [`MAX_PROBLEMS`].
    pub problems: Vec<Problem>,
    /// How many more problems there are.
    pub more_problems: u64,
    /// How the paths to other hosts are.
    pub paths: PathHealth,
}

/// How the paths from a host to others are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathHealth {
    /// How many hosts it has connections with.
    pub peers: u64,
    /// Those of them with paths that do not work, at most [`MAX_IMPAIRED`].
    pub impaired: Vec<ImpairedPeer>,
    /// How many more of these there are.
    pub more_impaired: u64,
}

/// A host to which not all paths work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImpairedPeer {
    /// Its name.
    pub peer: String,
    /// How many paths to it are not drained.
    pub paths: u32,
    /// How many of them carry traffic or could.
    pub working: u32,
}

/// An object that is not as it is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// Its kind.
    pub kind: String,
    /// Its key.
    pub key: String,
    /// Why, and what to do.
    pub what: String,
}

/// What a relay says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToAgent {
    /// First of all.
    Welcome(Welcome),
    /// Part of what changes.
    Changes(Vec<Change>),
    /// All changes up to this revision were sent.
    InSync(u64),
    /// Answers about routes, at most [`MAX_ANSWERS`].
    Answers(Vec<Answer>),
}

/// The relay speaks with this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both speak from here on.
    pub version: u32,
    /// Name and version of the relay.
    pub relay: String,
    /// Whether the store has not come to the agent's revision: it was restored from a backup.
    pub restored: bool,
}

/// What an object of the host is to be. Kind and spec may be ones that the host's release does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Its kind.
    pub kind: String,
    /// Its key.
    pub key: String,
    /// JSON with the keys of `bifrostd`'s table; none: it is to go.
    pub spec: Option<Bytes>,
    /// When the intent behind it was committed, milliseconds since 1970; 0: unknown.
    pub committed_ms: u64,
}

impl Change {
    /// About how many bytes of a message it is.
    pub fn bytes(&self) -> usize {
        self.kind.len() + self.key.len() + self.spec.as_ref().map_or(0, Bytes::len) + 32
    }
}

/// Why a message breaks the protocol. The end that gets one ends the stream with `INVALID_ARGUMENT` and this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct Invalid {
    /// The field.
    pub field: &'static str,
    /// What is wrong with it.
    pub what: String,
}

/// The highest version that is spoken with an end that speaks these, lowest and highest.
///
/// # Errors
/// There is none that both speak.
pub fn agree(versions: (u32, u32)) -> Result<u32, Invalid> {
    let highest = versions.1.min(VERSIONS.1);
    if highest >= versions.0.max(VERSIONS.0) {
        return Ok(highest);
    }
    let (lowest, highest) = VERSIONS;
    let (low, high) = versions;
    let what = format!("{low} to {high} are spoken there, and {lowest} to {highest} here; upgrade the older one");
    Err(invalid("version_min", what))
}

impl TryFrom<pb::FromAgent> for FromAgent {
    type Error = Invalid;

    fn try_from(message: pb::FromAgent) -> Result<FromAgent, Invalid> {
        match message.message {
            None => Err(unknown()),
            Some(pb::from_agent::Message::Hello(hello)) => {
                let pb::Hello { version_min, version_max, host, instance, software, revision } = hello;
                let versions = (version_min, version_max);
                let instance = text("hello.instance", instance, 0, MAX_TEXT)?;
                let software = text("hello.software", software, 0, MAX_TEXT)?;
                Ok(FromAgent::Hello(Hello { versions, host: host_name(host)?, instance, software, revision }))
            }
            Some(pb::from_agent::Message::Report(report)) => {
                let pb::Report { revision, objects, problems, more_problems, paths } = report;
                if problems.len() > MAX_PROBLEMS {
                    let what = format!("{} are more than {MAX_PROBLEMS}", problems.len());
                    return Err(invalid("report.problems", what));
                }
                let problems = problems.into_iter().map(Problem::try_from).collect::<Result<_, _>>()?;
                let paths = paths.map(PathHealth::try_from).transpose()?.unwrap_or_default();
                Ok(FromAgent::Report(Report { revision, objects, problems, more_problems, paths }))
            }
            Some(pb::from_agent::Message::Resolve(pb::Resolve { questions })) => {
                at_most("resolve.questions", questions.len(), MAX_ANSWERS)?;
                Ok(FromAgent::Resolve(questions.into_iter().map(Question::try_from).collect::<Result<_, _>>()?))
            }
        }
    }
}

impl From<FromAgent> for pb::FromAgent {
    fn from(message: FromAgent) -> pb::FromAgent {
        let message = match message {
            FromAgent::Hello(Hello { versions: (version_min, version_max), host, instance, software, revision }) => {
                let hello = pb::Hello { version_min, version_max, host, instance, software, revision };
                pb::from_agent::Message::Hello(hello)
            }
            FromAgent::Report(Report { revision, objects, problems, more_problems, paths }) => {
                let problems = problems.into_iter().map(pb::Problem::from).collect();
                let paths = Some(paths.into());
                pb::from_agent::Message::Report(pb::Report { revision, objects, problems, more_problems, paths })
            }
            FromAgent::Resolve(questions) => {
                let questions = questions.into_iter().map(pb::Question::from).collect();
                pb::from_agent::Message::Resolve(pb::Resolve { questions })
            }
        };
        pb::FromAgent { message: Some(message) }
    }
}

impl TryFrom<pb::PathHealth> for PathHealth {
    type Error = Invalid;

    fn try_from(health: pb::PathHealth) -> Result<PathHealth, Invalid> {
        let pb::PathHealth { peers, impaired, more_impaired } = health;
        if impaired.len() > MAX_IMPAIRED {
            let what = format!("{} are more than {MAX_IMPAIRED}", impaired.len());
            return Err(invalid("report.paths.impaired", what));
        }
        let impaired = impaired.into_iter().map(|pb::ImpairedPeer { peer, paths, working }| {
            Ok(ImpairedPeer { peer: text("report.paths.impaired.peer", peer, 1, MAX_HOST)?, paths, working })
        });
        Ok(PathHealth { peers, impaired: impaired.collect::<Result<_, _>>()?, more_impaired })
    }
}

impl From<PathHealth> for pb::PathHealth {
    fn from(health: PathHealth) -> pb::PathHealth {
        let PathHealth { peers, impaired, more_impaired } = health;
        let impaired = impaired.into_iter();
        let impaired = impaired.map(|ImpairedPeer { peer, paths, working }| pb::ImpairedPeer { peer, paths, working });
        pb::PathHealth { peers, impaired: impaired.collect(), more_impaired }
    }
}

impl TryFrom<pb::Problem> for Problem {
    type Error = Invalid;

    fn try_from(problem: pb::Problem) -> Result<Problem, Invalid> {
        Ok(Problem {
            kind: kind(problem.kind)?,
            key: text("key", problem.key, 1, MAX_KEY)?,
            what: bounded("problem.what", problem.what, 0, MAX_PROBLEM_TEXT)?,
        })
    }
}

impl From<Problem> for pb::Problem {
    /// What is longer than it may be is cut off.
    fn from(Problem { kind, key, mut what }: Problem) -> pb::Problem {
        what.truncate(what.floor_char_boundary(MAX_PROBLEM_TEXT));
        pb::Problem { kind, key, what }
    }
}

impl TryFrom<pb::ToAgent> for ToAgent {
    type Error = Invalid;

    fn try_from(message: pb::ToAgent) -> Result<ToAgent, Invalid> {
        match message.message {
            None => Err(unknown()),
            Some(pb::to_agent::Message::Welcome(pb::Welcome { version, relay, restored })) => {
                let relay = text("welcome.relay", relay, 0, MAX_TEXT)?;
                Ok(ToAgent::Welcome(Welcome { version, relay, restored }))
            }
            Some(pb::to_agent::Message::Changes(pb::Changes { changes })) => {
                if changes.len() > MAX_CHANGES {
                    return Err(invalid("changes", format!("{} are more than {MAX_CHANGES}", changes.len())));
                }
                Ok(ToAgent::Changes(changes.into_iter().map(Change::try_from).collect::<Result<_, _>>()?))
            }
            Some(pb::to_agent::Message::InSync(pb::InSync { revision })) => Ok(ToAgent::InSync(revision)),
            Some(pb::to_agent::Message::Answers(pb::Answers { answers })) => {
                at_most("answers", answers.len(), MAX_ANSWERS)?;
                Ok(ToAgent::Answers(answers.into_iter().map(Answer::try_from).collect::<Result<_, _>>()?))
            }
        }
    }
}

impl From<ToAgent> for pb::ToAgent {
    fn from(message: ToAgent) -> pb::ToAgent {
        let message = match message {
            ToAgent::Welcome(Welcome { version, relay, restored }) => {
                pb::to_agent::Message::Welcome(pb::Welcome { version, relay, restored })
            }
            ToAgent::Changes(changes) => {
                let changes = changes.into_iter().map(pb::Change::from).collect();
                pb::to_agent::Message::Changes(pb::Changes { changes })
            }
            ToAgent::InSync(revision) => pb::to_agent::Message::InSync(pb::InSync { revision }),
            ToAgent::Answers(answers) => {
                let answers = answers.into_iter().map(pb::Answer::from).collect();
                pb::to_agent::Message::Answers(pb::Answers { answers })
            }
        };
        pb::ToAgent { message: Some(message) }
    }
}

impl TryFrom<pb::Question> for Question {
    type Error = Invalid;

    fn try_from(question: pb::Question) -> Result<Question, Invalid> {
        Ok(Question { vni: question.vni, address: address("question.address", &question.address)? })
    }
}

impl From<Question> for pb::Question {
    fn from(Question { vni, address }: Question) -> pb::Question {
        pb::Question { vni, address: octets(address).into() }
    }
}

impl TryFrom<pb::Answer> for Answer {
    type Error = Invalid;

    fn try_from(answer: pb::Answer) -> Result<Answer, Invalid> {
        let pb::Answer { vni, address: first, length, hop, withdrawn } = answer;
        let range = u8::try_from(length).ok().and_then(|length| {
            let range = IpNet::new(address("answer.address", &first).ok()?, length).ok()?;
            (range.trunc() == range).then_some(range)
        });
        let range = range.ok_or_else(|| invalid("answer", "is not about a prefix without host bits".to_owned()))?;
        let what = match (hop, withdrawn) {
            (None, false) => Answered::Nothing,
            (None, true) => Answered::Withdrawn,
            (Some(_), true) => return Err(invalid("answer", "is withdrawn and has a hop".to_owned())),
            (Some(pb::Hop { peer, mac }), false) => {
                let mac = (&*mac).try_into().map_err(|_| invalid("hop.mac", "does not have 6 bytes".to_owned()))?;
                Answered::Hop { peer: host_name(peer)?, mac }
            }
        };
        Ok(Answer { vni, range, what })
    }
}

impl From<Answer> for pb::Answer {
    fn from(Answer { vni, range, what }: Answer) -> pb::Answer {
        let (address, length) = (octets(range.addr()).into(), u32::from(range.prefix_len()));
        let withdrawn = what == Answered::Withdrawn;
        let hop = match what {
            Answered::Hop { peer, mac } => Some(pb::Hop { peer, mac: mac.to_vec().into() }),
            Answered::Nothing | Answered::Withdrawn => None,
        };
        pb::Answer { vni, address, length, hop, withdrawn }
    }
}

impl TryFrom<pb::Change> for Change {
    type Error = Invalid;

    fn try_from(change: pb::Change) -> Result<Change, Invalid> {
        let pb::Change { kind: name, key, spec, committed_ms } = change;
        let bytes = spec.as_ref().map_or(0, Bytes::len);
        if bytes > MAX_SPEC {
            return Err(invalid("change.spec", format!("{bytes} bytes are more than {MAX_SPEC}")));
        }
        Ok(Change { kind: kind(name)?, key: text("key", key, 1, MAX_KEY)?, spec, committed_ms })
    }
}

impl From<Change> for pb::Change {
    fn from(Change { kind, key, spec, committed_ms }: Change) -> pb::Change {
        pb::Change { kind, key, spec, committed_ms }
    }
}

fn address(field: &'static str, octets: &[u8]) -> Result<IpAddr, Invalid> {
    let v4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(octets).map(IpAddr::from))
        .map_err(|_| invalid(field, format!("has {} bytes, not 4 or 16", octets.len())))
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn at_most(field: &'static str, count: usize, most: usize) -> Result<(), Invalid> {
    if count <= most { Ok(()) } else { Err(invalid(field, format!("{count} are more than {most}"))) }
}

/// A message that a later version may have.
fn unknown() -> Invalid {
    invalid("message", "is empty, or of a kind that this version does not have".to_owned())
}

/// A host's name: 1 to 63 of `a-z`, `0-9`, `-` and `.`.
pub(crate) fn host_name(name: String) -> Result<String, Invalid> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_good = (1..=MAX_HOST).contains(&name.len())
        && name.chars().all(|c| plain(c) || c == '-' || c == '.')
        && name.starts_with(plain)
        && name.ends_with(plain);
    if is_good {
        return Ok(name);
    }
    let what = format!("a host's name is 1 to {MAX_HOST} of a-z, 0-9, '-' and '.', between letters or digits");
    Err(invalid("host", what))
}

fn kind(name: String) -> Result<String, Invalid> {
    let is_good = (1..=MAX_KIND).contains(&name.len()) && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    if is_good { Ok(name) } else { Err(invalid("kind", format!("is 1 to {MAX_KIND} of a-z and '_'"))) }
}

/// One line.
fn text(field: &'static str, text: String, least: usize, most: usize) -> Result<String, Invalid> {
    match text.chars().any(char::is_control) {
        true => Err(invalid(field, "has control characters".to_owned())),
        false => bounded(field, text, least, most),
    }
}

fn bounded(field: &'static str, text: String, least: usize, most: usize) -> Result<String, Invalid> {
    if (least..=most).contains(&text.len()) {
        return Ok(text);
    }
    Err(invalid(field, format!("has {} bytes; {least} to {most} are allowed", text.len())))
}

pub(crate) fn invalid(field: &'static str, what: String) -> Invalid {
    Invalid { field, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(host: &str) -> pb::FromAgent {
        FromAgent::Hello(Hello { versions: (1, 1), host: host.into(), ..Hello::default() }).into()
    }

    fn change(kind: &str, key: &str, spec: usize) -> pb::ToAgent {
        let spec = Some(vec![b' '; spec].into());
        ToAgent::Changes(vec![Change { kind: kind.into(), key: key.into(), spec, committed_ms: 7 }]).into()
    }

    #[test]
    fn what_was_sent_arrives() {
        let problem = Problem { kind: "port".into(), key: "p".into(), what: "no such\nnamespace".into() };
        let impaired = vec![ImpairedPeer { peer: "h2".into(), paths: 4, working: 2 }];
        let paths = PathHealth { peers: 3, impaired, more_impaired: 1 };
        let report = Report { revision: 7, objects: 8, problems: vec![problem], more_problems: 9, paths };
        let versions = (1, 3);
        let (host, software) = ("host-a".into(), "bifrost-agent 1".into());
        let hello = Hello { versions, host, instance: "1".into(), software, revision: 7 };
        let question = |address: &str| Question { vni: 4096, address: address.parse().unwrap() };
        let resolve = FromAgent::Resolve(vec![question("10.0.0.1"), question("fd00::1")]);
        for message in [FromAgent::Report(report), FromAgent::Hello(hello), resolve] {
            assert_eq!(FromAgent::try_from(pb::FromAgent::from(message.clone())), Ok(message));
        }
        let gone = Change { kind: "vpc".into(), key: "1".into(), spec: None, committed_ms: 3 };
        let welcome = Welcome { version: 1, relay: "bifrost-relay 1".into(), restored: true };
        let answer = |range: &str, what| Answer { vni: 4096, range: range.parse().unwrap(), what };
        let hop = Answered::Hop { peer: "h2".into(), mac: [2, 0, 0, 0, 0, 1] };
        let answers = ToAgent::Answers(vec![
            answer("10.0.0.1/32", hop),
            answer("0.0.0.0/0", Answered::Nothing),
            answer("fd00::/8", Answered::Withdrawn),
        ]);
        for message in [ToAgent::Welcome(welcome), ToAgent::Changes(vec![gone]), ToAgent::InSync(u64::MAX), answers] {
            assert_eq!(ToAgent::try_from(pb::ToAgent::from(message.clone())), Ok(message));
        }
    }

    #[test]
    fn hosts_have_plain_names() {
        for good in ["host-a", "h", "a.example.com", &"x".repeat(63)] {
            assert!(FromAgent::try_from(hello(good)).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", ".a", "Host", "a b", "a/b", "ä", "../etc", &"x".repeat(64)] {
            let error = FromAgent::try_from(hello(bad)).unwrap_err();
            assert_eq!(error.field, "host", "{bad}");
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let field = |message: pb::ToAgent| ToAgent::try_from(message).unwrap_err().field;
        assert!(ToAgent::try_from(change("port", "p", MAX_SPEC)).is_ok());
        assert_eq!(field(change("port", "p", MAX_SPEC + 1)), "change.spec");
        assert_eq!(field(change("port", &"x".repeat(MAX_KEY + 1), 1)), "key");
        assert_eq!(field(change("port", "", 1)), "key");
        assert_eq!(field(change("port", "a\nb", 1)), "key");
        assert_eq!(field(change("", "p", 1)), "kind");
        assert_eq!(field(change("Port", "p", 1)), "kind");
        assert_eq!(field(change(&"k".repeat(33), "p", 1)), "kind");
        assert_eq!(field(pb::ToAgent::default()), "message");
        let one = Change { kind: "vpc".into(), key: "1".into(), ..Change::default() };
        assert_eq!(field(ToAgent::Changes(vec![one; MAX_CHANGES + 1]).into()), "changes");
        let problem = Problem { kind: "vpc".into(), key: "1".into(), what: String::new() };
        let many = Report { problems: vec![problem; MAX_PROBLEMS + 1], ..Report::default() };
        assert_eq!(
            FromAgent::try_from(pb::FromAgent::from(FromAgent::Report(many))).unwrap_err().field,
            "report.problems"
        );
        let refused = |impaired: Vec<ImpairedPeer>| {
            let paths = PathHealth { impaired, ..PathHealth::default() };
            let report = FromAgent::Report(Report { paths, ..Report::default() });
            FromAgent::try_from(pb::FromAgent::from(report)).unwrap_err().field
        };
        let impaired = |peer: &str| ImpairedPeer { peer: peer.into(), ..ImpairedPeer::default() };
        assert_eq!(refused(vec![impaired("h2"); MAX_IMPAIRED + 1]), "report.paths.impaired");
        for name in ["", "h\n2", &"h".repeat(MAX_HOST + 1)] {
            assert_eq!(refused(vec![impaired(name)]), "report.paths.impaired.peer");
        }
        // Agents of earlier releases do not report paths.
        let report = pb::Report { revision: 1, ..pb::Report::default() };
        let message = pb::FromAgent { message: Some(pb::from_agent::Message::Report(report)) };
        let expected = FromAgent::Report(Report { revision: 1, ..Report::default() });
        assert_eq!(FromAgent::try_from(message), Ok(expected));
    }

    #[test]
    fn answers_that_say_nothing_are_refused() {
        let good = pb::Answer { vni: 1, address: vec![10, 0, 0, 0].into(), length: 8, hop: None, withdrawn: false };
        let hop = |peer: &str, mac: usize| Some(pb::Hop { peer: peer.into(), mac: vec![2; mac].into() });
        assert!(Answer::try_from(pb::Answer { hop: hop("h", 6), ..good.clone() }).is_ok());
        let bad = [
            pb::Answer { length: 33, ..good.clone() },
            pb::Answer { length: 300, ..good.clone() },
            pb::Answer { length: 4, ..good.clone() },
            pb::Answer { address: vec![10; 5].into(), ..good.clone() },
            pb::Answer { hop: hop("h", 5), ..good.clone() },
            pb::Answer { hop: hop("", 6), ..good.clone() },
            pb::Answer { hop: hop("h", 6), withdrawn: true, ..good.clone() },
        ];
        bad.into_iter().for_each(|bad| assert!(Answer::try_from(bad.clone()).is_err(), "{bad:?}"));
        let message = pb::to_agent::Message::Answers(pb::Answers { answers: vec![good; MAX_ANSWERS + 1] });
        assert!(ToAgent::try_from(pb::ToAgent { message: Some(message) }).is_err());
        let question = pb::Question { vni: 1, address: vec![1; 3].into() };
        let message = pb::from_agent::Message::Resolve(pb::Resolve { questions: vec![question] });
        assert!(FromAgent::try_from(pb::FromAgent { message: Some(message) }).is_err());
    }

    #[test]
    fn a_long_problem_is_cut_between_characters() {
        let problem = Problem { kind: "vpc".into(), key: "1".into(), what: format!("x{}", "ä".repeat(1000)) };
        let report = FromAgent::Report(Report { problems: vec![problem], ..Report::default() });
        let FromAgent::Report(arrived) = FromAgent::try_from(pb::FromAgent::from(report)).unwrap() else {
            unreachable!()
        };
        assert_eq!(arrived.problems[0].what.len(), MAX_PROBLEM_TEXT - 1);
    }

    #[test]
    fn versions_have_to_meet() {
        assert_eq!((agree((1, 1)), agree((2, 2)), agree((0, 9))), (Ok(1), Ok(2), Ok(2)));
        for none in [(0, 0), (3, 4), (9, 0)] {
            assert!(agree(none).is_err(), "{none:?}");
        }
    }
}
