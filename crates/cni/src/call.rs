//! The call in the environment: the command and the container (specification, section "Parameters").

use std::path::PathBuf;

use crate::error::{Code, Error};

/// Maximum length of an interface name, bytes (`IFNAMSIZ` less the final zero).
const MAX_INTERFACE: usize = 15;
/// Maximum length of a container identifier, bytes.
const MAX_CONTAINER: usize = 256;

/// The command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Attach a container.
    Add,
    /// Detach a container.
    Del,
    /// Check that an attachment is unchanged.
    Check,
    /// Remove all attachments that are not listed.
    Gc,
    /// Report whether containers can be attached.
    Status,
    /// List the supported versions of the specification.
    Version,
}

/// An attachment: a container's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// `CNI_IFNAME`, the interface's name in the container.
    pub name: String,
}

/// One call of the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// `CNI_COMMAND`.
    pub command: Command,
    /// Interface and container; `None` for [`Command::Gc`], [`Command::Status`] and [`Command::Version`].
    pub interface: Option<Interface>,
    /// `CNI_NETNS`: the container's network namespace. For [`Command::Del`] it may no longer exist.
    pub netns: Option<String>,
    /// `CNI_PATH`: directories of other plugins.
    pub path: Vec<PathBuf>,
}

impl Call {
    /// Parses the environment.
    ///
    /// # Errors
    /// [`Code::Environment`]: a variable is missing or invalid; the error names it.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Call, Error> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let wrong = |message: String| Error::new(Code::Environment, message);
        let required = |name: &str| given(name).ok_or_else(|| wrong(format!("{name} is not set")));
        let command = match required("CNI_COMMAND")?.as_str() {
            "ADD" => Command::Add,
            "DEL" => Command::Del,
            "CHECK" => Command::Check,
            "GC" => Command::Gc,
            "STATUS" => Command::Status,
            "VERSION" => Command::Version,
            other => return Err(wrong(format!("unknown CNI_COMMAND {other:?}"))),
        };
        let path = given("CNI_PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
        let has_interface = matches!(command, Command::Add | Command::Del | Command::Check);
        let interface = has_interface.then(|| {
            let (container, name) = (required("CNI_CONTAINERID")?, required("CNI_IFNAME")?);
            check_container(&container).and_then(|()| check_interface(&name)).map_err(wrong)?;
            Ok(Interface { container, name })
        });
        let netns = match command {
            Command::Add | Command::Check => Some(required("CNI_NETNS")?),
            Command::Del => given("CNI_NETNS"),
            // Runtimes that ask for versions set placeholders.
            _ => None,
        };
        if let Some(netns) = netns.as_ref().filter(|netns| !netns.starts_with('/')) {
            return Err(wrong(format!("CNI_NETNS {netns:?} is not an absolute path")));
        }
        Ok(Call { command, interface: interface.transpose()?, netns, path })
    }
}

/// Checks a container identifier.
///
/// # Errors
/// The identifier is invalid.
pub fn check_container(id: &str) -> Result<(), String> {
    let begins = id.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins && id.len() <= MAX_CONTAINER && id.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
        return Ok(());
    }
    Err(format!(
        "CNI_CONTAINERID {id:?} must begin with a letter or digit, contain only letters, digits, '_', '.' \
         and '-', and have at most {MAX_CONTAINER} characters"
    ))
}

fn check_interface(name: &str) -> Result<(), String> {
    if name.len() <= MAX_INTERFACE
        && name != "."
        && name != ".."
        && name.chars().all(|c| c.is_ascii_graphic() && c != '/' && c != ':')
    {
        return Ok(());
    }
    Err(format!(
        "CNI_IFNAME {name:?} is not an interface name: at most {MAX_INTERFACE} characters, without '/', ':' or spaces"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn call(variables: &[(&str, &str)]) -> Result<Call, Error> {
        Call::of(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    const ADD: [(&str, &str); 5] = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/run/netns/c1"),
        ("CNI_PATH", "/opt/cni/bin:/usr/lib/cni"),
    ];

    fn with(name: &str, value: &str) -> Vec<(&'static str, String)> {
        ADD.into_iter().map(|(n, v)| (n, if n == name { value.to_owned() } else { v.to_owned() })).collect()
    }

    #[test]
    fn a_complete_environment_is_parsed() {
        let call = call(&ADD).unwrap();
        assert_eq!(call.command, Command::Add);
        assert_eq!(call.interface, Some(Interface { container: "c1".into(), name: "eth0".into() }));
        assert_eq!(call.path, [PathBuf::from("/opt/cni/bin"), PathBuf::from("/usr/lib/cni")]);
    }

    #[test]
    fn errors_name_the_variable() {
        let long = "x".repeat(257);
        for (name, value) in [
            ("CNI_COMMAND", ""),
            ("CNI_COMMAND", "UPDATE"),
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "-c"),
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_CONTAINERID", "ä"),
            ("CNI_CONTAINERID", long.as_str()),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "a b"),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "a:b"),
            ("CNI_IFNAME", "sixteen-long-one"),
            ("CNI_NETNS", ""),
            ("CNI_NETNS", "c1"),
        ] {
            let variables = with(name, value);
            let variables: Vec<_> = variables.iter().map(|(n, v)| (*n, v.as_str())).collect();
            let error = call(&variables).unwrap_err();
            assert_eq!(error.code, Code::Environment);
            assert!(error.message.contains(name), "{name}={value}: {}", error.message);
        }
    }

    #[test]
    fn del_accepts_a_namespace_that_no_longer_exists() {
        let variables: Vec<_> = ADD.into_iter().filter(|(name, _)| *name != "CNI_NETNS").collect();
        assert!(call(&variables).is_err());
        let variables: Vec<_> =
            variables.into_iter().map(|(n, v)| (n, if n == "CNI_COMMAND" { "DEL" } else { v })).collect();
        assert_eq!(call(&variables).unwrap().netns, None);
        assert!(call(&[("CNI_COMMAND", "STATUS")]).unwrap().interface.is_none());
        assert!(call(&[("CNI_COMMAND", "VERSION"), ("CNI_NETNS", "dummy")]).unwrap().netns.is_none());
    }
}
