//! `bifrost-lab`: hosts from network namespaces, real programs in their guests, and experiments that compare networks.
//!
//! The modules in the order of an experiment: [`state`] claims names on the machine, [`topology`] builds hosts, links
//! and guests, [`topology::overlay`] joins the guests (kernel VXLAN or [`daemon`]), [`programs`] generate load,
//! [`machine`]s replace containers, [`inject`] drops packets; a [`lab::Lab`] combines these. An
//! [`Experiment`](frame::Experiment) turns measurements into [`results`], [`report`], [`plot`]s and [`bars`]
//! ([`run`]); [`experiment`] lists all experiments. [`everything`] runs them all, and writes one [`book`]. Everything
//! that a run creates is removed when its values are dropped, or by the next run.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod awake;
pub mod bars;
pub mod book;
pub mod cli;
pub mod command;
pub mod daemon;
pub mod everything;
pub mod experiment;
pub mod experiments;
pub mod figures;
pub mod frame;
pub mod gateway;
pub mod inject;
pub mod interrupt;
pub mod lab;
pub mod machine;
pub mod netns;
pub mod options;
pub mod patience;
pub mod plot;
pub mod process;
pub mod processor;
pub mod programs;
pub mod progress;
pub mod qemu;
pub mod report;
pub mod results;
pub mod run;
pub mod shape;
pub mod standstill;
pub mod state;
pub mod stats;
pub mod topology;
pub mod turns;
