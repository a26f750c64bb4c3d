//! What the kernel says about this process's memory (`/proc/self/smaps`, `pagemap`), for tests.

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

/// Resident memory of these bytes, KiB.
pub(crate) fn resident_kib(bytes: &[u8]) -> u64 {
    const PAGE: usize = 4096;
    let first = bytes.as_ptr().addr() / PAGE;
    let pages = (bytes.as_ptr().addr() + bytes.len()).div_ceil(PAGE) - first;
    let mut raw = vec![0u8; pages * 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&pagemap, &mut raw, first as u64 * 8).unwrap();
    // Bit 63 of a page's entry: it is present.
    let present = raw.chunks_exact(8).filter(|entry| u64::from_ne_bytes((*entry).try_into().unwrap()) >> 63 == 1);
    (present.count() * PAGE) as u64 / 1024
}
