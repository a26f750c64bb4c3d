//! Deliberate defects, to show that tests detect them. They exist only with the feature `mutations`, which must not
//! be enabled in a build that carries traffic; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate defect is enabled: `mutated!(index, FragmentPortsUnseen)`.
#[cfg(feature = "mutations")]
macro_rules! mutated {
    ($of:expr, $name:ident) => {
        $of.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without the feature nothing is mutated.
#[cfg(not(feature = "mutations"))]
macro_rules! mutated {
    ($of:expr, $name:ident) => {
        false
    };
}

pub(crate) use mutated;

/// A deliberate defect; [`Tables::mutation`](crate::Tables::mutation) enables it.
#[cfg(feature = "mutations")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// ACLs judge fragments without the ports of the first one.
    FragmentPortsUnseen,
    /// Security groups judge fragments without ports, and a fragment begins a session without ports.
    FragmentSession,
    /// Later fragments pass even if no first fragment passed before.
    FragmentWithoutFirst,
    /// Later fragments may overlap earlier ones.
    FragmentOverlap,
    /// The record of a packet's first fragment applies to fragments of any sender.
    FragmentOfAnybody,
    /// All router and neighbour discovery messages bypass ACLs and security groups, valid or not.
    NeighboursExempt,
    /// An ICMP error passes from any sender to any receiver, if it quotes a conversation of the guest.
    ErrorOfAnybody,
    /// A guest may act as a router.
    RouterUnseen,
    /// A guest may act as a DHCPv6 server.
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
