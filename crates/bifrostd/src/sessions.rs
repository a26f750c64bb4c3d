//! Sessions of security groups: lists, and the export and import of a port's sessions when its guest moves. Workers
//! process them in batches, without the daemon's lock.

use std::sync::Arc;

use bifrost_avs::{Class, Direction, MovingSession, PortId, SessionView, read_moving_sessions, write_moving_sessions};
use bifrost_control::api::{ApiError, PROTOCOLS, PortSessions, Session, SessionFilter, SessionState, SessionsReport};
use bifrost_control::server::Pages;
use bifrost_datapath::Remote;
use bifrost_port::HostUnderlay;

use crate::daemon::State;
use crate::lists::{StateView, gone};
use crate::translate;

/// Sessions that match the filter, worker by worker. An id has the worker in its upper half and the slot in its lower
/// half.
pub(crate) fn list(state_view: StateView, filter: &SessionFilter) -> Result<Pages<Session>, ApiError> {
    let matcher = Matcher::of(&state_view, filter)?;
    let (state_view, mut left) = (Arc::new(state_view), filter.limit.unwrap_or(u64::MAX));
    let (first, from) = match filter.after.map(|after| (after >> 32, after as u32)) {
        None => (0, 0),
        // After a worker's last slot.
        Some((worker, u32::MAX)) => (worker + 1, 0),
        Some((worker, slot)) => (worker, slot + 1),
    };
    let workers = (0u64..).zip(state_view.workers.clone()).skip_while(move |(index, _)| *index < first);
    let pages = workers.flat_map(move |(index, worker)| {
        let from = if index == first { from } else { 0 };
        let (matcher, state_view) = (matcher, Arc::clone(&state_view));
        let pages = worker.sessions(from, move |slot, session| matcher.matches(session).then_some((slot, *session)));
        pages.map(move |page| -> Result<Vec<Session>, ApiError> {
            let (page, now) = (page.map_err(gone)?, state_view.names_now());
            let listed = page.iter().filter_map(|(slot, session)| {
                let port = state_view.port(&now, session.port.0)?;
                Some(listed(index << 32 | u64::from(*slot), port, session))
            });
            Ok(listed.collect())
        })
    });
    let mut pages = Box::new(pages);
    Ok(Box::new(std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let mut page = pages.next()?;
        if let Ok(page) = &mut page {
            page.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            left -= page.len() as u64;
        }
        Some(page)
    })))
}

/// A filter in the form for workers.
#[derive(Clone, Copy)]
struct Matcher {
    port: Option<PortId>,
    protocol: Option<u8>,
    address: Option<std::net::IpAddr>,
    number: Option<u16>,
    state: Option<SessionState>,
}

impl Matcher {
    fn of(state_view: &StateView, filter: &SessionFilter) -> Result<Matcher, ApiError> {
        let protocol = filter.check()?;
        let id = |name: &String| state_view.names.port(name).map(PortId).ok_or_else(|| unknown(name));
        let port = filter.port.as_ref().map(id).transpose()?;
        Ok(Matcher { port, protocol, address: filter.address, number: filter.number, state: filter.state })
    }

    fn matches(&self, session: &SessionView) -> bool {
        let ends = [session.local, session.remote];
        self.port.is_none_or(|port| session.port == port)
            && self.protocol.is_none_or(|protocol| session.protocol == protocol)
            && self.state.is_none_or(|state| self::state(session.class) == state)
            && self.address.is_none_or(|address| ends.iter().any(|end| end.ip() == address))
            && self.number.is_none_or(|number| ends.iter().any(|end| end.port() == number))
    }
}

fn listed(id: u64, port: &str, session: &SessionView) -> Session {
    let known = PROTOCOLS.iter().find(|(_, number)| *number == session.protocol);
    Session {
        id,
        port: port.to_owned(),
        protocol: known.map_or_else(|| session.protocol.to_string(), |(name, _)| (*name).to_owned()),
        local_address: session.local.ip(),
        local_port: session.local.port(),
        remote_address: session.remote.ip(),
        remote_port: session.remote.port(),
        is_outbound: session.origin == Direction::Egress,
        state: state(session.class),
        idle_s: session.idle_s,
        expires_s: session.expires_s,
    }
}

fn state(class: Class) -> SessionState {
    match class {
        Class::Unanswered => SessionState::Unanswered,
        Class::Answered => SessionState::Answered,
        Class::Closing => SessionState::Closing,
        Class::Assured => SessionState::Assured,
        Class::Established => SessionState::Established,
    }
}

/// The workers that have the conversations of a port.
pub(crate) struct Holders {
    /// The only worker that serves the port, and so has its sessions and connections through load balancers.
    home: usize,
    /// All workers: each one may serve an uplink, and so has connections through port forwards.
    workers: Vec<Remote<HostUnderlay>>,
    pub(crate) port: PortId,
}

impl Holders {
    /// Exports the port's conversations, for its next host.
    pub(crate) fn export(&self, name: String) -> Result<PortSessions, ApiError> {
        let mut all = Vec::new();
        for worker in &self.workers {
            for page in worker.moving_sessions(self.port) {
                all.extend(page.map_err(gone)?);
            }
        }
        Ok(PortSessions::new(name, &write_moving_sessions(all)))
    }

    /// Imports the conversations that the port's guest had on another host.
    pub(crate) fn import(&self, bytes: &[u8]) -> Result<SessionsReport, ApiError> {
        let read = read_moving_sessions(bytes);
        let (all, unreadable) = read.map_err(|e| ApiError::bad_request(e.to_string()).at("sessions"))?;
        let count = all.len() as u64;
        let (at_uplinks, at_home): (Vec<_>, Vec<_>) = all.into_iter().partition(MovingSession::is_at_uplink);
        let mut sessions = 0;
        for (worker, remote) in self.workers.iter().enumerate() {
            // A worker refuses connections of uplinks that others serve.
            let mut theirs = at_uplinks.clone();
            if worker == self.home {
                theirs.extend_from_slice(&at_home);
            }
            if !theirs.is_empty() {
                sessions += remote.take_over_sessions(self.port, theirs).map_err(gone)?;
            }
        }
        Ok(SessionsReport { sessions, left_out: count - sessions + unreadable })
    }
}

impl State {
    /// The workers that have the conversations of a port.
    pub(crate) fn holders_of_sessions(&self, name: &str) -> Result<Holders, ApiError> {
        let port = self.config.ports.iter().find(|port| port.name == name);
        let (port, id) = port.and_then(|port| Some((port, self.names.port(name)?))).ok_or_else(|| unknown(name))?;
        let home = translate::home(&self.config, port, id).unwrap_or_default();
        if self.workers.len() > 1 && !self.config.is_served_by_one(port) {
            let what = format!("the sessions of {name:?} are spread over several workers");
            return Err(ApiError::bad_request(what)
                .at("port")
                .hint("only ports that one worker serves can be exported, such as those of virtual machines"));
        }
        let workers = self.workers.iter().map(|worker| worker.remote()).collect();
        Ok(Holders { home: home.into(), workers, port: PortId(id) })
    }
}

fn unknown(port: &str) -> ApiError {
    ApiError::not_found(format!("there is no port named {port:?}")).at("port").hint("bifrostctl ports lists them")
}
