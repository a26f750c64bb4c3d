//! The front-end's log of written pages: set, replaced, started and stopped while the rings run.

use std::sync::Arc;

use super::super::dirty_log::{self, DirtyLog};
use super::super::features;
use super::super::helper::Foreign;
use super::super::messages::Fields;
use super::{NO_MEMORY, Outcome, START, VhostDevice};

impl VhostDevice {
    /// Sets the log for pages written from now on, while the front-end has logging enabled. A previous log is complete
    /// when this returns.
    pub(super) fn set_log_base(&mut self, fields: &mut Fields<'_>, file: Option<Foreign>) -> Outcome {
        let (bytes, offset) = (fields.u64()?, fields.u64()?);
        if self.protocol & features::LOG_SHMFD == 0 {
            return Err("its log is not shared memory");
        }
        let file = file.ok_or("the file descriptor of the log is missing")?.into_memory().ok_or(NO_MEMORY)?;
        if !(1..=dirty_log::MAX_BYTES).contains(&bytes) || !DirtyLog::covers(bytes, &self.memory) {
            return Err("a log has a bit for each page of the memory, and 8 GiB at most");
        }
        self.cost += START;
        let log = DirtyLog::open(file, offset, bytes, &self.log_call).map_err(|error| {
            tracing::warn!(port = self.config.name, %error, "a front-end's log cannot be used");
            "its log cannot be used"
        })?;
        // Rings that were to log without a log may have written anywhere.
        let missed = self.log.is_none() && self.features.logs() && !self.running.is_empty();
        self.log = Some(log.clone());
        let memory = Arc::clone(&self.memory);
        self.log_writes()?;
        if missed {
            log.mark_all(&memory);
        }
        Ok(())
    }

    /// Makes running rings start or stop logging: it applies to all later writes.
    pub(super) fn log_writes(&mut self) -> Outcome {
        if !self.running.is_empty() && !self.owner.log_writes(self.log()) {
            self.stop();
            self.start()?;
        }
        Ok(())
    }

    /// The log, if logging is enabled.
    pub(super) fn log(&self) -> Option<DirtyLog> {
        self.log.clone().filter(|_| self.features.logs())
    }
}
