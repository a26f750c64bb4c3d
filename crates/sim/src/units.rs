//! Quantities in scenario files: "50us", "25Gbit/s", "64KB".

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A time or a span of virtual time, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ns(pub u64);

/// A rate, bits per second; 0 means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

/// An amount, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const TIMES: &[(&str, f64)] = &[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
const RATES: &[(&str, f64)] = &[
    ("bit/s", 1.0),
    ("Kbit/s", 1e3),
    ("Mbit/s", 1e6),
    ("Gbit/s", 1e9),
    ("Tbit/s", 1e12),
    ("K", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
];
const AMOUNTS: &[(&str, f64)] = &[
    ("B", 1.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
];

impl Ns {
    /// Microseconds.
    pub const fn us(n: u64) -> Self {
        Ns(n * 1_000)
    }

    /// Milliseconds.
    pub const fn ms(n: u64) -> Self {
        Ns(n * 1_000_000)
    }

    /// Seconds.
    pub const fn s(n: u64) -> Self {
        Ns(n * 1_000_000_000)
    }
}

fn parse(text: &str, units: &[(&str, f64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_')?;
    let number: f64 = text[..split].replace('_', "").parse().ok()?;
    let unit = text[split..].trim();
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    let value = number * factor;
    (0.0..1.8e19).contains(&value).then_some(value.round() as u64)
}

/// The largest unit of `units` that divides `value`.
fn write(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let best = units.iter().rev().find(|(_, n)| value.is_multiple_of(*n) && value > 0).unwrap_or(&units[0]);
    write!(f, "{}{}", value / best.1, best.0)
}

macro_rules! quantity {
    ($name:ident, $units:expr, $write:expr, $expected:expr) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write(f, self.0, $write)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                struct Reader;
                impl Visitor<'_> for Reader {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: Error>(self, text: &str) -> Result<$name, E> {
                        parse(text, $units)
                            .map($name)
                            .ok_or_else(|| E::custom(format!("{text:?} is not {}", $expected)))
                    }
                }
                d.deserialize_str(Reader)
            }
        }
    };
}

quantity!(
    Ns,
    TIMES,
    &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)],
    "a time like \"50us\", \"1.5ms\" or \"2s\""
);
quantity!(
    Rate,
    RATES,
    &[("bit/s", 1), ("Kbit/s", 1_000), ("Mbit/s", 1_000_000), ("Gbit/s", 1_000_000_000)],
    "a rate like \"25Gbit/s\" or \"100G\""
);
quantity!(Bytes, AMOUNTS, &[("B", 1), ("KB", 1_000), ("MB", 1_000_000)], "an amount like \"64KB\" or \"1MiB\"");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        for (text, want) in [
            ("50us", Some(50_000)),
            ("1.5ms", Some(1_500_000)),
            ("2 s", Some(2_000_000_000)),
            ("7", None),
            ("x", None),
            ("-1s", None),
            ("5 days", None),
        ] {
            assert_eq!(parse(text, TIMES), want, "{text}");
        }
        assert_eq!(parse("25Gbit/s", RATES), Some(25_000_000_000));
        assert_eq!(parse("64KiB", AMOUNTS), Some(65_536));
        for ns in [0, 1, 1500, 50_000, 2_000_000_000] {
            assert_eq!(parse(&Ns(ns).to_string(), TIMES), Some(ns));
        }
    }
}
