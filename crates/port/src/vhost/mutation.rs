//! Deliberate mistakes and a place to interfere, to show that tests notice what a hostile guest could do. Both exist with
//! the feature `mutations` only, which nothing that carries traffic may turn on; otherwise [`mutated!`] is `false` and
//! [`access!`] nothing at compile time.

/// Whether a deliberate mistake is switched on: `mutated!(UnshownNotCounted)`.
#[cfg(feature = "mutations")]
macro_rules! mutated {
    ($name:ident) => {
        crate::vhost::mutation::Mutation::$name.is_on()
    };
}

/// Without mutations nothing is mutated.
#[cfg(not(feature = "mutations"))]
macro_rules! mutated {
    ($name:ident) => {
        false
    };
}

/// Guest memory is about to be accessed.
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

    /// One deliberate mistake. Each comment says what is wrong, and how it shows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub enum Mutation {
        /// Buffers that were used and not yet shown count as free. Shows: a ring holds more than it has, and the records
        /// of a packed ring run out.
        UnshownNotCounted = 1,
        /// Records are sorted by numbers that are read while they are compared. Shows: a panic in the sort when the
        /// front-end changes them meanwhile.
        RecordSortedInPlace,
        /// A packet looks at as many receive buffers, and a turn at as many descriptors, as the guest offers. Shows:
        /// descriptors read for each packet.
        WorkNotBounded,
        /// A chain may have as many descriptors as its ring or table. Shows: as `WorkNotBounded`.
        ChainsNotBounded,
        /// A ring may offer bad buffers forever. Shows: descriptors read for nothing.
        BadBuffersForgiven,
        /// What held the pieces of a long chain is kept with its slot. Shows: memory.
        PiecesKept,
        /// Descriptors of a chain in a packed ring are not given back. Shows: an honest guest finds its ring broken.
        DescriptorsLeak,
        /// Files are mapped from their start, wherever the region is. Shows: addresses.
        MappedFromStart,
        /// Mappings of huge pages end within one. Shows: SIGBUS ends the process when the file is cut.
        HugePagesCut,
        /// Calls are written to, as if nobody else had the open file. Shows: a worker that blocks.
        CallBlocks,
        /// A front-end's descriptors are closed by the thread that drops them. Shows: a port that does not answer or end.
        ClosedInPlace,
        /// Any file is mapped as memory. Shows: files on a disk, or a FUSE file system, are.
        AnyFileMapped,
        /// No page is marked in a front-end's log. Shows: a page that differs after a guest has moved.
        NothingMarked,
        /// Any file at the record's path is written to, and where it links to. Shows: other files lose their content.
        RecordNotChecked,
    }

    impl Mutation {
        /// Every mutation of the rings.
        pub const RINGS: [Mutation; 7] = [
            Mutation::UnshownNotCounted,
            Mutation::RecordSortedInPlace,
            Mutation::WorkNotBounded,
            Mutation::ChainsNotBounded,
            Mutation::BadBuffersForgiven,
            Mutation::PiecesKept,
            Mutation::DescriptorsLeak,
        ];

        /// Every mutation of what deals with the front-end: messages, descriptors and mappings.
        pub const BACK_END: [Mutation; 6] = [
            Mutation::MappedFromStart,
            Mutation::HugePagesCut,
            Mutation::CallBlocks,
            Mutation::ClosedInPlace,
            Mutation::AnyFileMapped,
            Mutation::RecordNotChecked,
        ];

        /// Every mutation of the log of written pages.
        pub const LOG: [Mutation; 1] = [Mutation::NothingMarked];

        /// Switches one on in the whole process, or all off. Until then the one that the environment variable `MUTATION`
        /// names is on.
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

    /// What this thread calls before each of its accesses to guest memory: what another processor may do at that moment.
    pub fn interfere(with: Option<Interference>) {
        INTERFERENCE.with(|there| *there.borrow_mut() = with);
    }

    /// Accesses by the interference itself find it borrowed.
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
