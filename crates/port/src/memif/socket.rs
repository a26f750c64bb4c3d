//! The control channel: a Unix socket of type SOCK_SEQPACKET that also passes descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::MemifError;
use super::message::{LEN, Message};

/// Time limit of a handshake step.
const PATIENCE: Duration = Duration::from_secs(2);

/// One connection.
#[derive(Debug)]
pub(super) struct Channel(pub(super) OwnedFd);

impl Channel {
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let fd = socket()?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Self::new(fd)
    }

    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(PATIENCE))?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(PATIENCE))?;
        Ok(Channel(fd))
    }

    /// Removes the time limit on messages.
    pub(super) fn wait_forever(&self) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, None)?)
    }

    pub(super) fn send(&self, message: &Message, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        rustix::net::sendmsg(&self.0, &[IoSlice::new(&message.emit())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// The next message, with its descriptor; `None` if the other end has closed.
    pub(super) fn receive(&self) -> Result<Option<(Message, Option<OwnedFd>)>, MemifError> {
        let mut bytes = [0; LEN + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                result => break result.map_err(io::Error::from)?,
            }
        };
        let mut fd = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fd = fds.last();
            }
        }
        match received.bytes {
            0 => Ok(None),
            len => Ok(Some((Message::parse(&bytes[..len.min(LEN + 1)])?, fd))),
        }
    }

    /// The next message of the handshake.
    pub(super) fn expect(&self) -> Result<(Message, Option<OwnedFd>), MemifError> {
        match self.receive()? {
            Some((Message::Disconnect { code, text }, _)) => {
                Err(MemifError::Disconnected(format!("{} (code {code})", text.escape_debug())))
            }
            Some(received) => Ok(received),
            None => Err(MemifError::Disconnected("connection closed".to_owned())),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(super) fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
