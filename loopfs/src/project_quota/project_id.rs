//! The number of a project.

use std::fmt;
use std::num::NonZeroU32;

/// A project id that may carry limits: neither 0 (whose limits are the defaults of all ids) nor
/// 4294967295 (which the kernel refuses).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProjectId(NonZeroU32);

impl ProjectId {
    /// The smallest id, 1.
    pub const FIRST: Self = Self(NonZeroU32::MIN);
    /// The largest id, 4294967294.
    pub const LAST: Self = Self(NonZeroU32::new(u32::MAX - 1).expect("not 0"));

    /// Returns the id, or `None` for 0 and 4294967295.
    #[must_use]
    pub const fn new(id: u32) -> Option<Self> {
        match NonZeroU32::new(id) {
            Some(nonzero) if id != u32::MAX => Some(Self(nonzero)),
            _ => None,
        }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for ProjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_with_a_meaning_of_their_own_are_refused() {
        assert_eq!(ProjectId::new(0), None);
        assert_eq!(ProjectId::new(u32::MAX), None);
        assert_eq!(ProjectId::new(7).map(ProjectId::get), Some(7));
    }
}
