//! Captures: which packets are wanted ([`Filter`]), and where they are kept until another thread fetches them ([`Chunk`]).

mod chunk;
mod filter;

pub use chunk::{Chunk, Record};
pub use filter::{Filter, FilterError, MAX_LEN as MAX_FILTER_LEN, Subject};
