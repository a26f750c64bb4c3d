//! A gateway (`bifrost-nicd` and `bifrost-gw`) and the network around it, for the experiments `gw-...`.
//!
//! Frames come from the lab itself: over a veth pair to the whole gateway ([`world`]), or over memif to a pod alone ([`feeder`]); or it is a host
//! whose guest talks to the Internet ([`site`]); or the kernel's, to pods that a switch finds by BGP ([`fabric`]), and to a pod with
//! several links ([`links`]).

pub mod bird;
pub mod fabric;
pub mod feeder;
pub mod frames;
pub mod frr;
pub mod gobgp;
pub mod links;
pub mod openings;
pub mod probes;
pub mod programs;
pub mod site;
pub mod streams;
pub mod supervised;
pub mod switch;
pub mod trunk;
pub mod until;
pub mod world;
