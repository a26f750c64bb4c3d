//! Huge pages for large tables: a random access also waits for the address translation, unless 2 MiB share one.
#![allow(unsafe_code)]

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// The same elements, in huge pages if they fill several and the kernel has some free. The advice must precede the
/// first access to the memory, so the elements are moved; the vector's capacity is its length.
pub(crate) fn on_huge_pages<T>(elements: Vec<T>) -> Vec<T> {
    if size_of_val(&*elements) < 4 * HUGE {
        return elements;
    }
    let mut moved: Vec<T> = Vec::with_capacity(elements.len());
    advise(moved.spare_capacity_mut());
    moved.extend(elements);
    moved
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise<T>(memory: &mut [std::mem::MaybeUninit<T>]) {
    let range = memory.as_mut_ptr_range();
    let skip = range.start.addr().wrapping_neg() % HUGE;
    let Some(len) = size_of_val(memory).checked_sub(skip) else { return };
    let at = range.start.wrapping_byte_add(skip);
    // SAFETY: whole pages of our own memory; the advice does not change their contents. A failure has no effect.
    let _ = unsafe { rustix::mm::madvise(at.cast(), len / HUGE * HUGE, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise<T>(_: &mut [std::mem::MaybeUninit<T>]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_unchanged() {
        for count in [0, 10, HUGE, 3 * HUGE + 7] {
            let elements: Vec<u64> = (0..count as u64).collect();
            let moved = on_huge_pages(elements.clone());
            assert_eq!(moved, elements);
            assert!(count < HUGE || moved.capacity() == count);
        }
    }
}
