//! The bars: requirements that an experiment's results must meet.

use std::fmt;

/// The direction in which a bound holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sense {
    /// The measured value must not exceed the bound.
    AtMost,
    /// The measured value must reach the bound.
    AtLeast,
    /// The measured value must be smaller than the bound.
    Below,
}

/// One requirement and what was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// The requirement, in words.
    pub name: String,
    /// The measured value; `None` if the results do not contain it, which counts as a failure.
    pub measured: Option<f64>,
    /// The direction in which the bound holds.
    pub sense: Sense,
    /// The bound.
    pub bound: f64,
    /// The unit of both values.
    pub unit: &'static str,
    /// Whether the bar is about correctness. A busy machine is no excuse then.
    pub exact: bool,
}

impl Bar {
    /// A bar whose measured value may be unknown or not a number.
    pub fn new(name: impl Into<String>, measured: Option<f64>, sense: Sense, bound: f64, unit: &'static str) -> Self {
        Self { name: name.into(), measured: measured.filter(|m| m.is_finite()), sense, bound, unit, exact: false }
    }

    /// Marks the bar as one about correctness: [`Bar::passes_within`] then allows no slack.
    pub fn exact(self) -> Self {
        Self { exact: true, ..self }
    }

    /// Whether the bar is cleared.
    pub fn passes(&self) -> bool {
        self.passes_within(1.0)
    }

    /// Whether the bar is cleared with the bound relaxed by the factor `slack` (1 or more).
    pub fn passes_within(&self, slack: f64) -> bool {
        let slack = if self.exact { 1.0 } else { slack };
        self.measured.is_some_and(|measured| match self.sense {
            Sense::AtMost => measured <= self.bound * slack,
            Sense::AtLeast => measured >= self.bound / slack,
            Sense::Below => measured < self.bound * slack,
        })
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sense = match self.sense {
            Sense::AtMost => "at most",
            Sense::AtLeast => "at least",
            Sense::Below => "below",
        };
        let measured = self.measured.map_or("not measured".to_owned(), |m| format!("{m:.3} {}", self.unit));
        write!(f, "{}: {measured} ({sense} {} {})", self.name, self.bound, self.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_have_a_direction() {
        let table = [
            (Sense::AtMost, Some(1.0), true),
            (Sense::AtMost, Some(1.1), false),
            (Sense::AtLeast, Some(1.0), true),
            (Sense::AtLeast, Some(0.9), false),
            (Sense::Below, Some(1.0), false),
            (Sense::Below, Some(0.9), true),
            (Sense::Below, None, false),
            (Sense::AtLeast, Some(f64::INFINITY), false),
            (Sense::AtMost, Some(f64::NAN), false),
        ];
        for (sense, measured, expected) in table {
            let bar = Bar::new("x", measured, sense, 1.0, "ms");
            assert_eq!(bar.passes(), expected, "{bar}");
        }
        assert!(Bar::new("x", Some(1.4), Sense::AtMost, 1.0, "ms").passes_within(1.5));
        assert!(!Bar::new("x", Some(1.4), Sense::AtMost, 1.0, "ms").exact().passes_within(1.5));
        assert!(!Bar::new("x", Some(0.6), Sense::AtLeast, 1.0, "ms").passes_within(1.5));
    }
}
