//! Changes of objects: planned by `control::objects`, applied, and saved to disk.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bifrost_control::Config;
use bifrost_control::api::{ApiError, ApplyReport, ApplySpec, ReloadReport};
use bifrost_control::config::Kind;
use bifrost_control::objects::{ApplyError, Id, Plan};

use crate::background::{here_or_in_background, in_background};
use crate::daemon::{Failure, State};

/// Items of a small batch.
const SMALL: usize = 256;

impl State {
    /// Applies a whole batch or nothing.
    pub(crate) fn apply(&mut self, spec: &ApplySpec) -> Result<ApplyReport, ApiError> {
        let started = Instant::now();
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let is_small = is_small(spec);
        let plan = here_or_in_background(is_small, || self.objects.plan(&spec.items, now_ms))?;
        let set = plan.changes().values().flatten().count() as u64;
        let deleted = plan.changes().len() as u64 - set;
        let mut report = ApplyReport { set, deleted, unchanged: plan.unchanged(), ..ApplyReport::default() };
        if !plan.changes().is_empty() {
            report.changes = self.put_into_force(plan, is_small)?;
        }
        report.took_us = micros(started.elapsed());
        Ok(report)
    }

    fn put_into_force(&mut self, plan: Plan, is_small: bool) -> Result<ReloadReport, ApiError> {
        let taken =
            self.take_over(Arc::clone(plan.config()), is_small).map_err(|e| ApiError::conflict(format!("{e:#}")))?;
        // Failed objects of other owners are retried later; they are no reason to refuse this batch.
        let is_of_batch = |failure: &&Failure| {
            let id = failure.object.as_ref().map(|(kind, name)| Id { kind: *kind, key: name.clone() });
            id.is_some_and(|id| plan.changes().contains_key(&id))
        };
        let failed: Vec<&Failure> = taken.failures.iter().filter(is_of_batch).collect();
        if !failed.is_empty() {
            let what = each_on_its_line(&failed);
            self.roll_back(is_small);
            return Err(ApiError::conflict(what).hint("nothing was changed"));
        }
        for failure in &taken.failures {
            tracing::warn!("not applied; retried with the next change: {}", failure.error);
        }
        if let Err(error) = self.snapshot.append(&plan) {
            self.roll_back(is_small);
            return Err(ApiError::internal(format!("{error:#}")).hint("nothing was changed; is the disk full?"));
        }
        self.objects.commit(plan);
        self.snapshot.compact(self.objects.others());
        Ok(here_or_in_background(is_small, move || taken.diff.report()))
    }

    /// Restores the former configuration.
    fn roll_back(&mut self, is_small: bool) {
        match self.take_over(Arc::clone(self.objects.config()), is_small) {
            Ok(taken) => {
                for failure in taken.failures {
                    tracing::error!("not restored: {}", failure.error);
                }
            }
            Err(error) => tracing::error!("the former configuration cannot be restored: {error:#}"),
        }
    }

    /// Applies a new configuration file as one batch.
    pub(crate) fn apply_file(&mut self, file: Config) -> Result<bifrost_control::ConfigDiff, ApiError> {
        let plan = in_background(|| self.objects.plan_file(Arc::new(file)))
            .map_err(|errors: ApplyError| ApiError::from(errors))?;
        let taken =
            self.take_over(Arc::clone(plan.config()), false).map_err(|e| ApiError::conflict(format!("{e:#}")))?;
        self.objects.commit(plan);
        if taken.failures.is_empty() {
            return Ok(taken.diff);
        }
        let failures: Vec<String> = taken.failures.into_iter().map(|failure| failure.error).collect();
        let what = format!("applied except for these, which the next reload retries: {}", failures.join("; "));
        Err(ApiError::conflict(what))
    }
}

/// Whether a batch takes little time: it has few items, and none of them concerns all routes of a peer or VPC.
fn is_small(spec: &ApplySpec) -> bool {
    spec.items.len() <= SMALL && spec.items.iter().all(|item| !matches!(item.kind, Kind::Peer | Kind::Vpc))
}

/// What has failed, as other errors of a batch: agents tell each object's owner the line about that object, and no other
/// one.
fn each_on_its_line(failed: &[&Failure]) -> String {
    // Paths of namespaces may contain anything.
    let line = |failure: &&Failure| failure.error.replace('\n', " ");
    let lines: Vec<String> = failed.iter().map(line).collect();
    match &lines[..] {
        [one] => one.clone(),
        all => format!("{} errors\n{}", all.len(), all.join("\n")),
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_is_on_its_line() {
        let failure = |name: &str, path: &str| {
            Failure::of(Kind::Port, name, &anyhow::anyhow!("cannot enter {path}").context(format!("port {name}")))
        };
        let (a, b) = (failure("a", "/x\nport b: /y"), failure("b", "/z"));
        assert_eq!(each_on_its_line(&[&b]), "port b: cannot enter /z");
        assert_eq!(
            each_on_its_line(&[&a, &b]),
            "2 errors\nport a: cannot enter /x port b: /y\nport b: cannot enter /z"
        );
    }
}
