//! The XDP program: which frames go to AF_XDP sockets, and to which worker's.
//!
//! It redirects plain frames that are certainly ours: Ethernet without tags, IPv4 without options or IPv6 without
//! extension headers, not a fragment, no padding, UDP to a local address and one of our two ports. It passes all other
//! frames to the kernel. In front of each redirected frame it writes a [`Note`], so that user space need not parse the
//! outer headers again.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::hand_over::HandedDevice;
use super::parse::{IPV4_PAYLOAD, IPV6_PAYLOAD, NOTE_BIFROST, NOTE_BYTES, NOTE_MAGIC, NOTE_VXLAN};
use crate::bpf::{self, Assembler, Instruction, Jump, ProgramKind, Register, Size, xdp};
use crate::steer::{FOLD_MULTIPLIER, FOLD_SHIFT};

/// Pkt Type of a connection request, and of a reset (as in [`crate::steer`]).
const REQUEST: u32 = 3;
const RESET: u32 = 6;

/// What the program redirects.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Our underlay addresses.
    pub(crate) local: Vec<IpAddr>,
    pub(crate) bifrost_port: u16,
    pub(crate) vxlan_port: u16,
    /// At least 1.
    pub(crate) workers: u16,
    /// Longer frames are passed to the kernel, bytes.
    pub(crate) longest_frame: u32,
}

/// Loads the program. It redirects to socket `queue * workers + worker` of `sockets`, and passes frames without a
/// socket.
pub(crate) fn load(wanted: &Wanted, sockets: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    bpf::load_program(ProgramKind::Xdp, &assemble(wanted, sockets), "bifrost_xdp")
}

const R0: Register = Register(0);
const R1: Register = Register(1);
const R2: Register = Register(2);
const R3: Register = Register(3);
/// The worker, until the first call.
const WORKER: Register = Register(5);
const CONTEXT: Register = Register(6);
/// The frame; after the worker is chosen, the receive queue.
const FRAME: Register = Register(7);
const END: Register = Register(8);
/// The UDP payload; after the worker is chosen, the worker.
const PAYLOAD: Register = Register(9);
const STACK: Register = Register(10);
// Stack offsets of the note's words.
const OFFSET_SLOT: i16 = -4;
const SERVICE_SLOT: i16 = -8;
const TIME_SLOT: i16 = -16;

fn assemble(wanted: &Wanted, sockets: BorrowedFd<'_>) -> Vec<Instruction> {
    let mut a = Assembler::default();
    let [pass, v6, v4_ours, v6_ours, udp] = std::array::from_fn(|_| a.label());
    let [bifrost, by_cid, vxlan, fold, chosen, redirect] = std::array::from_fn(|_| a.label());
    let workers = u32::from(wanted.workers);
    // Passes the frame unless it has `bytes` bytes after `from`.
    let need = |a: &mut Assembler, from: Register, bytes: usize, otherwise| {
        a.copy(R0, from);
        a.add(R0, bytes as i32);
        a.jump_if_register(R0, Jump::Greater, END, otherwise);
    };

    a.copy(CONTEXT, R1);
    a.load(Size::Word, FRAME, CONTEXT, xdp::DATA);
    a.load(Size::Word, END, CONTEXT, xdp::DATA_END);
    need(&mut a, FRAME, IPV4_PAYLOAD, pass);
    a.load_big_endian(Size::Half, R1, FRAME, 12);
    // The verifier rejects unreachable code: generate none for a family without addresses.
    let has = |v4| wanted.local.iter().any(|address| address.is_ipv4() == v4);
    if has(false) {
        a.jump_if(R1, Jump::Equal, 0x86dd, v6);
    }
    if has(true) {
        a.jump_if(R1, Jump::NotEqual, 0x0800, pass);
        a.load(Size::Byte, R1, FRAME, 14);
        a.jump_if(R1, Jump::NotEqual, 0x45, pass); // options
        a.load_big_endian(Size::Half, R1, FRAME, 20);
        a.and(R1, 0xbfff);
        a.jump_if(R1, Jump::NotEqual, 0, pass); // a fragment
        a.load(Size::Byte, R1, FRAME, 23);
        a.jump_if(R1, Jump::NotEqual, 17, pass); // not UDP
        a.load_big_endian(Size::Word, R1, FRAME, 30);
        for address in &wanted.local {
            if let IpAddr::V4(address) = address {
                a.jump_if(R1, Jump::Equal, u32::from(*address), v4_ours);
            }
        }
        a.jump(pass);
        a.place(v4_ours);
        // From here on R1 is the length of the UDP datagram and R2 that of the frame, by the IP header.
        a.load_big_endian(Size::Half, R1, FRAME, 16);
        a.copy(R2, R1);
        a.add(R2, 14);
        a.add(R1, -20);
        a.copy(PAYLOAD, FRAME);
        a.add(PAYLOAD, IPV4_PAYLOAD as i32);
        a.store_constant(Size::Word, STACK, OFFSET_SLOT, IPV4_PAYLOAD as u32);
        a.jump(udp);
    } else {
        a.jump(pass);
    }
    if has(false) {
        a.place(v6);
        need(&mut a, FRAME, IPV6_PAYLOAD, pass);
        a.load(Size::Byte, R1, FRAME, 14);
        a.and(R1, 0xf0);
        a.jump_if(R1, Jump::NotEqual, 0x60, pass);
        a.load(Size::Byte, R1, FRAME, 20);
        a.jump_if(R1, Jump::NotEqual, 17, pass); // an extension header, or not UDP
        for address in &wanted.local {
            let IpAddr::V6(address) = address else { continue };
            let other = a.label();
            for word in 0..4 {
                a.load_big_endian(Size::Word, R1, FRAME, 38 + 4 * word);
                let part = (u128::from(*address) >> (96 - 32 * i32::from(word))) as u32;
                a.jump_if(R1, Jump::NotEqual, part, other);
            }
            a.jump(v6_ours);
            a.place(other);
        }
        a.jump(pass);
        a.place(v6_ours);
        a.load(Size::Half, R1, FRAME, 60);
        a.jump_if(R1, Jump::Equal, 0, pass); // no checksum: the kernel accepts that for plain VXLAN only
        a.load_big_endian(Size::Half, R1, FRAME, 18);
        a.copy(R2, R1);
        a.add(R2, 54);
        a.copy(PAYLOAD, FRAME);
        a.add(PAYLOAD, IPV6_PAYLOAD as i32);
        a.store_constant(Size::Word, STACK, OFFSET_SLOT, IPV6_PAYLOAD as u32);
    }

    // The frame length must match the IP length, and the UDP length the IP payload. Without further capabilities only
    // pointers into the same frame may be compared, and only by order.
    a.place(udp);
    a.jump_if(R2, Jump::Greater, wanted.longest_frame, pass);
    a.copy(R0, FRAME);
    a.add_register(R0, R2);
    a.jump_if_register(R0, Jump::Less, END, pass);
    a.jump_if_register(R0, Jump::Greater, END, pass);
    a.load_big_endian(Size::Half, R3, PAYLOAD, -4);
    a.jump_if_register(R3, Jump::NotEqual, R1, pass);
    a.load_big_endian(Size::Half, R3, PAYLOAD, -6);
    a.set(WORKER, 0);
    a.jump_if(R3, Jump::Equal, u32::from(wanted.bifrost_port), bifrost);
    a.jump_if(R3, Jump::Equal, u32::from(wanted.vxlan_port), vxlan);
    a.jump(pass);

    // steer::worker_of_bifrost.
    a.place(bifrost);
    a.store_constant(Size::Word, STACK, SERVICE_SLOT, NOTE_BIFROST);
    need(&mut a, PAYLOAD, 20, chosen);
    a.load(Size::Byte, R1, PAYLOAD, 8);
    a.jump_if(R1, Jump::Equal, RESET, chosen);
    a.load_big_endian(Size::Word, R2, PAYLOAD, 16);
    a.jump_if(R1, Jump::NotEqual, REQUEST, by_cid);
    a.jump_if(R2, Jump::NotEqual, 0, by_cid);
    need(&mut a, PAYLOAD, 32, chosen);
    a.load(Size::Word, R1, PAYLOAD, 22);
    a.load(Size::Word, R2, PAYLOAD, 28);
    a.jump(fold);
    a.place(by_cid);
    a.shift_right(R2, 24);
    a.jump_if(R2, Jump::GreaterOrEqual, workers, chosen);
    a.copy(WORKER, R2);
    a.jump(chosen);

    // steer::worker_of_vxlan.
    a.place(vxlan);
    a.store_constant(Size::Word, STACK, SERVICE_SLOT, NOTE_VXLAN);
    need(&mut a, PAYLOAD, 20, chosen);
    a.load(Size::Word, R1, PAYLOAD, 10);
    a.load(Size::Word, R2, PAYLOAD, 16);
    a.place(fold);
    a.xor_register(R1, R2);
    a.big_endian_word(R1);
    a.copy(R2, R1);
    a.shift_right(R2, FOLD_SHIFT);
    a.xor_register(R1, R2);
    a.multiply(R1, FOLD_MULTIPLIER);
    a.shift_right(R1, FOLD_SHIFT);
    a.modulo(R1, workers);
    a.copy(WORKER, R1);

    // The note; skipped if the driver has no headroom for it.
    a.place(chosen);
    a.copy(PAYLOAD, WORKER);
    a.load(Size::Word, FRAME, CONTEXT, xdp::RX_QUEUE_INDEX);
    a.call(xdp::KTIME_GET_NS);
    a.store(Size::Double, STACK, TIME_SLOT, R0);
    xdp::make_room(&mut a, CONTEXT, NOTE_BYTES, redirect);
    a.store_constant(Size::Word, R1, 0, NOTE_MAGIC);
    a.store(Size::Word, R1, 4, PAYLOAD);
    a.load(Size::Word, R3, STACK, OFFSET_SLOT);
    a.store(Size::Word, R1, 8, R3);
    a.load(Size::Word, R3, STACK, SERVICE_SLOT);
    a.store(Size::Word, R1, 12, R3);
    xdp::copy_double(&mut a, STACK, TIME_SLOT, 16);

    a.place(redirect);
    a.multiply(FRAME, workers);
    a.add_register(FRAME, PAYLOAD);
    a.load_map(R1, sockets);
    a.copy(R2, FRAME);
    a.set(R3, xdp::PASS);
    a.call(xdp::REDIRECT_MAP);
    a.exit();

    a.place(pass);
    a.set(R0, xdp::PASS);
    a.exit();
    a.finish()
}

/// A loaded program with its map, attached to a device by [`bpf::attach_xdp`].
#[derive(Debug)]
pub(crate) struct Steering {
    /// The sockets.
    pub(crate) sockets: OwnedFd,
    /// Keeps the program attached.
    pub(crate) link: bpf::XdpLink,
    /// Whether it runs in the driver.
    pub(crate) native: bool,
    /// The device's interface index.
    pub(crate) device: u32,
    /// Number of its queues that have sockets.
    pub(crate) queues: u32,
}

impl Steering {
    /// Loads the program and attaches it to interface index `device`, in the first of `modes` that the device supports.
    pub(crate) fn attach(wanted: &Wanted, device: u32, queues: u32, modes: &[bpf::XdpMode]) -> io::Result<Self> {
        let sockets = bpf::create_socket_map(queues * u32::from(wanted.workers))?;
        let program = load(wanted, sockets.as_fd())?;
        let (link, mode) = bpf::attach_xdp(program.as_fd(), device, modes)?;
        Ok(Self { sockets, link, native: mode == bpf::XdpMode::Native, device, queues })
    }

    /// Its mode, for the log.
    pub(crate) fn mode(&self) -> &'static str {
        if self.native { "native" } else { "generic" }
    }

    /// Takes the link of another process, and loads a program that may take the place of that process's: with
    /// [`XdpLink::replace`](bpf::XdpLink::replace), once this one's sockets are bound.
    pub(crate) fn adopt(wanted: &Wanted, handed: HandedDevice) -> io::Result<(Self, OwnedFd)> {
        let HandedDevice { device, queues, native, link } = handed;
        let link = bpf::XdpLink::adopt(link, device)?;
        let sockets = bpf::create_socket_map(queues * u32::from(wanted.workers))?;
        let program = load(wanted, sockets.as_fd())?;
        Ok((Self { sockets, link, native, device, queues }, program))
    }
}
