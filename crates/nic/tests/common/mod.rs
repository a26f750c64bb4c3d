//! Frames built by hand, and a slow and simple check of them.
#![allow(dead_code)]

/// Description of a TCP or UDP packet.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) v6: bool,
    pub(crate) vlan: Option<u16>,
    pub(crate) ports: (u16, u16),
    pub(crate) id: u16,
    pub(crate) df: bool,
    pub(crate) ttl: u8,
    pub(crate) tos: u8,
    pub(crate) ip_options: Vec<u8>,
    pub(crate) udp: bool,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    pub(crate) tcp_options: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

impl Default for Packet {
    fn default() -> Self {
        Self {
            v6: false,
            vlan: None,
            ports: (40_000, 6379),
            id: 1,
            df: true,
            ttl: 64,
            tos: 0,
            ip_options: vec![],
            udp: false,
            seq: 1000,
            ack: 2000,
            flags: 0x10,
            window: 512,
            tcp_options: vec![],
            payload: vec![],
        }
    }
}

pub(crate) const SRC_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const DST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

impl Packet {
    pub(crate) fn l3(&self) -> usize {
        if self.vlan.is_some() { 18 } else { 14 }
    }

    pub(crate) fn l4(&self) -> usize {
        self.l3() + if self.v6 { 40 } else { 20 + self.ip_options.len() }
    }

    pub(crate) fn header_len(&self) -> usize {
        self.l4() + if self.udp { 8 } else { 20 + self.tcp_options.len() }
    }

    fn addresses(&self) -> Vec<u8> {
        if self.v6 {
            let mut a = vec![0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            a.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            a
        } else {
            vec![10, 0, 0, 1, 10, 0, 0, 2]
        }
    }

    /// The frame without a transport checksum (field zero).
    fn unsummed(&self) -> Vec<u8> {
        let mut f = Vec::new();
        f.extend(DST_MAC);
        f.extend(SRC_MAC);
        if let Some(v) = self.vlan {
            f.extend([0x81, 0x00]);
            f.extend(v.to_be_bytes());
        }
        let l4_len = self.header_len() - self.l4() + self.payload.len();
        if self.v6 {
            f.extend([0x86, 0xdd, 0x60 | self.tos >> 4, self.tos << 4, 0, 7]);
            f.extend((l4_len as u16).to_be_bytes());
            f.extend([if self.udp { 17 } else { 6 }, self.ttl]);
            f.extend(self.addresses());
        } else {
            let ihl = 20 + self.ip_options.len();
            f.extend([0x08, 0x00, 0x40 | (ihl / 4) as u8, self.tos]);
            f.extend(((ihl + l4_len) as u16).to_be_bytes());
            f.extend(self.id.to_be_bytes());
            f.extend([if self.df { 0x40 } else { 0 }, 0, self.ttl, if self.udp { 17 } else { 6 }, 0, 0]);
            f.extend(self.addresses());
            f.extend(&self.ip_options);
            let l3 = self.l3();
            let sum = naive_checksum(&f[l3..]);
            f[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
        }
        f.extend(self.ports.0.to_be_bytes());
        f.extend(self.ports.1.to_be_bytes());
        if self.udp {
            f.extend((l4_len as u16).to_be_bytes());
            f.extend([0, 0]);
        } else {
            f.extend(self.seq.to_be_bytes());
            f.extend(self.ack.to_be_bytes());
            f.extend([(((20 + self.tcp_options.len()) / 4) << 4) as u8, self.flags]);
            f.extend(self.window.to_be_bytes());
            f.extend([0, 0, 0, 0]);
            f.extend(&self.tcp_options);
        }
        f.extend(&self.payload);
        f
    }

    pub(crate) fn checksum_at(&self) -> usize {
        self.l4() + if self.udp { 6 } else { 16 }
    }

    fn pseudo(&self, len: usize) -> Vec<u8> {
        let mut p = self.addresses();
        p.extend([0, if self.udp { 17 } else { 6 }]);
        p.extend((len as u32).to_be_bytes());
        p
    }

    /// The complete frame, as sent on a wire.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut f = self.unsummed();
        let mut area = self.pseudo(f.len() - self.l4());
        area.extend(&f[self.l4()..]);
        let sum = match naive_checksum(&area) {
            0 => 0xffff,
            s => s,
        };
        let at = self.checksum_at();
        f[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        f
    }

    /// The frame as a guest with checksum offload hands it over: the field holds the pseudo header's sum.
    pub(crate) fn build_partial(&self) -> Vec<u8> {
        let mut f = self.unsummed();
        let partial = !naive_checksum(&self.pseudo(f.len() - self.l4()));
        let at = self.checksum_at();
        f[at..at + 2].copy_from_slice(&partial.to_be_bytes());
        f
    }
}

/// RFC 1071, word by word.
pub(crate) fn naive_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(pair[0]) * 256 + u64::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Checks lengths and checksums of a complete TCP or UDP frame, independently of the code under test.
/// Returns the TCP sequence number (0 for UDP) and the payload.
pub(crate) fn naive_check(frame: &[u8]) -> (u32, &[u8]) {
    let mut l3 = 14;
    if frame[12..14] == [0x81, 0] {
        l3 = 18;
    }
    let v6 = frame[l3] >> 4 == 6;
    let ip = &frame[l3..];
    let (l4, protocol, addresses) = if v6 {
        assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])), ip.len() - 40, "payload length");
        (40, ip[6], &ip[8..40])
    } else {
        assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len(), "total length");
        let ihl = usize::from(ip[0] & 15) * 4;
        assert_eq!(naive_checksum(&ip[..ihl]), 0, "IPv4 header checksum");
        (ihl, ip[9], &ip[12..20])
    };
    let segment = &ip[l4..];
    let mut area = addresses.to_vec();
    area.extend([0, protocol]);
    area.extend((segment.len() as u32).to_be_bytes());
    area.extend(segment);
    assert_eq!(naive_checksum(&area), 0, "transport checksum");
    if protocol == 17 {
        assert_eq!(usize::from(u16::from_be_bytes([segment[4], segment[5]])), segment.len(), "UDP length");
        (0, &segment[8..])
    } else {
        let doff = usize::from(segment[12] >> 4) * 4;
        (u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]), &segment[doff..])
    }
}
