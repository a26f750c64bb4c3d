//! Rates and queues of links that are limited, as options name them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length of a queue, frames.
const MAX_FRAMES: u32 = 10_000;
/// Maximum rate of a link, Mbit/s.
const MAX_MBIT_PER_S: u32 = 10_000;
/// Maximum number of links.
const MAX_LINKS: usize = 8;

/// The rate of each link and the length of its queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Shape {
    /// Rate of each link, Mbit/s, Ethernet headers included.
    pub mbit_per_s: Vec<u32>,
    /// Length of each link's queue, frames.
    pub queue_frames: u32,
}

impl Shape {
    /// `links` links with the same rate.
    pub fn equal(links: usize, mbit_per_s: u32, queue_frames: u32) -> Self {
        Self { mbit_per_s: vec![mbit_per_s; links], queue_frames }
    }

    /// The total rate of the first `links` links, Mbit/s.
    pub fn total_mbit_per_s(&self, links: usize) -> f64 {
        self.mbit_per_s.iter().take(links).map(|rate| f64::from(*rate)).sum()
    }
}

/// `4x100@50`, or `100/100/100/20@50`: rates in Mbit/s, then frames.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mbit_per_s.as_slice() {
            [first, rest @ ..] if rest.iter().all(|rate| rate == first) => {
                write!(f, "{}x{first}", self.mbit_per_s.len())?;
            }
            rates => {
                let rates: Vec<_> = rates.iter().map(ToString::to_string).collect();
                f.write_str(&rates.join("/"))?;
            }
        }
        write!(f, "@{}", self.queue_frames)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("`{text}` is not a shape; write 4x100@50 or 100/100/100/20@50: Mbit/s of each link, then frames")
        };
        let number = |text: &str, most: u32| text.parse().ok().filter(|n| (1..=most).contains(n)).ok_or_else(wrong);
        let (rates, frames) = text.split_once('@').ok_or_else(wrong)?;
        let mbit_per_s = match rates.split_once('x') {
            Some((links, rate)) => {
                let links = number(links, MAX_LINKS as u32)? as usize;
                vec![number(rate, MAX_MBIT_PER_S)?; links]
            }
            None => rates.split('/').map(|rate| number(rate, MAX_MBIT_PER_S)).collect::<Result<_, _>>()?,
        };
        if mbit_per_s.len() > MAX_LINKS {
            return Err(wrong());
        }
        Ok(Self { mbit_per_s, queue_frames: number(frames, MAX_FRAMES)? })
    }
}

impl TryFrom<String> for Shape {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Shape> for String {
    fn from(shape: Shape) -> String {
        shape.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_round_trip() {
        for text in ["4x100@50", "100/100/100/20@50", "1x500@400", "8x1@1"] {
            let shape: Shape = text.parse().unwrap();
            assert_eq!(shape.to_string(), text);
            let json = serde_json::to_string(&shape).unwrap();
            assert_eq!(serde_json::from_str::<Shape>(&json).unwrap(), shape);
        }
        assert_eq!("100/100@9".parse(), Ok(Shape::equal(2, 100, 9)));
        let shape: Shape = "100/100/100/20@50".parse().unwrap();
        assert_eq!((shape.total_mbit_per_s(4), shape.total_mbit_per_s(2)), (320.0, 200.0));
    }

    #[test]
    fn malformed_shapes_are_refused() {
        let wrong =
            ["", "100", "x100@50", "4x@50", "4x100@", "9x100@50", "4x0@50", "4x100@0", "1/2/3/4/5/6/7/8/9@5", "4x-1@5"];
        for text in wrong {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
    }
}
