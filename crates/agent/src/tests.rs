//! The decisions of the agent against a model of `bifrostd` and a relay that says what it likes.

mod desired;
mod plan;
mod state;
mod world;
