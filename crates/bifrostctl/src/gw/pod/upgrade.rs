//! A rolling upgrade: each pod of a service is replaced by a new one, make before break.

use std::path::PathBuf;

use clap::Args;

use super::gate::Gate;
use super::{Done, LABEL_VERSION, Row, Site, failure, of_service, read, to_scale};
use crate::failure::Failure;
use crate::gw::template::Template;

#[derive(Debug, Args)]
pub(super) struct UpgradeArgs {
    /// The service's name
    service: String,
    /// What the service's pods are to have in common
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// The image of the new pods, instead of the template's
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
    #[command(flatten)]
    gate: Gate,
}

impl Site {
    /// Replaces all pods of a service that are not made of this image and template yet. What fails ends it; given again, it goes on with those that are left.
    pub(super) fn upgrade(&self, args: &UpgradeArgs) -> Result<Done, Failure> {
        let mut template = read(&args.template)?;
        if let Some(image) = &args.image {
            template.pod.image.clone_from(image);
        }
        let version = self.version(&template)?;
        let (mut done, service) = (Done::default(), &args.service);
        let old: Vec<Row> = self.rows()?.into_iter().filter(|row| of_service(service, &row.name).is_some()).collect();
        if old.is_empty() {
            let hint = "`bifrostctl gw pod list` shows those that there are".to_owned();
            return Err(failure(service, "the service has no pods", hint));
        }
        let outdated = old.iter().filter(|row| row.version.as_deref() != Some(&version));
        let outdated: Vec<String> = outdated.map(|row| row.name.clone()).collect();
        for (number, from) in outdated.iter().enumerate() {
            let all = self.rows()?;
            let names: Vec<&str> = all.iter().map(|row| row.name.as_str()).collect();
            let has = names.iter().filter(|name| of_service(service, name).is_some()).count();
            let (missing, _) = to_scale(service, has as u16 + 1, &names);
            let Some(to) = missing.first() else { continue };
            let cpus = self.cpus(from)?;
            let created = self.migrate(from, to, &template, cpus.as_deref(), &args.gate).map_err(|error| {
                let what = format!("{error}; {number} of {} pods are upgraded", outdated.len());
                failure(from, what, format!("the others are as they were; the same command goes on with {from}"))
            })?;
            done.created.push(created);
            done.drained.push(from.clone());
            done.deleted.push(from.clone());
        }
        Ok(done)
    }

    /// The processors of a pod's container, as Podman was told them.
    fn cpus(&self, pod: &str) -> Result<Option<String>, Failure> {
        let words = ["inspect", "--format", "{{.HostConfig.CpusetCpus}}", &super::container_name(pod)];
        let cpus = self.podman(&words.map(str::to_owned))?;
        Ok(Some(cpus).filter(|cpus| !cpus.is_empty()))
    }

    /// What tells pods of one image and template from others: the label that they get.
    pub(super) fn version(&self, template: &Template) -> Result<String, Failure> {
        let words = ["image", "inspect", "--format", "{{.Id}}", &template.pod.image];
        let image = self.podman(&words.map(str::to_owned))?;
        Ok(version(&image, &template.fingerprint))
    }
}

/// FNV-1a, which stays the same in the next version of this program.
fn version(image: &str, template: &str) -> String {
    let bytes = image.bytes().chain([0]).chain(template.bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// The label with which a container is started.
pub(super) fn label(version: &str) -> String {
    format!("--label={LABEL_VERSION}={version}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_tell_images_and_templates_apart() {
        let all = [version("a", "b"), version("ab", ""), version("a", "c"), version("", "ab")];
        assert!((0..4).all(|at| all[at + 1..].iter().all(|other| *other != all[at])), "{all:?}");
        // Of FNV-1a's own test vectors, with the zero between both.
        assert_eq!(version("", ""), "af63bd4c8601b7df");
    }
}
