//! Deliberate mistakes, to show that tests notice them. They exist with the feature `mutations` only, which nothing that carries
//! traffic may turn on; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is switched on: `mutated!(index, FragmentPortsUnseen)`.
#[cfg(feature = "mutations")]
macro_rules! mutated {
    ($of:expr, $name:ident) => {
        $of.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without mutations nothing is mutated.
#[cfg(not(feature = "mutations"))]
macro_rules! mutated {
    ($of:expr, $name:ident) => {
        false
    };
}

pub(crate) use mutated;

/// One deliberate mistake; [`Tables::mutation`](crate::Tables::mutation) switches it on.
#[cfg(feature = "mutations")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// ACLs judge fragments without the ports that the first one has.
    FragmentPortsUnseen,
    /// Security groups judge fragments without ports, and a fragment begins a session without ports.
    FragmentSession,
    /// Later fragments pass although none came before that was allowed.
    FragmentWithoutFirst,
    /// Later fragments may overlap those that came before.
    FragmentOverlap,
    /// What is known of a packet's fragments counts for every sender's.
    FragmentOfAnybody,
    /// All of router and neighbour discovery passes ACLs and security groups, valid or not.
    NeighboursExempt,
    /// An ICMP error passes from any sender to any receiver, as long as it quotes a conversation of the guest.
    ErrorOfAnybody,
    /// A guest may speak as a router.
    RouterUnseen,
    /// A guest may speak as a DHCPv6 server.
    DhcpServerUnseen,
}

#[cfg(feature = "mutations")]
impl Mutation {
    /// Every mutation.
    pub const ALL: [Mutation; 9] = [
        Mutation::FragmentPortsUnseen,
        Mutation::FragmentSession,
        Mutation::FragmentWithoutFirst,
        Mutation::FragmentOverlap,
        Mutation::FragmentOfAnybody,
        Mutation::NeighboursExempt,
        Mutation::ErrorOfAnybody,
        Mutation::RouterUnseen,
        Mutation::DhcpServerUnseen,
    ];
}
