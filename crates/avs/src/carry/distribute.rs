//! Distributes what the workers of another process have copied over another number of workers.
//!
//! A conversation goes to the worker that gets its packets: see [`Index::worker_of`]. Where that cannot be known, because
//! the other end is not an address of a vNIC, all workers get it. Copies have other places then: those of a worker are
//! numbered in the order of arrival, and numbers of outdated ones are used again.

use super::{
    CONNECTION_BYTES, CONNECTIONS_AT, CONNECTIONS_GONE, CarryError, Fields, MAPPING_BYTES, MAPPINGS_AT, NONE,
    PLACE_BYTES, SESSION_BYTES, SESSIONS_AT, SESSIONS_GONE, begin, next_section,
};
use crate::flow_log::HandedFlow;
use crate::ids::{PortId, WorkerId};
use crate::index::Index;
use crate::prepared::Prepared;

/// Maximum number of places of a table.
const PLACES_MAX: u32 = 1 << 21;
/// The tables of a switch: sessions, connections, mappings.
const TABLES: usize = 3;
const MAPPINGS: usize = 2;
/// Where the record of a translated connection has the place of its mapping.
const MAPPING_AT: usize = SESSION_BYTES + 5;

/// Where the copies of all workers are, while they are distributed over others.
#[derive(Debug)]
pub struct Distribution {
    /// By former worker and table.
    former: Vec<[Vec<Copied>; TABLES]>,
    /// By worker and table.
    next: Vec<[Numbers; TABLES]>,
    left_out: u64,
}

/// Where the copy of a place is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Copied {
    /// There is none.
    #[default]
    No,
    /// At a worker, with this number.
    At(u16, u32),
    /// At every worker, with these numbers.
    Everywhere(Box<[u32]>),
}

/// The places of a table that have copies.
#[derive(Clone, Debug, Default)]
struct Numbers {
    next: u32,
    unused: Vec<u32>,
}

impl Numbers {
    fn take(&mut self) -> Option<u32> {
        self.unused.pop().or_else(|| {
            let number = self.next;
            self.next += u32::from(number < PLACES_MAX);
            (number < PLACES_MAX).then_some(number)
        })
    }
}

/// To which workers a record goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    One(WorkerId),
    All,
}

impl Distribution {
    /// `former` and `workers`: numbers of workers of the other process and of this one.
    pub fn new(former: usize, workers: usize) -> Distribution {
        let former = (0..former).map(|_| Default::default()).collect();
        Distribution { former, next: vec![Default::default(); workers], left_out: 0 }
    }

    /// Records that were not distributed: they are invalid.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

impl Prepared {
    /// Distributes one step of [`copy_some`](crate::Switch::copy_some), or what [`copy_rest`](crate::Switch::copy_rest)
    /// has written, of all former workers: `former` by worker. Returns the same for each worker of this configuration.
    ///
    /// # Errors
    /// The bytes are not what a switch of this or a neighbouring release writes.
    pub fn distribute(&self, distribution: &mut Distribution, former: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, CarryError> {
        let mut out = vec![Vec::new(); distribution.next.len()];
        for (worker, bytes) in former.iter().enumerate().take(distribution.former.len()) {
            let mut rest = &bytes[..];
            while let Some((kind, bytes, section)) = next_section(&mut rest)? {
                let records = section.chunks_exact(usize::from(bytes));
                let mut sections = vec![(0u32, Vec::new()); out.len()];
                match kind {
                    CONNECTIONS_GONE..=SESSIONS_GONE => {
                        records.for_each(|record| distribution.discard(worker, kind, record, &mut sections));
                    }
                    MAPPINGS_AT..=SESSIONS_AT => {
                        records.for_each(|record| {
                            if distribution.add(&self.index, worker, kind, record, &mut sections).is_none() {
                                distribution.left_out += 1;
                            }
                        });
                    }
                    // Only a process with the same number of workers sends whole tables.
                    _ => return Err(CarryError::Foreign),
                }
                for (out, (count, records)) in out.iter_mut().zip(sections) {
                    if count > 0 {
                        begin(out, kind, usize::from(bytes), count as usize);
                        out.extend(records);
                    }
                }
            }
        }
        Ok(out)
    }

    /// The worker that counts a conversation in its flow logs; the first one if that is not known.
    pub fn worker_of_flow(&self, flow: &HandedFlow) -> WorkerId {
        self.index.worker_of(&flow.flow.name.key).unwrap_or(WorkerId(0))
    }
}

impl Distribution {
    /// A place has no copy any more.
    fn discard(&mut self, former: usize, kind: u16, record: &[u8], sections: &mut [(u32, Vec<u8>)]) {
        let table = table(kind);
        let place = Fields(record).u32().unwrap_or(NONE);
        let Some(entry) = self.former[former][table].get_mut(place as usize) else { return };
        let copied = match std::mem::take(entry) {
            Copied::No => return,
            Copied::At(worker, number) => vec![(usize::from(worker), number)],
            Copied::Everywhere(numbers) => numbers.into_iter().enumerate().collect(),
        };
        for (worker, number) in copied {
            self.next[worker][table].unused.push(number);
            push(&mut sections[worker], number, record.get(PLACE_BYTES..).unwrap_or_default());
        }
    }

    /// A place has a copy. `None`: the record is invalid.
    fn add(
        &mut self,
        index: &Index,
        former: usize,
        kind: u16,
        record: &[u8],
        sections: &mut [(u32, Vec<u8>)],
    ) -> Option<()> {
        let table = table(kind);
        let place = Fields(record).u32().filter(|place| *place < PLACES_MAX)?;
        let mut record = record.get(PLACE_BYTES..)?.to_vec();
        let to = match kind {
            MAPPINGS_AT => to_of_mapping(index, &record)?,
            CONNECTIONS_AT => self.to_of_connection(index, former, &mut record)?,
            _ => to_of_key(index, &mut Fields(&record))?,
        };
        let entry = self.former[former][table].get(place as usize);
        if entry.is_some_and(|entry| *entry != Copied::No) {
            return None;
        }
        let copied = match to {
            To::One(WorkerId(worker)) => {
                let number = self.next.get_mut(usize::from(worker))?[table].take()?;
                push(&mut sections[usize::from(worker)], number, &record);
                Copied::At(worker, number)
            }
            To::All => {
                let numbers: Option<Box<[u32]>> = self.next.iter_mut().map(|numbers| numbers[table].take()).collect();
                let numbers = numbers?;
                for (section, number) in sections.iter_mut().zip(&numbers) {
                    push(section, *number, &record);
                }
                Copied::Everywhere(numbers)
            }
        };
        let places = &mut self.former[former][table];
        if places.len() <= place as usize {
            places.resize(place as usize + 1, Copied::No);
        }
        places[place as usize] = copied;
        Some(())
    }

    /// Replaces the place of the mapping in the record of a connection.
    fn to_of_connection(&self, index: &Index, former: usize, record: &mut [u8]) -> Option<To> {
        let mut fields = Fields(Some(&*record).filter(|record| record.len() >= CONNECTION_BYTES)?);
        let to = to_of_key(index, &mut fields);
        let mut fields = Fields(&record[SESSION_BYTES..]);
        match fields.u8()? {
            0 => to,
            1 => {
                let ((_, uplink), place) = (fields.ports(CONNECTION_BYTES - SESSION_BYTES - 1)?, fields.u32()?);
                let home = home_of_uplink(index, uplink)?;
                if place != NONE {
                    let Some(Copied::At(worker, number)) = self.former[former][MAPPINGS].get(place as usize) else {
                        return None;
                    };
                    // Both are at the uplink's worker.
                    (WorkerId(*worker) == home).then_some(())?;
                    record[MAPPING_AT..MAPPING_AT + 4].copy_from_slice(&number.to_le_bytes());
                }
                Some(To::One(home))
            }
            _ => None,
        }
    }
}

/// The table of a kind of section.
fn table(kind: u16) -> usize {
    match kind {
        SESSIONS_GONE | SESSIONS_AT => 0,
        CONNECTIONS_GONE | CONNECTIONS_AT => 1,
        _ => MAPPINGS,
    }
}

fn to_of_key(index: &Index, fields: &mut Fields<'_>) -> Option<To> {
    let key = fields.key()?;
    index.port(key.port())?;
    Some(index.worker_of(&key).map_or(To::All, To::One))
}

fn to_of_mapping(index: &Index, record: &[u8]) -> Option<To> {
    let mut fields = Fields(record);
    let (_, uplink) = fields.ports(MAPPING_BYTES)?;
    home_of_uplink(index, uplink).map(To::One)
}

/// The worker that translates what passes an uplink.
fn home_of_uplink(index: &Index, uplink: PortId) -> Option<WorkerId> {
    let (port, _) = index.port(uplink)?;
    Some(port.port.home.unwrap_or(WorkerId(0)))
}

fn push((count, records): &mut (u32, Vec<u8>), number: u32, rest: &[u8]) {
    *count += 1;
    records.extend(number.to_le_bytes());
    records.extend_from_slice(rest);
}
