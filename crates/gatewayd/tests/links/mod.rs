//! A pod with several links over two pipelines: what is lost when a link, a device or a pipeline fails, and where packets leave meanwhile.

mod failures;
mod reroute;
mod trunk;
