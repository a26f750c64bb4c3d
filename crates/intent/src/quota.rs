//! Quotas: how many objects of each kind a project may have.

use std::collections::{BTreeMap, BTreeSet};

use crate::key::{Key, Kind};
use crate::model::{Model, Stored};
use crate::plan::Problem;
use crate::spec::{Quota, Spec};

/// What goes beyond quotas once a batch is made. `before` has what its objects were, each once; the model has what they are.
///
/// A batch may not add to what is at its limit, nor set a limit below what there is. What is beyond a limit anyway, because the
/// store was written without this check, may be changed and become less.
pub(crate) fn problems(model: &Model, before: &[(Key, Option<Stored>)]) -> Vec<Problem> {
    let mut growth: BTreeMap<(Key, Kind), i64> = BTreeMap::new();
    let mut projects = BTreeSet::new();
    let mut limits_before: BTreeMap<&Key, Quota> = BTreeMap::new();
    for (key, before) in before {
        if key.kind() == Kind::Project {
            limits_before.insert(key, before.as_ref().map_or(Quota::default(), |stored| quota(&stored.spec)));
            projects.insert(key.clone());
        } else if let Some(project) = key.of_project() {
            let more = i64::from(model.get(key).is_some()) - i64::from(before.is_some());
            *growth.entry((project.clone(), key.kind())).or_default() += more;
            projects.insert(project);
        }
    }
    let mut problems = Vec::new();
    for project in projects {
        let Some(stored) = model.get(&project) else { continue };
        let limits = quota(&stored.spec);
        for kind in Kind::ALL {
            let Some(limit) = limits.of(kind) else { continue };
            let count = model.count(project.name(), kind);
            if count <= limit {
                continue;
            }
            let more = growth.get(&(project.clone(), kind)).copied().unwrap_or(0);
            let is_lower =
                limits_before.get(&project).is_some_and(|before| before.of(kind).is_none_or(|before| limit < before));
            if more > 0 || is_lower {
                problems.push(Problem {
                    key: Some(project.clone()),
                    field: format!("quota.{}", Quota::name(kind)),
                    what: what(count, count.saturating_add_signed(-more), limit, Quota::name(kind)),
                    is_conflict: true,
                });
            }
        }
    }
    problems
}

fn what(count: u64, before: u64, limit: u64, name: &str) -> String {
    let there_are = if before == count { "there are".to_owned() } else { format!("there are {before}, and would be") };
    format!("{there_are} {count} {name}, which is more than {limit}: delete some, or raise the limit")
}

fn quota(spec: &Spec) -> Quota {
    if let Spec::Project(spec) = spec { spec.quota } else { Quota::default() }
}
