//! Creates the underlay's sockets.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use bifrost_udp::{set_int, set_program};
use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

use super::{UdpConfig, UdpError, program};
use crate::underlay::Service;

/// Initial TTL and hop limit: receivers count hops from it.
pub(crate) const INITIAL_TTL: u8 = 64;

/// `IP_PMTUDISC_PROBE`: set DF, and ignore the path MTU in ICMP. The same value for IPv6.
const PMTUDISC_PROBE: i32 = 3;

/// A socket for one of the two well-known ports, for all local addresses of the family of `local`. It is not bound yet.
pub(crate) fn receive(config: &UdpConfig, local: IpAddr, service: Service) -> Result<Socket, UdpError> {
    let address = SocketAddr::new(local, config.port(service));
    let socket = new(address).map_err(|e| UdpError::option(address, &e))?;
    let setup = || {
        accept(config, &socket, local.is_ipv4())?;
        coalesce(config, &socket);
        set_int(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        set_int(&socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
        match local {
            IpAddr::V4(_) => {
                set_int(&socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
                set_int(&socket, libc::IPPROTO_IP, libc::IP_RECVTTL, 1)?;
            }
            IpAddr::V6(_) => {
                set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
                set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1)?;
                // Plain VXLAN may have no checksum (RFC 7348, section 5; RFC 6935), which the kernel would reject by
                // default.
                if service == Service::Vxlan {
                    set_int(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
                }
            }
        }
        if sockopt::set_socket_recv_buffer_size_force(&socket, config.receive_buffer_bytes).is_err() {
            socket.set_recv_buffer_size(config.receive_buffer_bytes)?;
        }
        Ok(())
    };
    setup().map_err(|e: io::Error| UdpError::option(address, &e))?;
    Ok(socket)
}

/// Binds a receive socket. `beside`: other sockets overlap with it, which share their port.
pub(crate) fn bind_receive(
    config: &UdpConfig,
    socket: &Socket,
    local: IpAddr,
    service: Service,
    beside: bool,
) -> Result<(), UdpError> {
    let address = SocketAddr::new(local, config.port(service));
    let shared = config.workers > 1;
    // Worker 0 does not share the port when it binds, so that binding fails if another daemon uses the port.
    let bound = socket.set_reuse_port(beside || (shared && config.worker > 0));
    bound.and_then(|()| socket.bind(&address.into())).map_err(|e| UdpError::bind(address, &e))?;
    let setup = || match config.worker {
        0 => socket.set_reuse_port(shared),
        // The first socket that joins worker 0's makes them a group, which the kernel needs before a program.
        1 => steer(config, socket, service),
        _ => Ok(()),
    };
    setup().map_err(|e| UdpError::option(address, &e))
}

/// Steers the datagrams for a group of receive sockets to the first of them, one per worker. The group may have more.
pub(crate) fn steer(config: &UdpConfig, socket: &Socket, service: Service) -> io::Result<()> {
    let steering = match service {
        Service::Bifrost => program::bifrost(config.workers),
        Service::Vxlan => program::vxlan(config.workers),
    };
    set_program(socket, libc::SO_ATTACH_REUSEPORT_CBPF, &steering)
}

/// Lets a receive socket accept only datagrams to the local addresses of one family.
pub(crate) fn accept(config: &UdpConfig, socket: &Socket, ipv4: bool) -> io::Result<()> {
    set_program(socket, libc::SO_ATTACH_FILTER, &program::only_to(&config.local, ipv4))
}

/// Lets the kernel coalesce datagrams, if configured. Without it (before Linux 5.0) they arrive one by one.
pub(crate) fn coalesce(config: &UdpConfig, socket: &Socket) {
    if config.gro {
        let _ = set_int(socket, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
}

/// A transmit socket bound to a path's source port, and whether the kernel segments on it.
///
/// These ports receive no traffic: a filter rejects every datagram before it uses memory, so there is nothing to drain.
pub(crate) fn transmit(config: &UdpConfig, local: SocketAddr) -> Result<(Socket, bool), UdpError> {
    let socket = bind(local, config.workers > 1).map_err(|e| UdpError::bind(local, &e))?;
    let setup = || {
        set_program(&socket, libc::SO_ATTACH_FILTER, &program::refuse_all())?;
        if local.is_ipv4() {
            set_int(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, PMTUDISC_PROBE)?;
            socket.set_ttl_v4(u32::from(INITIAL_TTL))?;
        } else {
            set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, PMTUDISC_PROBE)?;
            set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)?;
            socket.set_unicast_hops_v6(u32::from(INITIAL_TTL))?;
        }
        if set_int(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, as_int(config.send_buffer_bytes)).is_err() {
            socket.set_send_buffer_size(config.send_buffer_bytes)?;
        }
        Ok(())
    };
    setup().map_err(|e: io::Error| UdpError::option(local, &e))?;
    Ok(segments(config, socket))
}

/// A transmit socket, and whether the kernel segments on it.
pub(crate) fn segments(config: &UdpConfig, socket: Socket) -> (Socket, bool) {
    let segments = config.gso && set_int(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
    (socket, segments)
}

/// A UDP socket opened by another process, and its bound address.
pub(crate) fn adopt(fd: OwnedFd) -> Result<(Socket, SocketAddr), UdpError> {
    let socket = Socket::from(fd);
    if socket.r#type()? != Type::DGRAM {
        return Err(UdpError::Config("a descriptor that was handed over is not a UDP socket".to_owned()));
    }
    let bound = socket.local_addr()?.as_socket();
    let bound = bound.ok_or_else(|| UdpError::Config("a socket that was handed over has no address".to_owned()))?;
    Ok((socket, bound))
}

fn new(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

fn bind(address: SocketAddr, shared: bool) -> io::Result<Socket> {
    let socket = new(address)?;
    socket.set_reuse_port(shared)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn as_int(bytes: usize) -> i32 {
    i32::try_from(bytes).unwrap_or(i32::MAX)
}
