//! A gateway (`bifrost-nicd` and `bifrost-gw`) and the network around it, for the experiments `gw-...`.
//!
//! The lab itself sends frames over a veth pair to the whole gateway ([`world`]), or over memif to a single pod
//! ([`feeder`]). Or kernels send them: that of a guest whose host reaches the Internet through a gateway ([`site`]),
//! those of hosts behind a switch that finds pods by BGP ([`fabric`]), or those of hosts that reach a pod with several
//! links ([`links`]).

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
