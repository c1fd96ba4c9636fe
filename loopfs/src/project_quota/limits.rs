//! The number of a project, and its limits: as requested, and as the file system stores them.

use std::fmt;
use std::num::NonZeroU32;

use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::sys::quotactl::{self, DiskQuota};
use crate::units::{Bytes, Inodes};

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

/// What to do with the limit of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit<T> {
    /// Leave it as it is.
    #[default]
    Keep,
    /// Remove it.
    Unlimited,
    /// Set a limit that usage never exceeds. It must not be 0, which the kernel interprets as unlimited.
    Hard(T),
}

/// The limits that a caller requests of [`ProjectQuota::set_limits`](super::ProjectQuota::set_limits). A change of the limit of
/// a resource also removes the soft limit that another program has set on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes: allocated blocks, and those reserved for delayed allocation.
    pub bytes: Limit<Bytes>,
    /// Inodes, the directory itself among them.
    pub inodes: Limit<Inodes>,
}

impl Limits {
    /// Changes nothing: a start for `Limits { bytes: .., ..Limits::KEEP }`.
    pub const KEEP: Self = Self { bytes: Limit::Keep, inodes: Limit::Keep };
    /// Removes all limits.
    pub const UNLIMITED: Self = Self { bytes: Limit::Unlimited, inodes: Limit::Unlimited };

    /// Limits on both.
    #[must_use]
    pub const fn hard(bytes: Bytes, inodes: Inodes) -> Self {
        Self { bytes: Limit::Hard(bytes), inodes: Limit::Hard(inodes) }
    }

    /// Fails unless these contain a limit: an id without usage is reserved by its limits.
    pub(crate) fn require_limit(&self, operation: &'static str, object: &'static str) -> Result<()> {
        if self.restrict() {
            return Ok(());
        }
        let detail = "an id is reserved by its limits, and these set none";
        Err(Error::new(ErrorKind::InvalidInput, operation, object, detail))
    }

    /// Returns `true` if these contain a limit.
    pub(super) fn restrict(&self) -> bool {
        matches!(self.bytes, Limit::Hard(_)) || matches!(self.inodes, Limit::Hard(_))
    }
}

/// The hard limits of a project as the file system keeps them, after its rounding; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredLimits {
    /// Bytes; XFS rounds up to its block size.
    pub bytes: Option<Bytes>,
    /// Inodes.
    pub inodes: Option<Inodes>,
}

impl StoredLimits {
    /// No limits at all.
    pub const UNLIMITED: Self = Self { bytes: None, inodes: None };
}

/// What a project uses and may use, as the file system keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The project.
    pub id: ProjectId,
    /// Bytes in use, allocated and reserved for delayed allocation.
    pub bytes: Bytes,
    /// Inodes in use.
    pub inodes: Inodes,
    /// The limits, after the file system's rounding.
    pub limits: StoredLimits,
}

impl Usage {
    /// Returns `true` if nothing is charged to the project. It may still have limits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == Bytes(0) && self.inodes == Inodes(0)
    }

    pub(super) fn read(id: ProjectId, quota: &DiskQuota) -> Self {
        Self {
            id,
            bytes: Bytes::from_basic_blocks(quota.bcount),
            inodes: Inodes(quota.icount),
            limits: StoredLimits {
                bytes: Some(Bytes::from_basic_blocks(quota.blk_hardlimit)).filter(|limit| *limit != Bytes(0)),
                inodes: Some(Inodes(quota.ino_hardlimit)).filter(|limit| *limit != Inodes(0)),
            },
        }
    }
}

/// Returns the request for the kernel. It removes soft limits: statfs(2) would show them as the size. It refuses 0, which the kernel takes
/// for no limit, and a number of bytes whose units the kernel's arithmetic would wrap round.
pub(super) fn request(id: ProjectId, limits: Limits) -> Result<DiskQuota> {
    let mut quota = DiskQuota {
        version: quotactl::FS_DQUOT_VERSION,
        flags: quotactl::FS_PROJ_QUOTA,
        id: id.get(),
        ..DiskQuota::default()
    };
    let refuse = |problem: Explanation| Error::new(ErrorKind::InvalidInput, "limit project", id, problem);
    if let Some(blocks) = number(limits.bytes, blocks).map_err(refuse)? {
        quota.fieldmask |= quotactl::FS_DQ_BSOFT | quotactl::FS_DQ_BHARD;
        quota.blk_hardlimit = blocks;
    }
    if let Some(inodes) = number(limits.inodes, |inodes| Some(inodes.0)).map_err(refuse)? {
        quota.fieldmask |= quotactl::FS_DQ_ISOFT | quotactl::FS_DQ_IHARD;
        quota.ino_hardlimit = inodes;
    }
    Ok(quota)
}

fn blocks(bytes: Bytes) -> Option<u64> {
    bytes.round_up().map(|_| bytes.to_basic_blocks())
}

/// Returns a limit in the unit of the kernel, where 0 is unlimited, or `None` to keep the stored one.
fn number<T: Copy + fmt::Display>(
    limit: Limit<T>,
    unit: impl Fn(T) -> Option<u64>,
) -> Result<Option<u64>, Explanation> {
    let value = match limit {
        Limit::Keep => return Ok(None),
        Limit::Unlimited => return Ok(Some(0)),
        Limit::Hard(value) => value,
    };
    match unit(value) {
        Some(0) => {
            Err(Explanation::of("a limit of 0 means unlimited to the kernel", "say Unlimited for that"))
        }
        Some(number) => Ok(Some(number)),
        None => Err(format!("{value} are more than any file system can count").into()),
    }
}

/// Returns `true` if `stored` is what was requested, or a little more by rounding.
pub(super) fn honoured(requested: Limits, stored: &StoredLimits) -> bool {
    kept(requested.bytes, stored.bytes, |stored, requested| stored >= requested)
        && kept(requested.inodes, stored.inodes, |stored, requested| stored == requested)
}

fn kept<T>(requested: Limit<T>, stored: Option<T>, grants: fn(T, T) -> bool) -> bool {
    match requested {
        Limit::Keep => true,
        Limit::Unlimited => stored.is_none(),
        Limit::Hard(hard) => stored.is_some_and(|stored| grants(stored, hard)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reserved_ids_are_refused() {
        assert_eq!(ProjectId::new(0), None);
        assert_eq!(ProjectId::new(u32::MAX), None);
        assert_eq!(ProjectId::new(7).map(ProjectId::get), Some(7));
    }

    const ID: ProjectId = ProjectId::new(7).unwrap();
    const BYTES: u16 = quotactl::FS_DQ_BSOFT | quotactl::FS_DQ_BHARD;
    const INODES: u16 = quotactl::FS_DQ_ISOFT | quotactl::FS_DQ_IHARD;

    fn limit<T>(kind: u8, hard: T) -> Limit<T> {
        match kind {
            0 => Limit::Keep,
            1 => Limit::Unlimited,
            _ => Limit::Hard(hard),
        }
    }

    proptest! {
        /// The kernel's side is modelled by what it does with a request: store it, rounded up.
        #[test]
        fn limits_rounded_up_are_honoured(
            (kinds, bytes, inodes) in ((0..3u8, 0..3u8), 1..1u64 << 62, 1..u64::MAX),
        ) {
            let requested =
                Limits { bytes: limit(kinds.0, Bytes(bytes)), inodes: limit(kinds.1, Inodes(inodes)) };
            let mut quota = request(ID, requested).unwrap();
            let changed = |kind, mask| if kind == 0 { 0 } else { mask };
            prop_assert_eq!(quota.fieldmask, changed(kinds.0, BYTES) | changed(kinds.1, INODES));
            prop_assert_eq!((quota.blk_softlimit, quota.ino_softlimit), (0, 0));
            quota.blk_hardlimit = quota.blk_hardlimit.next_multiple_of(8);
            let stored = Usage::read(ID, &quota).limits;
            prop_assert!(honoured(requested, &stored), "{requested:?} became {stored:?}");
        }
    }

    #[test]
    fn values_with_special_meanings_are_refused() {
        // In units of 512, the largest number of bytes would be 2^55, which the kernel multiplies to 0: unlimited.
        for (bytes, inodes) in [(0, 1), (u64::MAX, 1), (1, 0)] {
            let error = request(ID, Limits::hard(Bytes(bytes), Inodes(inodes))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
    }

    #[test]
    fn deviating_limits_are_not_honoured() {
        let stored = |bytes, inodes| StoredLimits { bytes: Some(Bytes(bytes)), inodes: Some(Inodes(inodes)) };
        let requested = Limits::hard(Bytes(4096), Inodes(10));
        assert!(honoured(requested, &stored(4096, 10)));
        assert!(!honoured(requested, &stored(4095, 10)));
        assert!(!honoured(requested, &stored(4096, 11)));
        assert!(!honoured(requested, &StoredLimits::UNLIMITED));
        assert!(!honoured(Limits::UNLIMITED, &stored(4096, 10)));
        assert!(honoured(Limits::KEEP, &stored(4096, 10)));
    }
}
