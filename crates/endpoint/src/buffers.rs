//! Memory of messages: registered with the provider while they are under way, and used again.

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
    /// Of each connection, by its index: memory to be used again. It is the connection's own, so that no peer is shown what
    /// another one has sent.
    pools: Vec<Pool>,
}

/// Memory of one connection.
#[derive(Debug, Default)]
struct Pool {
    spare: Vec<Vec<u8>>,
    bytes: usize,
}

/// What a connection keeps for later.
const POOL_VECTORS: usize = 64;
const POOL_BYTES: usize = 32 << 20;

impl Buffers {
    /// Memory of `len` bytes, of the connection's own if there is some.
    pub(crate) fn vector(&mut self, connection: ConnectionId, len: usize) -> Vec<u8> {
        let found = self.pools.get_mut(connection.index()).and_then(|pool| pool.take(len));
        let mut vector = found.unwrap_or_default();
        vector.resize(len, 0);
        vector
    }

    /// Takes memory back.
    pub(crate) fn recycle(&mut self, connection: ConnectionId, vector: Vec<u8>) {
        if self.pools.len() <= connection.index() {
            self.pools.resize_with(connection.index() + 1, Pool::default);
        }
        self.pools[connection.index()].put(vector);
    }

    /// Forgets a connection's memory.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        if let Some(pool) = self.pools.get_mut(connection.index()) {
            *pool = Pool::default();
        }
    }

    /// Registers memory; it comes back if there is no key left.
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

    /// Takes a buffer out of the NIC's hands.
    pub(crate) fn deregister(&mut self, provider: &mut impl Provider, buffer: BufferId) -> Option<Vec<u8>> {
        let registered = self.registered.get_mut(buffer.0 as usize)?.take()?;
        self.free.push(buffer.0);
        provider.deregister(registered.region.key)
    }

    /// A piece of a buffer; a piece of no bytes is none.
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
        // Not one that is much too long: the long messages would starve.
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

/// Memory for what comes in, as the engine asks for it.
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

/// Each connection has a protection domain of its own: no peer can write what is another's, whatever keys it knows.
pub(crate) fn domain(connection: ConnectionId) -> Domain {
    Domain(connection.index() as u32 + 1)
}
