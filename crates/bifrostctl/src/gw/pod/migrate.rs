//! Make before break: a pod withdraws what it announces, and another one takes its place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{GatewayPod, PodCommand};

use super::super::known;
use super::super::show::get;
use super::gate::{Gate, announced};
use super::handover::Handover;
use super::{Created, PAUSE, Site, check_name, failure};
use crate::failure::Failure;
use crate::gw::template::Template;

/// How long nothing may have come to a pod that is drained, and how long that may take.
const STILL: Duration = Duration::from_secs(1);
const STILL_WITHIN: Duration = Duration::from_secs(30);

impl Site {
    /// Has a new pod work beside the old one until it has passed the gate, before that goes.
    pub(super) fn migrate(
        &self,
        from: &str,
        to: &str,
        template: &Template,
        cpus: Option<&str>,
        gate: &Gate,
    ) -> Result<Created, Failure> {
        self.check_exists(from)?;
        let wanted = announced(&self.pod(from)?);
        if wanted.is_empty() {
            let hint = "`bifrost-gw --json` shows its BGP sessions; without BGP nothing can be moved".to_owned();
            return Err(failure(from, "it announces nothing that could be moved", hint));
        }
        let translates = template.translates();
        let mut created = self.create(to, template, cpus, translates)?;
        let go_back = |why: String| {
            let _ = self.remove(to);
            failure(to, why, format!("it is deleted, and {from} is as it was"))
        };
        let begun = if translates { Handover::begin(self, from, to) } else { Ok(None) };
        let mut handover = begun.map_err(|error| go_back(format!("sessions cannot be handed over: {error}")))?;
        if translates {
            self.tell(to, &PodCommand::Drain { drain: false }).map_err(|error| go_back(error.to_string()))?;
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The switch sends packets to both meanwhile.
            let following = handover.as_mut().map(|handover| scope.spawn(|| handover.follow(&stop)));
            let watched = gate.watch(self, to, &wanted);
            let drained = watched.is_ok().then(|| self.drain(from));
            stop.store(true, Ordering::Relaxed);
            if let Some(following) = following {
                let _ = following.join();
            }
            watched.map_err(&go_back)?;
            drained.unwrap_or(Ok(()))
        })?;
        if let Some(handover) = &mut handover {
            created.sessions = Some(handover.finish()?);
            created.refused_sessions = handover.refused();
        }
        self.remove(from)?;
        Ok(created)
    }

    /// Has a pod announce its addresses again.
    pub(super) fn announce(&self, name: &str) -> Result<(), Failure> {
        self.check_exists(name)?;
        self.tell(name, &PodCommand::Drain { drain: false })
    }

    /// Has a pod withdraw its addresses, and waits until its proxies know that, and nothing has come for a while.
    pub(super) fn drain(&self, name: &str) -> Result<(), Failure> {
        self.check_exists(name)?;
        self.tell(name, &PodCommand::Drain { drain: true })?;
        let (began, mut last, mut since) = (Instant::now(), None, Instant::now());
        while began.elapsed() < STILL_WITHIN {
            let told = announced(&self.pod(name)?).is_empty();
            let pods = self.pods()?;
            let delivered = pods.iter().find(|pod| pod.name == name).map(|pod| get(&pod.counters, "delivered_packets"));
            if !told || delivered != last {
                (last, since) = (delivered, Instant::now());
            } else if since.elapsed() >= STILL {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
        let hint = format!("it goes on forwarding; `bifrostctl gw pod delete {name}` ends it all the same");
        Err(failure(name, format!("packets still come after {STILL_WITHIN:?}"), hint))
    }

    pub(super) fn check_exists(&self, name: &str) -> Result<(), Failure> {
        check_name(name)?;
        if self.rows()?.iter().any(|row| row.name == name) {
            return Ok(());
        }
        Err(failure(name, "there is no such pod", "`bifrostctl gw pod list` shows those that there are".to_owned()))
    }

    pub(super) fn pod(&self, name: &str) -> Result<GatewayPod, Failure> {
        let socket = self.directory.join(name).join("gw.sock");
        Client::new(&socket)?.gateway_pod().map_err(|error| known("bifrost-gw", &socket, error))
    }

    fn tell(&self, name: &str, command: &PodCommand) -> Result<(), Failure> {
        let socket = self.directory.join(name).join("gw.sock");
        let told = Client::new(&socket)?.command_pod(command);
        told.map(drop).map_err(|error| known("bifrost-gw", &socket, error))
    }
}
