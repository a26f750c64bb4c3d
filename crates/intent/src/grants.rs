//! Which outside addresses a project may use: those that it was granted, while anything is granted to anybody.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::key::{Key, Kind};
use crate::model::{Model, Stored};
use crate::plan::Problem;
use crate::spec::Spec;

/// Whether a project may use an outside address. Without any grant every project may use all.
pub(crate) fn may_use(model: &Model, project: &str, address: IpAddr) -> bool {
    model.grants().next().is_none() || is_granted(model, project, address.into())
}

/// The parts of a prefix that a project may use.
pub(crate) fn parts(model: &Model, project: &str, prefix: IpNet) -> Vec<IpNet> {
    if model.grants().next().is_none() || is_granted(model, project, prefix) {
        return vec![prefix];
    }
    let within = model.granted_within(prefix).filter(|(_, grant)| grant.project() == project);
    within.map(|(part, _)| part).collect()
}

fn is_granted(model: &Model, project: &str, prefix: IpNet) -> bool {
    model.grants_of(prefix).any(|grant| grant.project() == project)
}

/// What uses addresses without a grant once a batch is made that changes grants. `before` has what its objects were, each once; the
/// model has what they are. Users that the batch itself sets are told elsewhere, too.
pub(crate) fn problems(model: &Model, before: &[(Key, Option<Stored>)]) -> Vec<Problem> {
    let changed: BTreeMap<&Key, &Option<Stored>> =
        before.iter().filter(|(key, _)| key.kind() == Kind::OutsideGrant).map(|(key, before)| (key, before)).collect();
    let Some((first, _)) = changed.first_key_value() else { return Vec::new() };
    // With the last grant the limits go.
    if model.grants().next().is_none() {
        return Vec::new();
    }
    let there_were = changed.values().any(|before| before.is_some());
    if !there_were && model.grants().all(|grant| changed.contains_key(grant)) {
        // 0.0.0.0/0 and ::/0.
        let everything = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
        return Vec::from_iter(without(model, first, &everything));
    }
    // Only what was granted before can have lost it.
    let lost = changed.into_iter().filter_map(|(key, before)| match before.as_ref().map(|stored| &stored.spec) {
        Some(Spec::OutsideGrant(spec)) => without(model, key, &Vec::from_iter(spec.prefixes.iter().copied())),
        _ => None,
    });
    lost.collect()
}

/// A problem of a grant if something uses addresses of some prefixes that are not granted to its project.
fn without(model: &Model, grant: &Key, prefixes: &[IpNet]) -> Option<Problem> {
    let users = prefixes.iter().flat_map(|prefix| model.outside_within(*prefix));
    // Uplinks are hosts', which belong to no project.
    let mut users = users
        .filter(|(address, user)| user.kind().has_project() && !is_granted(model, user.project(), (*address).into()));
    let (address, user) = users.next()?;
    let more = match users.count() {
        0 => String::new(),
        more => format!(", and {more} more are in use like this"),
    };
    let field = if model.get(grant).is_some() { "prefixes" } else { "" };
    let what = format!(
        "{address} is in use by {user} and would not be granted to its project{more}: grant it in the same batch, or \
         change or delete {user} first"
    );
    Some(Problem { key: Some(grant.clone()), field: field.to_owned(), what, is_conflict: true })
}
