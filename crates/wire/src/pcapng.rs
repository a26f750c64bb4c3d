//! Blocks of the capture format pcapng (draft-ietf-opsawg-pcapng), little endian, appended to the caller's buffer.
//! Timestamps are in nanoseconds.

use alloc::vec::Vec;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const ETHERNET: u16 = 1;

/// Codes of the options in the blocks here.
const COMMENT: u16 = 1;
const USER_APPLICATION: u16 = 4;
const NAME: u16 = 2;
const DESCRIPTION: u16 = 3;
const TIME_RESOLUTION: u16 = 9;
const FLAGS: u16 = 2;
const RECEIVED: u16 = 4;
const DROPPED: u16 = 5;

/// Direction of a packet: the values of the direction bits in a packet's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Received.
    Inbound = 1,
    /// Sent.
    Outbound = 2,
}

/// Metadata of a packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Notes<'a> {
    /// Direction of the packet.
    pub flow: Option<Flow>,
    /// Comment for people.
    pub comment: Option<&'a str>,
}

/// Starts a file, version 1.0, of unknown length; `application` is the name of its writer.
pub fn section(out: &mut Vec<u8>, application: &str) {
    block(out, SECTION_HEADER, |body| {
        body.extend_from_slice(&0x1a2b_3c4du32.to_le_bytes());
        body.extend_from_slice(&[1, 0, 0, 0]);
        body.extend_from_slice(&u64::MAX.to_le_bytes());
        option(body, USER_APPLICATION, application.as_bytes());
        end_of_options(body);
    });
}

/// Describes the next interface, with link type Ethernet; the first one is number 0. `snaplen` is the maximum number of
/// bytes kept per packet, 0 for no limit.
pub fn interface(out: &mut Vec<u8>, name: &str, description: &str, snaplen: u32) {
    block(out, INTERFACE, |body| {
        body.extend_from_slice(&ETHERNET.to_le_bytes());
        body.extend_from_slice(&[0, 0]);
        body.extend_from_slice(&snaplen.to_le_bytes());
        option(body, NAME, name.as_bytes());
        option(body, DESCRIPTION, description.as_bytes());
        option(body, TIME_RESOLUTION, &[9]);
        end_of_options(body);
    });
}

/// Adds a packet of `len` bytes, of which `bytes` were kept, seen at `at_ns` since the epoch.
pub fn packet(out: &mut Vec<u8>, interface: u32, at_ns: u64, len: u32, bytes: &[u8], notes: Notes<'_>) {
    block(out, ENHANCED_PACKET, |body| {
        body.extend_from_slice(&interface.to_le_bytes());
        time(body, at_ns);
        body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        body.extend_from_slice(&len.to_le_bytes());
        body.extend_from_slice(bytes);
        pad(body);
        if let Some(comment) = notes.comment {
            option(body, COMMENT, comment.as_bytes());
        }
        if let Some(flow) = notes.flow {
            option(body, FLAGS, &(flow as u32).to_le_bytes());
        }
        end_of_options(body);
    });
}

/// Reports how many packets an interface has seen, and how many of them were dropped for lack of room.
pub fn statistics(out: &mut Vec<u8>, interface: u32, at_ns: u64, received: u64, dropped: u64) {
    block(out, INTERFACE_STATISTICS, |body| {
        body.extend_from_slice(&interface.to_le_bytes());
        time(body, at_ns);
        option(body, RECEIVED, &received.to_le_bytes());
        option(body, DROPPED, &dropped.to_le_bytes());
        end_of_options(body);
    });
}

/// Adds a comment about the file at this time, as statistics of an interface without numbers.
pub fn note(out: &mut Vec<u8>, interface: u32, at_ns: u64, comment: &str) {
    block(out, INTERFACE_STATISTICS, |body| {
        body.extend_from_slice(&interface.to_le_bytes());
        time(body, at_ns);
        option(body, COMMENT, comment.as_bytes());
        end_of_options(body);
    });
}

fn time(body: &mut Vec<u8>, at_ns: u64) {
    body.extend_from_slice(&((at_ns >> 32) as u32).to_le_bytes());
    body.extend_from_slice(&(at_ns as u32).to_le_bytes());
}

/// Blocks are multiples of four bytes, with their length at both ends.
fn block(out: &mut Vec<u8>, kind: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let mut body = Vec::new();
    write(&mut body);
    let len = (body.len() as u32 + 12).to_le_bytes();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&len);
    out.extend_from_slice(&body);
    out.extend_from_slice(&len);
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    body.extend_from_slice(&code.to_le_bytes());
    body.extend_from_slice(&(value.len() as u16).to_le_bytes());
    body.extend_from_slice(value);
    pad(body);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend_from_slice(&[0; 4]);
}

fn pad(body: &mut Vec<u8>) {
    body.resize(body.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Types and bodies of the blocks of a file.
    fn blocks(mut file: &[u8]) -> Vec<(u32, &[u8])> {
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let mut blocks = Vec::new();
        while !file.is_empty() {
            let len = number(&file[4..8]) as usize;
            assert!(len.is_multiple_of(4) && number(&file[len - 4..len]) as usize == len);
            blocks.push((number(&file[..4]), &file[8..len - 4]));
            file = &file[len..];
        }
        blocks
    }

    #[test]
    fn blocks_have_their_length_at_both_ends_and_the_expected_content() {
        let mut file = Vec::new();
        section(&mut file, "test");
        interface(&mut file, "eth0", "a wire", 0);
        packet(&mut file, 0, 7 << 32 | 9, 60, &[1, 2, 3], Notes { flow: Some(Flow::Outbound), comment: Some("lost") });
        packet(&mut file, 0, 8, 2, &[1, 2], Notes::default());
        statistics(&mut file, 0, 10, 2, 1);
        note(&mut file, 0, 10, "gap");
        let blocks = blocks(&file);
        assert_eq!(blocks.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [SECTION_HEADER, 1, 6, 6, 5, 5]);
        assert_eq!(blocks[5].1, [0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 1, 0, 3, 0, b'g', b'a', b'p', 0, 0, 0, 0, 0]);
        let noted = [
            &[0, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0, 60, 0, 0, 0, 1, 2, 3, 0][..],
            &[1, 0, 4, 0, b'l', b'o', b's', b't', 2, 0, 4, 0, 2, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(blocks[2].1, noted.concat());
        assert_eq!(blocks[3].1, [0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0]);
    }
}
