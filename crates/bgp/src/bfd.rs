//! BFD for one hop in asynchronous mode (RFC 5880, 5881), without authentication and echo.

use thiserror::Error;

/// Length of a control packet without authentication, bytes (RFC 5880, section 4.1).
pub const LEN: usize = 24;
/// The destination port of control packets (RFC 5881, section 4).
pub const PORT: u16 = 3784;
/// Minimum transmit interval while a session is not up, ns (RFC 5880, section 6.8.3).
const SLOW_NS: u64 = 1_000_000_000;
const US: u64 = 1000;
/// P and F bits (RFC 5880, section 4.1).
const POLL: u8 = 1 << 5;
const FINAL: u8 = 1 << 4;

/// Settings of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BfdConfig {
    /// Desired min TX interval, and required min RX interval, µs.
    pub interval_us: u32,
    /// Detect mult: number of missed packets after which the other end is down, 1 to 255.
    pub multiplier: u8,
    /// Local discriminator, not 0.
    pub discriminator: u32,
}

/// The state of a session (RFC 5880, section 6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BfdState {
    /// Held down by an administrator.
    AdminDown,
    /// The other end is not reachable.
    Down,
    /// The other end sends packets, but does not receive this end's yet.
    Init,
    /// Both ends receive each other's packets.
    Up,
}

/// Why a packet was dropped (RFC 5880, section 6.8.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BfdError {
    /// Too short, another version, or an invalid field.
    #[error("malformed")]
    Malformed,
    /// It belongs to another session.
    #[error("for another session")]
    OtherSession,
    /// Authentication or multipoint.
    #[error("with an unsupported feature")]
    Unsupported,
}

/// One end of a session.
#[derive(Clone, Debug)]
pub struct Bfd {
    config: BfdConfig,
    state: BfdState,
    diagnostic: u8,
    remote: u32,
    remote_min_rx_ns: u64,
    /// Detection time: the other end's multiplier times its transmit interval, ns.
    detection_ns: u64,
    heard_at: u64,
    send_at: u64,
    /// The next packet has the F bit, because the other end has polled.
    finish: bool,
    /// A Poll Sequence runs (section 6.5): packets have the P bit until one with the F bit arrives.
    polling: bool,
    random: u64,
}

impl Bfd {
    /// A session that is down.
    pub fn new(config: BfdConfig) -> Self {
        Bfd {
            config,
            state: BfdState::Down,
            diagnostic: 0,
            remote: 0,
            remote_min_rx_ns: 1000,
            detection_ns: 0,
            heard_at: 0,
            send_at: 0,
            finish: false,
            polling: false,
            random: u64::from(config.discriminator) | 1,
        }
    }

    /// Its state.
    pub fn state(&self) -> BfdState {
        self.state
    }

    /// When to call [`poll`](Self::poll) next.
    pub fn deadline(&self) -> u64 {
        self.send_at
    }

    /// Processes a received control packet. The caller has checked that its hop limit is 255.
    ///
    /// # Errors
    /// The packet is dropped.
    pub fn received(&mut self, now: u64, packet: &[u8]) -> Result<(), BfdError> {
        let packet: &[u8; LEN] = packet.first_chunk().ok_or(BfdError::Malformed)?;
        let word = |at: usize| u32::from_be_bytes([packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]);
        let (version, flags) = (packet[0] >> 5, packet[1] & 0x3f);
        let (multiplier, length, mine, yours) = (packet[2], packet[3], word(4), word(8));
        if version != 1 || usize::from(length) < LEN || multiplier == 0 || mine == 0 {
            return Err(BfdError::Malformed);
        }
        const AUTHENTICATION: u8 = 1 << 2;
        const MULTIPOINT: u8 = 1;
        if flags & (AUTHENTICATION | MULTIPOINT) != 0 {
            return Err(BfdError::Unsupported);
        }
        let theirs = match packet[1] >> 6 {
            0 => BfdState::AdminDown,
            1 => BfdState::Down,
            2 => BfdState::Init,
            _ => BfdState::Up,
        };
        let is_down = matches!(theirs, BfdState::Down | BfdState::AdminDown);
        if yours != self.config.discriminator && (yours != 0 || !is_down) {
            return Err(BfdError::OtherSession);
        }
        self.remote = mine;
        let before = self.remote_min_rx_ns;
        self.remote_min_rx_ns = u64::from(word(16)) * US;
        let sends_ns = u64::from(word(12).max(self.config.interval_us)) * US;
        self.detection_ns = u64::from(multiplier) * sends_ns;
        self.heard_at = now;
        self.finish |= flags & POLL != 0;
        self.polling &= flags & FINAL == 0;
        let (next, diagnostic) = match (self.state, theirs) {
            (BfdState::AdminDown, _) => (BfdState::AdminDown, self.diagnostic),
            // 3: neighbour signaled session down.
            (BfdState::Init | BfdState::Up, BfdState::AdminDown) => (BfdState::Down, 3),
            (BfdState::Up, BfdState::Down) => (BfdState::Down, 3),
            (BfdState::Down, BfdState::Down) => (BfdState::Init, 0),
            (BfdState::Down, BfdState::Init) | (BfdState::Init, BfdState::Init | BfdState::Up) => (BfdState::Up, 0),
            (state, _) => (state, self.diagnostic),
        };
        // Only while the session is up, this end sends as often as configured. It tells the other end, and makes sure that
        // it knows (section 6.8.3).
        if next != self.state {
            self.polling = next == BfdState::Up;
        }
        // Changes are sent at once.
        if next != self.state || self.finish || before > self.remote_min_rx_ns {
            self.send_at = now;
        }
        (self.state, self.diagnostic) = (next, diagnostic);
        Ok(())
    }

    /// Checks the detection time, and returns a packet if one is due.
    pub fn poll(&mut self, now: u64) -> Option<[u8; LEN]> {
        let silent = self.detection_ns > 0 && now.saturating_sub(self.heard_at) >= self.detection_ns;
        if silent && matches!(self.state, BfdState::Init | BfdState::Up) {
            // 1: control detection time expired.
            (self.state, self.diagnostic, self.remote, self.polling) = (BfdState::Down, 1, 0, false);
            self.send_at = now;
        }
        // A required min RX interval of 0 means that the other end wants no packets (section 6.8.7).
        if now < self.send_at || self.remote_min_rx_ns == 0 && self.remote != 0 {
            return None;
        }
        let own_ns = u64::from(self.interval_us()) * US;
        let every_ns = own_ns.max(self.remote_min_rx_ns);
        // Jitter: 75 % to 100 % of the interval, or at most 90 % with a multiplier of 1 (section 6.8.7).
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let spread = if self.config.multiplier == 1 { 15 } else { 25 };
        let percent = 75 + (self.random >> 33) % spread;
        self.send_at = now + every_ns * percent / 100;
        Some(self.packet())
    }

    /// Desired min TX interval of the next packet, µs.
    fn interval_us(&self) -> u32 {
        let slow = (SLOW_NS / US) as u32;
        if self.state == BfdState::Up { self.config.interval_us } else { self.config.interval_us.max(slow) }
    }

    fn packet(&mut self) -> [u8; LEN] {
        let state = match self.state {
            BfdState::AdminDown => 0,
            BfdState::Down => 1,
            BfdState::Init => 2,
            BfdState::Up => 3,
        };
        // A packet never has both bits (section 6.5).
        let bits = match (std::mem::take(&mut self.finish), self.polling) {
            (true, _) => FINAL,
            (false, true) => POLL,
            (false, false) => 0,
        };
        let mut packet = [0; LEN];
        packet[0] = 1 << 5 | self.diagnostic;
        packet[1] = state << 6 | bits;
        (packet[2], packet[3]) = (self.config.multiplier.max(1), LEN as u8);
        packet[4..8].copy_from_slice(&self.config.discriminator.to_be_bytes());
        packet[8..12].copy_from_slice(&self.remote.to_be_bytes());
        packet[12..16].copy_from_slice(&self.interval_us().to_be_bytes());
        packet[16..20].copy_from_slice(&self.config.interval_us.to_be_bytes());
        // The required min echo RX interval is 0: no echo.
        packet
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn end(discriminator: u32) -> Bfd {
        Bfd::new(BfdConfig { interval_us: 50_000, multiplier: 3, discriminator })
    }

    /// Advances the time; `alive`: the second end runs. Returns when the first end went down.
    fn run(a: &mut Bfd, b: &mut Bfd, from: u64, to: u64, alive: bool) -> Option<u64> {
        let (mut sent, mut down) = ([0, 0], None);
        for now in (from..to).step_by(MS as usize) {
            if let Some(packet) = a.poll(now) {
                sent[0] += 1;
                if alive {
                    b.received(now, &packet).unwrap();
                }
            }
            if alive && let Some(packet) = b.poll(now) {
                sent[1] += 1;
                a.received(now, &packet).unwrap();
            }
            if a.state() != BfdState::Up && down.is_none() {
                down = Some(now);
            }
        }
        down
    }

    #[test]
    fn a_session_comes_up_and_a_dead_end_is_detected_in_time() {
        let (mut a, mut b) = (end(7), end(9));
        run(&mut a, &mut b, 0, 5000 * MS, true);
        assert_eq!((a.state(), b.state()), (BfdState::Up, BfdState::Up));
        assert_eq!(run(&mut a, &mut b, 5000 * MS, 65_000 * MS, true), None, "a minute without a flap");
        let down = run(&mut a, &mut b, 65_000 * MS, 66_000 * MS, false).unwrap();
        assert!((100 * MS..=151 * MS).contains(&(down - 65_000 * MS)), "{down}");
        // The other end restarts, with another discriminator.
        let mut b = end(11);
        run(&mut a, &mut b, 66_000 * MS, 72_000 * MS, true);
        assert_eq!((a.state(), b.state()), (BfdState::Up, BfdState::Up));
        assert_eq!(a.remote, 11);
    }

    #[test]
    fn a_poll_is_answered() {
        let (mut a, mut b) = (end(7), end(9));
        run(&mut a, &mut b, 0, 5000 * MS, true);
        let mut poll = b.packet();
        assert_eq!(poll[1], 3 << 6, "up, and its own Poll Sequence has ended");
        poll[1] |= POLL;
        a.received(5000 * MS, &poll).unwrap();
        let answer = a.poll(5000 * MS).unwrap();
        assert_eq!(answer[1], 3 << 6 | FINAL, "up, and final");
    }

    #[test]
    fn the_interval_of_a_session_that_is_up_is_polled() {
        let (mut a, mut b) = (end(7), end(9));
        a.received(0, &b.packet()).unwrap();
        assert_eq!((a.state(), a.packet()[1]), (BfdState::Init, 2 << 6), "no Poll Sequence before it is up");
        b.received(0, &a.packet()).unwrap();
        a.received(0, &b.packet()).unwrap();
        assert_eq!((a.state(), b.state()), (BfdState::Up, BfdState::Up));
        // The other end polls, too: an answer first.
        assert_eq!(a.packet()[1], 3 << 6 | FINAL);
        for _ in 0..3 {
            assert_eq!(a.packet()[1], 3 << 6 | POLL, "until it is answered");
        }
        let mut answer = b.packet();
        answer[1] = 3 << 6 | FINAL;
        a.received(0, &answer).unwrap();
        assert_eq!(a.packet()[1], 3 << 6);
        // It goes down and up again: another Poll Sequence.
        answer[1] = 1 << 6;
        a.received(0, &answer).unwrap();
        assert_eq!((a.state(), a.packet()[1]), (BfdState::Down, 1 << 6));
        answer[1] = 2 << 6;
        a.received(0, &answer).unwrap();
        assert_eq!(a.packet()[1], 3 << 6 | POLL);
    }

    #[test]
    fn invalid_packets_are_dropped() {
        let (mut a, mut b) = (end(7), end(9));
        let good = b.packet();
        let mut with = |at: usize, value: u8| {
            let mut packet = good;
            packet[at] = value;
            a.received(0, &packet)
        };
        assert_eq!(with(0, 0), Err(BfdError::Malformed), "version 0");
        assert_eq!(with(2, 0), Err(BfdError::Malformed), "no multiplier");
        assert_eq!(with(3, 23), Err(BfdError::Malformed), "short");
        assert_eq!(with(7, 0), Err(BfdError::Malformed), "no discriminator");
        assert_eq!(with(1, 1 << 6 | 1 << 2), Err(BfdError::Unsupported), "authentication");
        assert_eq!(with(11, 8), Err(BfdError::OtherSession));
        assert_eq!(with(1, 3 << 6), Err(BfdError::OtherSession), "up without this end's discriminator");
        assert_eq!(a.received(0, &good[..23]), Err(BfdError::Malformed));
        assert_eq!((a.state(), a.received(0, &good), a.state()), (BfdState::Down, Ok(()), BfdState::Init));
    }

    proptest! {
        #[test]
        fn hostile_packets(packets in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..50)) {
            let mut a = end(7);
            for (now, mut packet) in (0..).step_by(10_000_000).zip(packets) {
                if let [first, rest @ ..] = &mut packet[..] {
                    *first = 1 << 5;
                    rest.get_mut(7..11).into_iter().for_each(|yours| yours.copy_from_slice(&[0, 0, 0, 7]));
                }
                let _ = a.received(now, &packet);
                a.poll(now);
            }
        }
    }
}
