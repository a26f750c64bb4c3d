//! Mutations (deliberate mistakes) and an interference hook, to show that tests detect what a hostile guest could
//! exploit. Both exist only with the feature `mutations`, which must not be enabled in anything that carries traffic;
//! otherwise [`mutated!`] is `false` and [`access!`] nothing at compile time.

/// Whether a mutation is enabled: `mutated!(UnshownNotCounted)`.
#[cfg(feature = "mutations")]
macro_rules! mutated {
    ($name:ident) => {
        crate::vhost::mutation::Mutation::$name.is_on()
    };
}

/// Without the feature, no mutation is enabled.
#[cfg(not(feature = "mutations"))]
macro_rules! mutated {
    ($name:ident) => {
        false
    };
}

/// Marks an imminent access to guest memory.
macro_rules! access {
    () => {
        #[cfg(feature = "mutations")]
        crate::vhost::mutation::before_access();
    };
}

pub(crate) use {access, mutated};

#[cfg(feature = "mutations")]
mod switch {
    use std::cell::RefCell;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU8, Ordering};

    /// One mutation. Each comment states the mistake, and its symptom.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub enum Mutation {
        /// Used buffers that are not yet shown count as free. Symptom: more buffers in flight than the ring has, and
        /// the records of a packed ring run out.
        UnshownNotCounted = 1,
        /// Records are sorted by numbers that are read during the comparison. Symptom: a panic in the sort when the
        /// front-end changes them meanwhile.
        RecordSortedInPlace,
        /// A packet reads as many receive buffers, and a turn as many descriptors, as the guest offers. Symptom:
        /// descriptors read per packet.
        WorkNotBounded,
        /// A chain may have as many descriptors as its ring or table. Symptom: as `WorkNotBounded`.
        ChainsNotBounded,
        /// A ring may offer bad buffers without limit. Symptom: descriptors read for nothing.
        BadBuffersForgiven,
        /// The memory for the pieces of a long chain stays with its slot. Symptom: memory.
        PiecesKept,
        /// Descriptors of a chain in a packed ring are not returned. Symptom: an honest guest's ring is taken out of
        /// use.
        DescriptorsLeak,
        /// Files are mapped from their start, whatever the region's offset. Symptom: address space.
        MappedFromStart,
        /// Mappings of huge pages end inside one. Symptom: SIGBUS ends the process when the file is truncated.
        HugePagesCut,
        /// Call descriptors are written to as if no other process shared the open file. Symptom: a worker that blocks.
        CallBlocks,
        /// A front-end's descriptors are closed by the thread that drops them. Symptom: a port that does not answer or
        /// end.
        ClosedInPlace,
        /// Any file is mapped as memory. Symptom: files on a disk, or a FUSE file system, are accepted.
        AnyFileMapped,
        /// No page is marked in a front-end's log. Symptom: a page that differs after a migration.
        NothingMarked,
        /// Any file at the record's path, or that it links to, is overwritten. Symptom: other files lose their
        /// contents.
        RecordNotChecked,
    }

    impl Mutation {
        /// The mutations of the rings.
        pub const RINGS: [Mutation; 7] = [
            Mutation::UnshownNotCounted,
            Mutation::RecordSortedInPlace,
            Mutation::WorkNotBounded,
            Mutation::ChainsNotBounded,
            Mutation::BadBuffersForgiven,
            Mutation::PiecesKept,
            Mutation::DescriptorsLeak,
        ];

        /// The mutations of messages, descriptors and mappings.
        pub const BACK_END: [Mutation; 6] = [
            Mutation::MappedFromStart,
            Mutation::HugePagesCut,
            Mutation::CallBlocks,
            Mutation::ClosedInPlace,
            Mutation::AnyFileMapped,
            Mutation::RecordNotChecked,
        ];

        /// The mutations of the log of written pages.
        pub const LOG: [Mutation; 1] = [Mutation::NothingMarked];

        /// Enables one in the whole process, or none. Before the first call, the one in the environment variable
        /// `MUTATION` is enabled.
        pub fn switch(to: Option<Mutation>) {
            on().store(to.map_or(0, |mutation| mutation as u8), Ordering::Relaxed);
        }

        #[inline]
        pub(crate) fn is_on(self) -> bool {
            on().load(Ordering::Relaxed) == self as u8
        }
    }

    fn on() -> &'static AtomicU8 {
        static ON: OnceLock<AtomicU8> = OnceLock::new();
        ON.get_or_init(|| {
            let name = std::env::var("MUTATION").unwrap_or_default();
            let all = Mutation::RINGS.into_iter().chain(Mutation::BACK_END).chain(Mutation::LOG);
            let named = all.into_iter().find(|mutation| format!("{mutation:?}") == name);
            AtomicU8::new(named.map_or(0, |mutation| mutation as u8))
        })
    }

    type Interference = Box<dyn FnMut()>;

    thread_local! {
        static INTERFERENCE: RefCell<Option<Interference>> = const { RefCell::new(None) };
    }

    /// Sets what this thread calls before each of its accesses to guest memory: what another CPU may do at that moment.
    pub fn interfere(with: Option<Interference>) {
        INTERFERENCE.with(|there| *there.borrow_mut() = with);
    }

    /// Accesses by the hook itself find it borrowed, and skip it.
    #[inline]
    pub(crate) fn before_access() {
        INTERFERENCE.with(|there| {
            if let Ok(mut there) = there.try_borrow_mut()
                && let Some(interference) = &mut *there
            {
                interference();
            }
        });
    }
}

#[cfg(feature = "mutations")]
pub(crate) use switch::before_access;
#[cfg(feature = "mutations")]
pub use switch::{Mutation, interfere};
