//! Messages between relays and agents, and what hosts and operators show to get in: what is accepted is within the
//! limits, and survives another way over the wire.

use std::str::FromStr as _;

use bifrost_intent::Key;
use bifrost_relay_api::enroll::{self, Asked, Signed, Token};
use bifrost_relay_api::limits::{
    MAX_ANSWERS, MAX_CERTIFICATES, MAX_CHANGES, MAX_HOST, MAX_IMPAIRED, MAX_KEY, MAX_KIND, MAX_MESSAGE,
    MAX_PROBLEM_TEXT, MAX_PROBLEMS, MAX_REQUEST, MAX_SPEC, MAX_TEXT,
};
use bifrost_relay_api::names::Names;
use bifrost_relay_api::{Answered, FromAgent, ToAgent, pb, pieces};
use prost::Message;

use crate::Input;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.below(8) {
        0 => agent(input.rest()),
        1 => relay(input.rest()),
        2 => enrolling(input.rest()),
        3 => certificate(input.rest()),
        4 => token(&String::from_utf8_lossy(input.rest())),
        5 => key(&String::from_utf8_lossy(input.rest())),
        // Messages that are larger than an input: many or long fields.
        6 => many(&mut input),
        _ => long(&mut input),
    }
}

fn agent(bytes: &[u8]) {
    let Ok(message) = pb::FromAgent::decode(bytes) else { return };
    from_agent(message);
}

fn from_agent(message: pb::FromAgent) {
    let Ok(checked) = FromAgent::try_from(message) else { return };
    match &checked {
        FromAgent::Hello(hello) => {
            assert!((1..=MAX_HOST).contains(&hello.host.len()) && !hello.host.contains(['/', '\0']), "{hello:?}");
            assert!(hello.instance.len() <= MAX_TEXT && hello.software.len() <= MAX_TEXT);
        }
        FromAgent::Report(report) => {
            assert!(report.problems.len() <= MAX_PROBLEMS && report.paths.impaired.len() <= MAX_IMPAIRED);
            for problem in &report.problems {
                assert!(problem.kind.len() <= MAX_KIND && problem.key.len() <= MAX_KEY);
                assert!(problem.what.len() <= MAX_PROBLEM_TEXT);
            }
        }
        FromAgent::Resolve(questions) => assert!(questions.len() <= MAX_ANSWERS),
    }
    let again = pb::FromAgent::from(checked.clone()).encode_to_vec();
    let again = pb::FromAgent::decode(&again[..]).unwrap_or_else(|error| panic!("{error}: {checked:?}"));
    assert_eq!(FromAgent::try_from(again), Ok(checked));
}

fn relay(bytes: &[u8]) {
    let Ok(message) = pb::ToAgent::decode(bytes) else { return };
    to_agent(message);
}

fn to_agent(message: pb::ToAgent) {
    let Ok(checked) = ToAgent::try_from(message) else { return };
    if let ToAgent::Changes(changes) = &checked {
        assert!(changes.len() <= MAX_CHANGES);
        for change in changes {
            assert!((1..=MAX_KIND).contains(&change.kind.len()) && (1..=MAX_KEY).contains(&change.key.len()));
            assert!(change.spec.as_ref().is_none_or(|spec| spec.len() <= MAX_SPEC));
            assert!(!change.key.contains('\n'), "a key is one line of a log");
        }
        for piece in pieces(changes.iter().cloned()) {
            assert!(pb::ToAgent::from(ToAgent::Changes(piece)).encoded_len() <= MAX_MESSAGE);
        }
    }
    if let ToAgent::Answers(answers) = &checked {
        assert!(answers.len() <= MAX_ANSWERS);
        for answer in answers {
            assert_eq!(answer.range, answer.range.trunc(), "no host bits");
            if let Answered::Hop { peer, .. } = &answer.what {
                assert!((1..=MAX_HOST).contains(&peer.len()), "{answer:?}");
            }
        }
    }
    let again = pb::ToAgent::from(checked.clone()).encode_to_vec();
    let again = pb::ToAgent::decode(&again[..]).unwrap_or_else(|error| panic!("{error}: {checked:?}"));
    assert_eq!(ToAgent::try_from(again), Ok(checked));
}

fn enrolling(bytes: &[u8]) {
    let within = |asked: &Asked| asked.host.len() <= MAX_HOST && (1..=MAX_REQUEST).contains(&asked.request.len());
    if let Ok((_, asked)) = pb::Enrolling::decode(bytes).map_err(drop).and_then(|m| enroll::enrolling(m).map_err(drop))
    {
        assert!(within(&asked), "{asked:?}");
    }
    if let Ok(asked) = pb::Renewal::decode(bytes).map_err(drop).and_then(|m| Asked::try_from(m).map_err(drop)) {
        assert!(within(&asked), "{asked:?}");
    }
    if let Ok(signed) = pb::Signed::decode(bytes).map_err(drop).and_then(|m| Signed::try_from(m).map_err(drop)) {
        assert!(signed.certificates.len() <= MAX_CERTIFICATES && signed.authorities.len() <= MAX_CERTIFICATES);
    }
}

fn certificate(bytes: &[u8]) {
    let Some(names) = Names::of(&bytes.to_vec().into()) else { return };
    assert!(names.serial.bytes().all(|digit| digit.is_ascii_hexdigit()), "{names:?}");
}

fn token(text: &str) {
    if let Ok(token) = Token::from_str(text) {
        assert_eq!(token.to_string(), text.trim().to_ascii_lowercase());
    }
}

fn key(text: &str) {
    if let Ok(key) = text.parse::<Key>() {
        assert_eq!(key.to_string().parse(), Ok(key.clone()));
        assert_eq!(Key::of_store(&key.in_store()), Some(key.clone()), "the store names it");
        assert!(key.on_host().len() <= MAX_KEY, "{key} is too long for a host");
    }
    if let Some(key) = Key::of_store(text) {
        assert_eq!(key.in_store(), text);
    }
}

fn many(input: &mut Input<'_>) {
    let count = usize::from(input.u16()) % (2 * MAX_CHANGES);
    let change = pb::Change { kind: "vpc".to_owned(), key: "7".to_owned(), spec: None, committed_ms: input.u64() };
    let problem = pb::Problem { kind: "vpc".to_owned(), key: "7".to_owned(), what: String::new() };
    let impaired = pb::ImpairedPeer { peer: "h".to_owned(), paths: input.u32(), working: input.u32() };
    let changes = pb::Changes { changes: vec![change; count] };
    to_agent(pb::ToAgent { message: Some(pb::to_agent::Message::Changes(changes)) });
    let paths = pb::PathHealth { impaired: vec![impaired; count / 8], ..pb::PathHealth::default() };
    let report = pb::Report { problems: vec![problem; count / 8], paths: Some(paths), ..pb::Report::default() };
    from_agent(pb::FromAgent { message: Some(pb::from_agent::Message::Report(report)) });
    let address = input.u64().to_be_bytes()[..4].to_vec();
    let question = pb::Question { vni: input.u32(), address: address.clone().into() };
    let resolve = pb::Resolve { questions: vec![question; count] };
    from_agent(pb::FromAgent { message: Some(pb::from_agent::Message::Resolve(resolve)) });
    let answer = pb::Answer {
        vni: input.u32(),
        address: address.into(),
        length: input.u32() % 40,
        withdrawn: input.chance(128),
        ..pb::Answer::default()
    };
    let answers = pb::Answers { answers: vec![answer; count] };
    to_agent(pb::ToAgent { message: Some(pb::to_agent::Message::Answers(answers)) });
}

fn long(input: &mut Input<'_>) {
    let text =
        |input: &mut Input<'_>, near: usize| input.pick(&["a", "-", ".", "ä", "\n"]).repeat(near - 2 + input.below(5));
    let spec = vec![b' '; MAX_SPEC - 2 + input.below(5)];
    let change = pb::Change {
        kind: text(input, MAX_KIND),
        key: text(input, MAX_KEY),
        spec: input.chance(64).then(|| spec.into()),
        committed_ms: 0,
    };
    to_agent(pb::ToAgent { message: Some(pb::to_agent::Message::Changes(pb::Changes { changes: vec![change] })) });
    let hello = pb::Hello {
        host: text(input, MAX_HOST),
        instance: text(input, MAX_TEXT),
        software: text(input, MAX_TEXT),
        ..pb::Hello::default()
    };
    from_agent(pb::FromAgent { message: Some(pb::from_agent::Message::Hello(hello)) });
}
