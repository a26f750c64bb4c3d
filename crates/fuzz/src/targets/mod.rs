//! The targets, one per file.

pub(crate) mod api;
pub(crate) mod bifrost;
pub(crate) mod config;
mod cutting;
mod dhcp;
mod dns;
pub(crate) mod engine;
mod forge;
mod frame;
pub(crate) mod gateway;
pub(crate) mod headers;
mod ledger;
mod machine;
pub(crate) mod merge;
pub(crate) mod messages;
mod outside;
pub(crate) mod pair;
pub(crate) mod peer;
pub(crate) mod pods;
pub(crate) mod rdm;
pub(crate) mod rings;
pub(crate) mod roce;
mod router;
pub(crate) mod routes;
pub(crate) mod segments;
pub(crate) mod switch;
pub(crate) mod vhost;
