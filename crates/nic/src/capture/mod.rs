//! Captures: the filter ([`Filter`]), and the buffer for packets until another thread fetches them ([`Chunk`]).

mod chunk;
mod filter;

pub use chunk::{Chunk, Record};
pub use filter::{Filter, FilterError, MAX_LEN as MAX_FILTER_LEN, Subject};
