//! The text protocols of key-value stores: requests and correct answers. Keys have 12 bytes, values 16.

/// A protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// RESP, of Redis.
    Redis,
    /// The classic text protocol of memcached (`doc/protocol.txt` of its sources).
    Memcached,
}

impl Protocol {
    /// Sets the key of connection `index`.
    pub fn set(self, index: u32, value: u64) -> String {
        match self {
            Protocol::Redis => format!("*3\r\n$3\r\nSET\r\n$12\r\nlab:{index:08x}\r\n$16\r\n{value:016x}\r\n"),
            Protocol::Memcached => format!("set lab:{index:08x} 0 0 16\r\n{value:016x}\r\n"),
        }
    }

    /// Gets the key of connection `index`.
    pub fn get(self, index: u32) -> String {
        match self {
            Protocol::Redis => format!("*2\r\n$3\r\nGET\r\n$12\r\nlab:{index:08x}\r\n"),
            Protocol::Memcached => format!("get lab:{index:08x}\r\n"),
        }
    }

    /// The answer to a set.
    pub fn stored(self) -> &'static str {
        match self {
            Protocol::Redis => "+OK\r\n",
            Protocol::Memcached => "STORED\r\n",
        }
    }

    /// The answer to a get.
    pub fn found(self, index: u32, value: u64) -> String {
        match self {
            Protocol::Redis => format!("$16\r\n{value:016x}\r\n"),
            Protocol::Memcached => format!("VALUE lab:{index:08x} 0 16\r\n{value:016x}\r\nEND\r\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_correct() {
        let resp = Protocol::Redis.set(0xabc, 7);
        assert_eq!(resp, "*3\r\n$3\r\nSET\r\n$12\r\nlab:00000abc\r\n$16\r\n0000000000000007\r\n");
        assert!(Protocol::Redis.get(0xabc).ends_with("$12\r\nlab:00000abc\r\n"));
        assert_eq!(Protocol::Memcached.set(0xabc, 7), "set lab:00000abc 0 0 16\r\n0000000000000007\r\n");
        assert_eq!(Protocol::Memcached.get(0xabc), "get lab:00000abc\r\n");
        assert_eq!(Protocol::Memcached.found(0xabc, 7), "VALUE lab:00000abc 0 16\r\n0000000000000007\r\nEND\r\n");
    }
}
