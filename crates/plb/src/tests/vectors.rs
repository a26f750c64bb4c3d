//! The trailer's test vectors: docs/vectors/gateway-trailer.toml.

use serde::Deserialize;

use crate::{Trailer, TrailerError};

#[derive(Deserialize)]
struct Vectors {
    accepted: Vec<Accepted>,
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Accepted {
    name: String,
    hex: String,
    psn: u32,
    payload: Option<u32>,
    pod: u16,
    queue: u8,
    drop: bool,
    unordered: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refused {
    name: String,
    hex: String,
    because: String,
}

fn bytes(hex: &str) -> [u8; 16] {
    let digits: Vec<u32> = hex.chars().filter_map(|c| c.to_digit(16)).collect();
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
    bytes.try_into().unwrap()
}

#[test]
fn trailers_are_parsed_and_emitted_as_specified() {
    let text = include_str!("../../../../docs/vectors/gateway-trailer.toml");
    let vectors: Vectors = toml::from_str(text).unwrap();
    assert!(vectors.accepted.len() >= 5 && vectors.refused.len() >= 7);
    for v in vectors.accepted {
        let Accepted { psn, payload, pod, queue, drop, unordered, .. } = v;
        let trailer = Trailer { psn, payload, pod, queue, drop, unordered };
        assert_eq!(Trailer::parse(bytes(&v.hex)), Ok(trailer), "{}", v.name);
        assert_eq!(trailer.emit(), bytes(&v.hex), "{}", v.name);
    }
    for v in vectors.refused {
        let kind = match Trailer::parse(bytes(&v.hex)).expect_err(&v.name) {
            TrailerError::Magic(_) => "magic",
            TrailerError::Version { .. } => "version",
            TrailerError::Flags(_) => "flags",
            TrailerError::Payload(_) => "payload",
            TrailerError::Queue(_) => "queue",
        };
        assert_eq!(kind, v.because, "{}", v.name);
    }
}
