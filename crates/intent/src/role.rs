//! Roles: what somebody may do by the relay's API, and with which projects.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::key::{Key, Kind};

/// What a role for all projects, and for what belongs to none, names.
pub const EVERYTHING: &str = "*";

/// What one may do. A later one may do all that an earlier one may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Look at the objects of a project.
    Viewer,
    /// Change them.
    Editor,
    /// Change also the project with its quota; of everything: hosts, and which outside addresses projects may use.
    Admin,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 3] = [Role::Viewer, Role::Editor, Role::Admin];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Editor => "editor",
            Role::Admin => "admin",
        }
    }
}

/// A role with the project that it is for. As text: `editor:demo`, or `viewer:*` for all projects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectRole {
    /// A project, or [`EVERYTHING`].
    pub project: String,
    /// What one may do.
    pub role: Role,
}

impl ProjectRole {
    /// Checks the project's name.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        match self.project == EVERYTHING {
            true => Ok(()),
            false => Key::new(Kind::Project, "", &self.project).map(drop).map_err(|e| e.to_string()),
        }
    }
}

impl fmt::Display for ProjectRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.role.name(), self.project)
    }
}

impl FromStr for ProjectRole {
    type Err = String;

    fn from_str(text: &str) -> Result<ProjectRole, String> {
        let parts = text.split_once(':').ok_or_else(|| format!("{text:?}: write ROLE:PROJECT, such as editor:demo"))?;
        let role = Role::ALL.into_iter().find(|role| role.name() == parts.0);
        let role = role.ok_or_else(|| format!("{:?} is not a role; there are viewer, editor and admin", parts.0))?;
        let role = ProjectRole { project: parts.1.to_owned(), role };
        role.check()?;
        Ok(role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_texts() {
        for text in ["viewer:demo", "editor:a-1", "admin:*"] {
            assert_eq!(text.parse::<ProjectRole>().unwrap().to_string(), text);
        }
        for (text, why) in [
            ("viewer", "write ROLE:PROJECT"),
            ("owner:demo", "is not a role"),
            ("viewer:", "is not a name"),
            ("viewer:Demo", "is not a name"),
            ("viewer:**", "is not a name"),
            ("Viewer:demo", "is not a role"),
        ] {
            let error = text.parse::<ProjectRole>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
