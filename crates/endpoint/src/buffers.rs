//! Message buffers: registered with the provider while in flight, and reused.

use bifrost_rdm::{BufferId, ConnectionId, Memory};
use bifrost_verbs::{Access, Domain, Key, Provider, Region, Slice};

/// A registered buffer.
#[derive(Clone, Copy, Debug)]
struct Registered {
    region: Region,
    connection: ConnectionId,
}

/// The buffers of all connections.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    registered: Vec<Option<Registered>>,
    free: Vec<u32>,
    /// Reusable memory, by the connection's index. It is not shared between connections, so that no peer can see
    /// another one's data.
    pools: Vec<Pool>,
}

/// Reusable memory of one connection.
#[derive(Debug, Default)]
struct Pool {
    spare: Vec<Vec<u8>>,
    bytes: usize,
}

/// Limits of the memory that a connection keeps.
const POOL_VECTORS: usize = 64;
const POOL_BYTES: usize = 32 << 20;

impl Buffers {
    /// Returns memory of `len` bytes, reused from the connection if possible.
    pub(crate) fn vector(&mut self, connection: ConnectionId, len: usize) -> Vec<u8> {
        let found = self.pools.get_mut(connection.index()).and_then(|pool| pool.take(len));
        let mut vector = found.unwrap_or_default();
        vector.resize(len, 0);
        vector
    }

    /// Accepts memory for reuse.
    pub(crate) fn recycle(&mut self, connection: ConnectionId, vector: Vec<u8>) {
        if self.pools.len() <= connection.index() {
            self.pools.resize_with(connection.index() + 1, Pool::default);
        }
        self.pools[connection.index()].put(vector);
    }

    /// Frees a connection's reusable memory.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        if let Some(pool) = self.pools.get_mut(connection.index()) {
            *pool = Pool::default();
        }
    }

    /// Registers memory; returns it if no key is free.
    pub(crate) fn register(
        &mut self,
        provider: &mut impl Provider,
        connection: ConnectionId,
        domain: Domain,
        access: Access,
        vector: Vec<u8>,
    ) -> Result<(BufferId, Region), Vec<u8>> {
        let region = provider.register(domain, access, vector).map_err(|(_, vector)| vector)?;
        let registered = Some(Registered { region, connection });
        let index = match self.free.pop() {
            Some(index) => {
                self.registered[index as usize] = registered;
                index
            }
            None => {
                self.registered.push(registered);
                self.registered.len() as u32 - 1
            }
        };
        Ok((BufferId(index), region))
    }

    /// Deregisters a buffer, so that the NIC no longer uses it.
    pub(crate) fn deregister(&mut self, provider: &mut impl Provider, buffer: BufferId) -> Option<Vec<u8>> {
        let registered = self.registered.get_mut(buffer.0 as usize)?.take()?;
        self.free.push(buffer.0);
        provider.deregister(registered.region.key)
    }

    /// A part of a buffer; `None` if it is empty.
    pub(crate) fn slice(&self, buffer: BufferId, offset: u32, len: u32) -> Option<Slice> {
        let key = self.key(buffer)?;
        (len > 0).then_some(Slice { key, offset, len })
    }

    /// All buffers of a connection.
    pub(crate) fn of(&self, connection: ConnectionId) -> impl Iterator<Item = BufferId> {
        let of = move |(at, registered): (usize, &Option<Registered>)| {
            (registered.as_ref()?.connection == connection).then_some(BufferId(at as u32))
        };
        self.registered.iter().enumerate().filter_map(of)
    }

    pub(crate) fn registered(&self) -> usize {
        self.registered.iter().flatten().count()
    }

    fn key(&self, buffer: BufferId) -> Option<Key> {
        Some(self.registered.get(buffer.0 as usize)?.as_ref()?.region.key)
    }
}

impl Pool {
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        // Not a much larger one, which long messages need.
        let fits = |vector: &Vec<u8>| vector.capacity() >= len && vector.capacity() / 4 <= len.max(1024);
        let at = self.spare.iter().rposition(fits)?;
        let vector = self.spare.swap_remove(at);
        self.bytes -= vector.capacity();
        Some(vector)
    }

    fn put(&mut self, vector: Vec<u8>) {
        if vector.capacity() > 0 && self.spare.len() < POOL_VECTORS && self.bytes + vector.capacity() <= POOL_BYTES {
            self.bytes += vector.capacity();
            self.spare.push(vector);
        }
    }
}

/// Memory for incoming messages, as the engine requests it.
pub(crate) struct Store<'a, P> {
    pub(crate) provider: &'a mut P,
    pub(crate) buffers: &'a mut Buffers,
}

impl<P: Provider> Memory for Store<'_, P> {
    fn allocate(&mut self, connection: ConnectionId, len: u32, remote: bool) -> Option<(BufferId, u64, u32)> {
        let vector = self.buffers.vector(connection, len as usize);
        let access = if remote { Access::RemoteWrite } else { Access::Local };
        match self.buffers.register(self.provider, connection, domain(connection), access, vector) {
            Ok((buffer, region)) => Some((buffer, region.address, region.key.0)),
            Err(vector) => {
                self.buffers.recycle(connection, vector);
                None
            }
        }
    }
}

/// Each connection has its own protection domain, so no peer can write to other connections' memory with any key.
pub(crate) fn domain(connection: ConnectionId) -> Domain {
    Domain(connection.index() as u32 + 1)
}
