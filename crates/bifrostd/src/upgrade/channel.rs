//! The socket between two daemons: messages with descriptors, with timeouts.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::format::{HEADER_BYTES, Header, Kind};

/// Descriptors sent with one byte: the kernel accepts up to 253 (`SCM_MAX_FD`).
const MAX_PER_CALL: usize = 128;

/// One end of the socket.
#[derive(Debug)]
pub(super) struct Channel(UnixStream);

/// A received message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Channel {
    pub(super) fn new(stream: UnixStream) -> Channel {
        Channel(stream)
    }

    /// Sends a message. Fails if the other end reads nothing for `patience`.
    pub(super) fn send(
        &self,
        kind: Kind,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<()> {
        self.0.set_write_timeout(Some(patience))?;
        let header = Header { kind, bytes: body.len() as u64, descriptors: u32::try_from(descriptors.len())? };
        let mut stream = &self.0;
        stream.write_all(&header.emit()).context("writing to the other bifrostd")?;
        stream.write_all(body).context("writing to the other bifrostd")?;
        for some in descriptors.chunks(MAX_PER_CALL) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_CALL))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            ensure!(control.push(SendAncillaryMessage::ScmRights(some)), "too many descriptors at once");
            let sent = rustix::net::sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
            sent.context("handing over descriptors")?;
        }
        Ok(())
    }

    /// Receives the next message. Fails if nothing arrives for `patience`, before or within it.
    pub(super) fn receive(&self, patience: Duration) -> Result<Message> {
        self.0.set_read_timeout(Some(patience))?;
        let mut stream = &self.0;
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).context("the other bifrostd does not answer")?;
        let Header { kind, bytes, descriptors: wanted } = Header::parse(&header)?;
        let mut body = Vec::new();
        stream.take(bytes).read_to_end(&mut body).context("the other bifrostd stopped in the middle of a message")?;
        ensure!(body.len() as u64 == bytes, "the other bifrostd ended in the middle of a message");
        let mut descriptors = Vec::new();
        while descriptors.len() < wanted as usize {
            let before = descriptors.len();
            self.receive_descriptors(&mut descriptors)?;
            ensure!(descriptors.len() > before, "descriptors are missing");
        }
        ensure!(descriptors.len() == wanted as usize, "more descriptors than announced");
        Ok(Message { kind, body, descriptors })
    }

    fn receive_descriptors(&self, descriptors: &mut Vec<OwnedFd>) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_CALL))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(self.0.as_fd(), &mut slices, &mut control, flags);
        let received = received.context("waiting for descriptors")?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        ensure!(!received.flags.contains(ReturnFlags::CTRUNC), "descriptors were lost: is LimitNOFILE too small?");
        if received.bytes == 0 {
            bail!("the other bifrostd ended before all descriptors had arrived");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(5);

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().unwrap();
        (Channel::new(a), Channel::new(b))
    }

    #[test]
    fn messages_arrive_with_all_descriptors_in_order() {
        let (ours, theirs) = pair();
        let files: Vec<_> = (0..300).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let body = vec![7; 1 << 20];
        let send = std::thread::spawn(move || {
            let descriptors: Vec<_> = files.iter().map(std::os::fd::AsFd::as_fd).collect();
            ours.send(Kind::Offer, &body, &descriptors, LATE).unwrap();
            ours.send(Kind::Running, &[], &[], LATE).unwrap();
        });
        let offer = theirs.receive(LATE).unwrap();
        assert_eq!((offer.kind, offer.body.len(), offer.descriptors.len()), (Kind::Offer, 1 << 20, 300));
        assert!(offer.descriptors.iter().all(|fd| fd.as_raw_fd() > 2));
        assert_eq!(theirs.receive(LATE).unwrap().kind, Kind::Running);
        send.join().unwrap();
        // The sender has ended.
        assert!(theirs.receive(SOON).is_err());
    }

    #[test]
    fn silence_and_invalid_messages_are_errors() {
        let (ours, theirs) = pair();
        assert!(theirs.receive(SOON).is_err());
        (&ours.0).write_all(&Header { kind: Kind::Ready, bytes: 10, descriptors: 0 }.emit()).unwrap();
        (&ours.0).write_all(b"half").unwrap();
        assert!(theirs.receive(SOON).is_err());
        let (ours, theirs) = pair();
        (&ours.0).write_all(&[0; 64]).unwrap();
        assert!(format!("{:#}", theirs.receive(SOON).unwrap_err()).contains("not a message"));
        // Announced, but never sent.
        let (ours, theirs) = pair();
        (&ours.0).write_all(&Header { kind: Kind::Ready, bytes: 0, descriptors: 3 }.emit()).unwrap();
        (&ours.0).write_all(&[0]).unwrap();
        assert!(theirs.receive(SOON).is_err());
        // The receiver does not read.
        let (ours, _theirs) = pair();
        assert!(ours.send(Kind::State, &vec![0; 8 << 20], &[], SOON).is_err());
    }
}
