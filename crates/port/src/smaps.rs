//! What `/proc/self/smaps` says about this process's memory, for tests.

#![allow(clippy::unwrap_used)]

/// The value of a field of the mapping that contains the middle of `bytes`.
pub(crate) fn field(bytes: &[u8], name: &str) -> String {
    let at = bytes[bytes.len() / 2..].as_ptr().addr();
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let ends = range.and_then(|(a, b)| usize::from_str_radix(a, 16).ok().zip(usize::from_str_radix(b, 16).ok()));
        if let Some((begin, end)) = ends {
            inside = (begin..end).contains(&at);
        } else if let Some(value) = line.strip_prefix(name).filter(|_| inside) {
            return value.trim().to_owned();
        }
    }
    panic!("no mapping contains {at:#x}");
}

/// Resident memory of that mapping, KiB.
pub(crate) fn resident_kib(bytes: &[u8]) -> u64 {
    field(bytes, "Rss:").trim_end_matches("kB").trim().parse().unwrap()
}
