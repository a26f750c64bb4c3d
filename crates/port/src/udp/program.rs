//! Classic BPF programs for UDP sockets: choosing the worker, and rejecting all packets.
//!
//! A reuseport program sees the datagram from its UDP payload on, and returns the index of a socket in the group, by
//! bind order. A load beyond the end ends the program with 0: worker 0.

use std::net::IpAddr;

use libc::sock_filter;

use crate::steer::{FOLD_MULTIPLIER, FOLD_SHIFT};

// Instruction codes, linux/filter.h.
const LOAD_WORD: u16 = 0x20;
const LOAD_BYTE: u16 = 0x30;
const RETURN_CONSTANT: u16 = 0x06;
const RETURN_A: u16 = 0x16;
const A_TO_X: u16 = 0x07;
const XOR_X: u16 = 0xac;
const SHIFT_RIGHT: u16 = 0x74;
const MULTIPLY: u16 = 0x24;
const MODULO: u16 = 0x94;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_EQUAL: u16 = 0x35;

/// Worker of a datagram on the BIFROST port: [`crate::steer::worker_of_bifrost`]. `workers` is at least 1.
pub(crate) fn bifrost(workers: u16) -> Vec<sock_filter> {
    let n = u32::from(workers);
    let mut program = vec![
        op(LOAD_BYTE, 8),
        jump(JUMP_EQUAL, 6, 7, 0), // reset: worker 0
        jump(JUMP_EQUAL, 3, 0, 2), // not a request: by CID
        op(LOAD_WORD, 16),
        jump(JUMP_EQUAL, 0, 5, 0), // request without CID: by vNIC pair
        op(LOAD_WORD, 16),
        op(SHIFT_RIGHT, 24), // top byte of the CID
        jump(JUMP_GREATER_EQUAL, n, 1, 0),
        op(RETURN_A, 0),
        op(RETURN_CONSTANT, 0),
    ];
    program.extend(pair(22, 28, n));
    program
}

/// Worker of a datagram on the VXLAN port: [`crate::steer::worker_of_vxlan`]. `workers` is at least 1.
pub(crate) fn vxlan(workers: u16) -> Vec<sock_filter> {
    pair(10, 16, u32::from(workers)).to_vec()
}

/// Socket filter that rejects every packet.
pub(crate) fn refuse_all() -> [sock_filter; 1] {
    [op(RETURN_CONSTANT, 0)]
}

/// Socket filter that accepts packets to `local` addresses of one family only.
pub(crate) fn only_to(local: &[IpAddr], ipv4: bool) -> Vec<sock_filter> {
    let mut program = Vec::new();
    for address in local.iter().filter(|a| a.is_ipv4() == ipv4) {
        // Offsets of the destination in the IP header.
        let (words, start): (Vec<u32>, u32) = match address {
            IpAddr::V4(a) => (vec![u32::from(*a)], 16),
            IpAddr::V6(a) => ((0..4).rev().map(|i| (u128::from(*a) >> (32 * i)) as u32).collect(), 24),
        };
        let count = words.len() as u8;
        for (i, word) in words.into_iter().enumerate() {
            // `SKF_NET_OFF` counts from the IP header; a mismatch skips the rest of this address and its verdict.
            program.push(op(LOAD_WORD, (libc::SKF_NET_OFF as u32).wrapping_add(start + 4 * i as u32)));
            program.push(jump(JUMP_EQUAL, word, 0, 2 * (count - 1 - i as u8) + 1));
        }
        program.push(op(RETURN_CONSTANT, u32::MAX));
    }
    program.push(op(RETURN_CONSTANT, 0));
    program
}

fn pair(first: u32, second: u32, workers: u32) -> [sock_filter; 11] {
    [
        op(LOAD_WORD, first),
        op(A_TO_X, 0),
        op(LOAD_WORD, second),
        op(XOR_X, 0),
        op(A_TO_X, 0),
        op(SHIFT_RIGHT, FOLD_SHIFT),
        op(XOR_X, 0),
        op(MULTIPLY, FOLD_MULTIPLIER),
        op(SHIFT_RIGHT, FOLD_SHIFT),
        op(MODULO, workers),
        op(RETURN_A, 0),
    ]
}

fn op(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

fn jump(code: u16, k: u32, if_true: u8, if_false: u8) -> sock_filter {
    sock_filter { code, jt: if_true, jf: if_false, k }
}
