//! The documents of one guest, in the layout of EC2's instance metadata: a tree whose leaves are texts, and whose inner
//! nodes list their children, one name per line.

use std::borrow::Cow;
use std::net::IpAddr;

/// The documents of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    /// Identifies the guest; cloud-init runs its first-boot configuration again when this changes.
    pub instance_id: String,
    /// Its host name, with its domain if it has one.
    pub hostname: String,
    /// Its MAC address, as text.
    pub mac: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its MTU, bytes.
    pub mtu: u16,
    /// Public SSH keys, one line each.
    pub public_keys: Vec<String>,
    /// User data; `None`: the document does not exist.
    pub user_data: Option<Vec<u8>>,
}

/// Listed versions of the layout. All other dates are accepted as versions, too: the documents here exist in all of
/// them.
const VERSIONS: [&str; 2] = ["2009-04-04", "latest"];

impl Documents {
    /// The document at a path; empty path segments are ignored. `None`: it does not exist.
    pub(crate) fn find(&self, path: &str) -> Option<Cow<'_, [u8]>> {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        let Some(version) = parts.next() else { return Some(lines(VERSIONS)) };
        if !is_version(version) {
            return None;
        }
        let rest: Vec<&str> = parts.collect();
        match rest.split_first() {
            None => {
                let all = ["meta-data/"].into_iter().chain(self.user_data.as_ref().map(|_| "user-data"));
                Some(lines(all))
            }
            Some((&"user-data", [])) => self.user_data.as_deref().map(Cow::Borrowed),
            Some((&"meta-data", rest)) => self.meta_data(&rest.join("/")),
            _ => None,
        }
    }

    fn meta_data(&self, path: &str) -> Option<Cow<'_, [u8]>> {
        if path == "public-keys" && !self.public_keys.is_empty() {
            // The only list in another format: `0=key-0` stands for the directory `0/`.
            return Some(lines((0..self.public_keys.len()).map(|n| format!("{n}=key-{n}"))));
        }
        let leaves = self.leaves();
        if let Some((_, text)) = leaves.iter().find(|(name, _)| name == path) {
            return Some(Cow::Owned(text.clone().into_bytes()));
        }
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        let mut names: Vec<String> = Vec::new();
        for below in leaves.iter().filter_map(|(name, _)| name.strip_prefix(&prefix)) {
            let name = below.split_once('/').map_or(below.to_owned(), |(name, _)| format!("{name}/"));
            if names.last() != Some(&name) {
                names.push(name);
            }
        }
        (!names.is_empty()).then(|| lines(names))
    }

    /// All documents below `meta-data` by path, sorted.
    fn leaves(&self) -> Vec<(String, String)> {
        let (v4, v6): (Vec<&IpAddr>, Vec<&IpAddr>) = self.addresses.iter().partition(|address| address.is_ipv4());
        let list = |all: &[&IpAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        let name = |of: &str| of.to_owned();
        let interface = |of: &str| format!("network/interfaces/macs/{}/{of}", self.mac);
        let mut leaves = vec![
            (name("hostname"), self.hostname.clone()),
            (name("instance-id"), self.instance_id.clone()),
            (name("local-hostname"), self.hostname.clone()),
            (name("mac"), self.mac.clone()),
            (interface("device-number"), name("0")),
            (interface("mac"), self.mac.clone()),
        ];
        if let Some(first) = v4.first() {
            leaves.push((name("local-ipv4"), first.to_string()));
            leaves.push((interface("local-ipv4s"), list(&v4)));
        }
        if let Some(first) = v6.first() {
            leaves.push((name("ipv6"), first.to_string()));
            leaves.push((interface("ipv6s"), list(&v6)));
        }
        let keys = self.public_keys.iter().enumerate();
        leaves.extend(keys.map(|(n, key)| (format!("public-keys/{n}/openssh-key"), key.clone())));
        leaves.sort();
        leaves
    }
}

fn lines<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> Cow<'static, [u8]> {
    let names: Vec<T> = names.into_iter().collect();
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    Cow::Owned(names.join("\n").into_bytes())
}

/// `latest`, or a date such as `2009-04-04`.
fn is_version(text: &str) -> bool {
    let is_date = text.len() == 10
        && text
            .bytes()
            .enumerate()
            .all(|(at, byte)| if at == 4 || at == 7 { byte == b'-' } else { byte.is_ascii_digit() });
    text == "latest" || is_date
}
