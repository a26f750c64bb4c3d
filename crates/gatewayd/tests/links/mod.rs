//! A pod with several links over two pipelines: losses when a link, a device or a pipeline fails, and the links by
//! which packets leave meanwhile.

mod failures;
mod reroute;
mod trunk;
