//! `bifrostctl capture`: writes and counts what the daemon captures.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bifrost_control::Client;
use bifrost_control::api::{CaptureSpec, MAX_CAPTURE_SECONDS, MAX_SNAPLEN};
use clap::Args;

use crate::failure::Failure;
use crate::table::count;

pub(crate) const EXAMPLES: &str = "\
Stages (--at), in order, outbound and inbound:
  guest-tx     a frame as fetched from a guest: not segmented yet, checksums perhaps left to be finished
  pre          parsed; from the underlay: decapsulated, its checksum verified
  avs          the virtual switch has decided; the comment says what
  rte          the reliable transport took it, made it wait, or left it to plain VXLAN; from the underlay: it is new
  post         each finished segment: cut, rewritten, checksums complete, with connection, PSN and path
  underlay-tx  datagrams to other hosts (synthetic outer headers)
  underlay-rx  datagrams as they came in (outer headers made up)
  guest-rx     a frame that a guest is shown, in the order in which it sees them
  drop         whatever is dropped; the comment has the reason

Filters are a subset of pcap-filter(7), on the guests' frames:
  ip ip6 arp tcp udp icmp icmp6, [src|dst] host A, [src|dst] net P, [tcp|udp] [src|dst] port N, portrange N-M,
  ether [src|dst] host MAC, vni N; and, or, not, parentheses

Examples:
  bifrostctl capture -w out.pcapng --at drop                         what is dropped, and why
  bifrostctl capture -w out.pcapng --filter 'tcp port 6379' --port web1 --seconds 10
  bifrostctl capture -w - --at underlay-rx,underlay-tx | tshark -X lua_script:bifrost.lua -r -

What finds no room in the daemon is counted and not waited for. With `-w -` nothing but packets goes to stdout.";

#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    #[command(flatten)]
    what: CaptureWhat,
    /// Only packets from and to this port; transport control packets belong to none
    #[arg(long, value_name = "NAME")]
    port: Option<String>,
}

/// What every capture can be told.
#[derive(Debug, Args)]
pub(crate) struct CaptureWhat {
    /// Where to look, comma-separated; all stages if none is named
    #[arg(long, value_name = "STAGES", value_delimiter = ',')]
    at: Vec<String>,
    /// Which packets
    #[arg(long, value_name = "EXPRESSION", default_value = "")]
    filter: String,
    /// The file to write, in pcapng; - is stdout
    #[arg(short, long, value_name = "FILE")]
    write: PathBuf,
    /// Keep this many bytes of each packet
    #[arg(long, value_name = "N", default_value_t = MAX_SNAPLEN,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SNAPLEN)))]
    snaplen: u32,
    /// End after this many packets, counted at each stage
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// End after this many seconds
    #[arg(long, value_name = "S", default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=MAX_CAPTURE_SECONDS))]
    seconds: u64,
    /// End after this many bytes of packets
    #[arg(long, value_name = "N", default_value_t = 256 << 20, value_parser = clap::value_parser!(u64).range(1..))]
    bytes: u64,
}

/// Captures; tells on stderr what came.
pub(crate) fn run(client: &Client, CaptureArgs { what, port }: CaptureArgs) -> Result<(), Failure> {
    what.capture(client, port)
}

impl CaptureWhat {
    pub(crate) fn capture(self, client: &Client, port: Option<String>) -> Result<(), Failure> {
        let args = self;
        let file: Box<dyn Write> = if args.write == Path::new("-") {
            Box::new(io::stdout())
        } else {
            let file = File::create(&args.write);
            Box::new(file.map_err(|source| Failure::File { path: args.write.clone(), source })?)
        };
        let spec = CaptureSpec {
            at: args.at,
            filter: args.filter,
            port,
            snaplen_bytes: args.snaplen,
            packets: args.count,
            bytes: args.bytes,
            seconds: args.seconds,
        };
        let mut out = Tally { out: file, blocks: Blocks::default() };
        client.capture(&spec, &mut out)?;
        let Blocks { packets, missed, .. } = out.blocks;
        let missed: u64 = missed.values().sum();
        eprintln!("{} captured, {} found no room", count(packets, "packet"), missed);
        Ok(())
    }
}

/// Writes on, and counts.
struct Tally {
    out: Box<dyn Write>,
    blocks: Blocks,
}

impl Write for Tally {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.blocks.add(&bytes[..written]);
        self.blocks.remarks.drain(..).for_each(|remark| eprintln!("{remark}"));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The blocks of a pcapng file, as they pass in pieces.
#[derive(Debug, Default)]
struct Blocks {
    /// The block that has begun.
    partial: Vec<u8>,
    packets: u64,
    /// By interface: the statistics count from the beginning, the last ones are valid.
    missed: BTreeMap<u32, u64>,
    /// Comments about the capture.
    remarks: Vec<String>,
}

impl Blocks {
    fn add(&mut self, bytes: &[u8]) {
        self.partial.extend_from_slice(bytes);
        let mut partial = std::mem::take(&mut self.partial);
        let mut rest = &partial[..];
        while let Some((head, _)) = rest.split_first_chunk::<8>() {
            let [kind, len] = [0, 4].map(|at| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]));
            let Some(block) = rest.get(..len.max(12) as usize) else { break };
            match kind {
                6 => self.packets += 1,
                5 => self.statistics(&block[8..]),
                _ => {}
            }
            rest = &rest[block.len()..];
        }
        let done = partial.len() - rest.len();
        partial.drain(..done);
        self.partial = partial;
    }
}

impl Blocks {
    /// Reads `isb_ifdrop` and comments of a statistics block's body: options begin behind interface and time stamp.
    fn statistics(&mut self, body: &[u8]) {
        let Some((interface, _)) = body.split_first_chunk() else { return };
        let mut options = body.get(12..).unwrap_or_default();
        while let Some((&[a, b, c, d], rest)) = options.split_first_chunk::<4>() {
            let (code, len) = (u16::from_le_bytes([a, b]), usize::from(u16::from_le_bytes([c, d])));
            let Some(value) = rest.get(..len) else { return };
            match code {
                0 => return,
                1 => self.remarks.push(String::from_utf8_lossy(value).replace(char::is_control, " ")),
                5 => {
                    let Ok(missed) = value.try_into().map(u64::from_le_bytes) else { return };
                    self.missed.insert(u32::from_le_bytes(*interface), missed);
                }
                _ => {}
            }
            options = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_in_whatever_pieces_they_come() {
        let block = |kind: u32, body: &[u8]| {
            let len = (body.len() as u32 + 12).to_le_bytes();
            [&kind.to_le_bytes()[..], &len, body, &len].concat()
        };
        let mut statistics = vec![0; 12];
        statistics
            .extend_from_slice(&[4, 0, 8, 0, 9, 0, 0, 0, 0, 0, 0, 0, 5, 0, 8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let file =
            [block(0x0a0d_0d0a, &[0; 16]), block(1, &[0; 8]), block(6, &[1; 64]), block(5, &statistics)].concat();
        // Later statistics of the same interface, and a comment.
        let remark = [&[0; 12][..], &[1, 0, 5, 0], b"a\nb\xffc\0\0\0", &[0; 4]].concat();
        let file = [file, block(5, &statistics), block(5, &remark)].concat();
        for size in [1, 7, file.len()] {
            let mut blocks = Blocks::default();
            file.chunks(size).for_each(|piece| blocks.add(piece));
            let missed: u64 = blocks.missed.values().sum();
            assert_eq!((blocks.packets, missed, blocks.partial.len()), (1, 7, 0), "pieces of {size}");
            assert_eq!(blocks.remarks, ["a b\u{fffd}c"], "pieces of {size}");
        }
        let mut hostile = Blocks::default();
        hostile.add(&[0; 4096]);
        hostile.add(&[6, 0, 0, 0, 0, 0, 0, 0]);
        hostile.add(&block(5, &[0; 3]));
        hostile.add(&block(5, &[[0; 12].as_slice(), &[5, 0, 255, 255, 1]].concat()));
        assert!(hostile.partial.len() < 64);
    }
}
