//! Frames that are nearly valid: a TCP, UDP or ICMP packet from decisions, or plain bytes.

use crate::Input;

/// A frame with at most `max` bytes after its headers.
pub(super) fn frame(input: &mut Input<'_>, max: usize) -> Vec<u8> {
    if input.chance(40) {
        return input.bytes(max.max(64)).to_vec();
    }
    let mut f = Vec::new();
    let mac = |n: u8| [2, 0, 0, 0, 0, n % 6];
    f.extend(match input.below(8) {
        0 => [0xff; 6],
        1 => [0x02, 0xbf, 0, 0, 0, 1],
        2 => [0x33, 0x33, 0, 0, 0, 1],
        n => mac(n as u8),
    });
    f.extend(mac(input.u8()));
    for _ in 0..[0, 0, 0, 1, 2, 3][input.below(6)] {
        f.extend(if input.chance(128) { [0x88, 0xa8] } else { [0x81, 0x00] });
        f.extend(input.u16().to_be_bytes());
    }
    let l3 = f.len() + 2;
    let v6 = match input.below(8) {
        0 => {
            f.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1 + input.below(3) as u8]);
            for _ in 0..2 {
                f.extend(mac(input.u8()));
                f.extend([10, 0, 0, input.u8() % 6]);
            }
            return damaged(f, input);
        }
        n => n > 4,
    };
    let protocol = input.pick(&[6u8, 6, 6, 17, 17, 1, 58, 44, 0, 50]);
    let body = transport(input, protocol, max);
    let host = |n: u8| if n == 5 { 254 } else { n % 6 };
    let (src, dst) = (input.u8(), input.u8());
    if v6 {
        f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        f.extend((body.len() as u16).to_be_bytes());
        f.extend([protocol, input.pick(&[64, 255, 1, 0])]);
        for n in [src, dst] {
            f.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host(n % 6)]);
        }
    } else {
        let options = [0, 0, 0, 4, 40][input.below(5)];
        let fragment = if input.chance(20) { input.u16() } else { 0x4000 };
        f.extend([0x08, 0x00, 0x45 + options / 4, input.u8()]);
        f.extend(((20 + usize::from(options) + body.len()) as u16).to_be_bytes());
        f.extend(input.u16().to_be_bytes());
        f.extend(fragment.to_be_bytes());
        f.extend([input.pick(&[64, 255, 1, 0]), protocol, 0, 0]);
        for n in [src, dst] {
            f.extend([10, input.pick(&[0, 0, 0, 1, 2]), 0, host(n % 6)]);
        }
        f.resize(f.len() + usize::from(options), 1);
        let header = &mut f[l3..];
        bifrost_wire::ipv4::fill_checksum(header);
    }
    f.extend(body);
    damaged(f, input)
}

fn transport(input: &mut Input<'_>, protocol: u8, max: usize) -> Vec<u8> {
    let mut t = Vec::new();
    let payload = usize::from(input.u16()) % max.max(1);
    match protocol {
        6 => {
            t.extend([0x9c, input.u8() % 4, 0x18, 0xeb]);
            t.extend(input.u32().to_be_bytes());
            t.extend([0, 0, 0, 1]);
            let options = [0u8, 0, 12, 40][input.below(4)];
            t.extend([(20 + options) << 2, input.pick(&[0x10, 0x18, 0x10, 0x02, 0x11, 0xff])]);
            t.extend([1, 0, 0, 0, 0, 0]);
            t.resize(20 + usize::from(options), 1);
        }
        17 => {
            t.extend([0x9c, input.u8() % 4, 0, 53]);
            let wrong = if input.chance(20) { u16::from(input.u8()) } else { 0 };
            t.extend((8 + payload as u16).wrapping_add(wrong).to_be_bytes());
            t.extend([0, 0]);
        }
        58 => {
            t.extend([input.pick(&[128u8, 135, 136, 134, 137, 2]), 0, 0, 0]);
            t.extend(input.u32().to_be_bytes());
            t.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, input.u8() % 6]);
            t.extend([input.pick(&[1u8, 2, 14]), input.below(3) as u8, 2, 0, 0, 0, 0, input.u8() % 6]);
        }
        _ => t.extend([8, 0, 0, 0, 0, 1, 0, 1]),
    }
    let fill = input.u8();
    t.resize(t.len() + payload, fill);
    t
}

/// Changes a few bytes, and perhaps truncates or pads.
fn damaged(mut f: Vec<u8>, input: &mut Input<'_>) -> Vec<u8> {
    for _ in 0..input.u8() / 86 {
        let at = usize::from(input.u8()) % f.len();
        f[at] = input.u8();
    }
    match input.below(16) {
        1 => f.truncate(f.len() - f.len().min(usize::from(input.u8()))),
        2 => f.resize(f.len() + usize::from(input.u8()), 0),
        _ => {}
    }
    f
}
