//! Doubly linked lists in an array: each element has two links, and each list a head and a tail.

/// No element.
pub(crate) const NONE: u32 = u32::MAX;

/// An element's neighbours in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Links {
    pub(crate) next: u32,
    pub(crate) prev: u32,
}

impl Links {
    /// Links of an element that is in no list.
    pub(crate) const UNLINKED: Links = Links { next: NONE, prev: NONE };
}

/// First and last element of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List {
    pub(crate) head: u32,
    tail: u32,
}

impl List {
    pub(crate) const EMPTY: List = List { head: NONE, tail: NONE };

    /// Appends element `index`, which is in no list; `links` finds an element's links.
    pub(crate) fn push_back<T>(&mut self, items: &mut [T], index: u32, links: fn(&mut T) -> &mut Links) {
        *links(&mut items[index as usize]) = Links { next: NONE, prev: self.tail };
        match self.tail {
            NONE => self.head = index,
            tail => links(&mut items[tail as usize]).next = index,
        }
        self.tail = index;
    }

    /// Removes element `index`, which is in this list.
    pub(crate) fn remove<T>(&mut self, items: &mut [T], index: u32, links: fn(&mut T) -> &mut Links) {
        let Links { next, prev } = std::mem::replace(links(&mut items[index as usize]), Links::UNLINKED);
        match prev {
            NONE => self.head = next,
            prev => links(&mut items[prev as usize]).next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => links(&mut items[next as usize]).prev = prev,
        }
    }
}
