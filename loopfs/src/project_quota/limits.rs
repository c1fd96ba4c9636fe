//! The number of a project, and its limits: as requested, and as the file system stores them.

use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

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
    /// Remove it, the soft one too.
    Unlimited,
    /// Set a hard limit and no soft limit. The limit must not be 0, which the kernel interprets as unlimited.
    Hard(T),
    /// Set both limits. Usage never exceeds `hard`, and exceeds `soft` only for the grace period of the file system (a week by
    /// default).
    ///
    /// statfs(2) of the directory shows `soft` as its size.
    SoftHard {
        /// What may be exceeded for a while; not 0, and not more than `hard`.
        soft: T,
        /// What may not be exceeded; not 0.
        hard: T,
    },
}

/// The limits that a caller requests of [`ProjectQuota::set_limits`](super::ProjectQuota::set_limits).
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

    /// Hard limits on both, no soft ones.
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
        !matches!(self.bytes, Limit::Keep | Limit::Unlimited)
            || !matches!(self.inodes, Limit::Keep | Limit::Unlimited)
    }
}

/// The limits of one resource as the file system keeps them; None is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds<T> {
    /// What may be exceeded for the grace period.
    pub soft: Option<T>,
    /// What may not be exceeded.
    pub hard: Option<T>,
}

impl<T> Bounds<T> {
    /// Neither limit.
    pub const UNLIMITED: Self = Self { soft: None, hard: None };
}

/// The limits of a project as the file system keeps them, after its rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredLimits {
    /// Bytes; XFS rounds up to its block size.
    pub bytes: Bounds<Bytes>,
    /// Inodes.
    pub inodes: Bounds<Inodes>,
}

impl StoredLimits {
    /// No limits at all.
    pub const UNLIMITED: Self = Self { bytes: Bounds::UNLIMITED, inodes: Bounds::UNLIMITED };
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
    /// Set while more than the soft limit of bytes is in use (or more than the hard one, which was lowered):
    /// from then on the soft limit holds like a hard one. XFS keeps it to four seconds.
    pub bytes_grace_ends: Option<SystemTime>,
    /// As for bytes, for inodes.
    pub inodes_grace_ends: Option<SystemTime>,
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
                bytes: bounds(quota.blk_softlimit, quota.blk_hardlimit, Bytes::from_basic_blocks),
                inodes: bounds(quota.ino_softlimit, quota.ino_hardlimit, Inodes),
            },
            bytes_grace_ends: timer(quota, quota.btimer, quota.btimer_hi),
            inodes_grace_ends: timer(quota, quota.itimer, quota.itimer_hi),
        }
    }
}

fn bounds<T>(soft: u64, hard: u64, unit: fn(u64) -> T) -> Bounds<T> {
    let bound = |value: u64| (value != 0).then(|| unit(value));
    Bounds { soft: bound(soft), hard: bound(hard) }
}

/// The time in a record: seconds since 1970 in 32 bits, or in 40 with `FS_DQ_BIGTIME` (Linux 5.10).
fn timer(quota: &DiskQuota, low: i32, high: i8) -> Option<SystemTime> {
    let seconds = if quota.fieldmask & quotactl::FS_DQ_BIGTIME == 0 {
        i64::from(low)
    } else {
        i64::from(high) << 32 | i64::from(low.cast_unsigned())
    };
    let seconds = u64::try_from(seconds).ok().filter(|seconds| *seconds != 0)?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// The request for the kernel. What the kernel would pass over in silence (soft above hard) or take for
/// something else (0, and so many bytes that its arithmetic wraps round) is refused here.
pub(super) fn request(id: ProjectId, limits: Limits) -> Result<DiskQuota> {
    let mut quota = DiskQuota {
        version: quotactl::FS_DQUOT_VERSION,
        flags: quotactl::FS_PROJ_QUOTA,
        id: id.get(),
        ..DiskQuota::default()
    };
    let refuse = |problem: Explanation| Error::new(ErrorKind::InvalidInput, "limit project", id, problem);
    if let Some((soft, hard)) = numbers(limits.bytes, blocks).map_err(refuse)? {
        quota.fieldmask |= quotactl::FS_DQ_BSOFT | quotactl::FS_DQ_BHARD;
        (quota.blk_softlimit, quota.blk_hardlimit) = (soft, hard);
    }
    if let Some((soft, hard)) = numbers(limits.inodes, |inodes| Some(inodes.0)).map_err(refuse)? {
        quota.fieldmask |= quotactl::FS_DQ_ISOFT | quotactl::FS_DQ_IHARD;
        (quota.ino_softlimit, quota.ino_hardlimit) = (soft, hard);
    }
    Ok(quota)
}

fn blocks(bytes: Bytes) -> Option<u64> {
    bytes.round_up().map(|_| bytes.to_basic_blocks())
}

/// Soft and hard limit as the kernel counts, None to keep both.
fn numbers<T: Copy + Ord + fmt::Display>(
    limit: Limit<T>,
    unit: impl Fn(T) -> Option<u64>,
) -> Result<Option<(u64, u64)>, Explanation> {
    let number = |value: T| match unit(value) {
        Some(0) => {
            Err(Explanation::of("a limit of 0 means unlimited to the kernel", "say Unlimited for that"))
        }
        Some(number) => Ok(number),
        None => Err(format!("{value} are more than any file system can count").into()),
    };
    match limit {
        Limit::Keep => Ok(None),
        Limit::Unlimited => Ok(Some((0, 0))),
        Limit::Hard(hard) => Ok(Some((0, number(hard)?))),
        Limit::SoftHard { soft, hard } if soft > hard => {
            Err(format!("the soft limit of {soft} is above the hard limit of {hard}").into())
        }
        Limit::SoftHard { soft, hard } => Ok(Some((number(soft)?, number(hard)?))),
    }
}

/// Returns `true` if `stored` is what was requested, or a little more by rounding.
pub(super) fn honoured(requested: Limits, stored: &StoredLimits) -> bool {
    kept(requested.bytes, stored.bytes, |stored, requested| stored >= requested)
        && kept(requested.inodes, stored.inodes, |stored, requested| stored == requested)
}

fn kept<T: Copy>(requested: Limit<T>, stored: Bounds<T>, grants: fn(T, T) -> bool) -> bool {
    let bound = |requested: Option<T>, stored: Option<T>| match (requested, stored) {
        (None, None) => true,
        (Some(requested), Some(stored)) => grants(stored, requested),
        _ => false,
    };
    match requested {
        Limit::Keep => true,
        Limit::Unlimited => bound(None, stored.soft) && bound(None, stored.hard),
        Limit::Hard(hard) => bound(None, stored.soft) && bound(Some(hard), stored.hard),
        Limit::SoftHard { soft, hard } => bound(Some(soft), stored.soft) && bound(Some(hard), stored.hard),
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

    fn limit<T: Copy>(kind: u8, soft: T, hard: T) -> Limit<T> {
        match kind {
            0 => Limit::Keep,
            1 => Limit::Unlimited,
            2 => Limit::Hard(hard),
            _ => Limit::SoftHard { soft, hard },
        }
    }

    proptest! {
        /// The kernel's side is modelled by what it does with a request: store it, rounded up.
        #[test]
        fn limits_rounded_up_are_honoured(
            (kinds, bytes, inodes) in ((0..4u8, 0..4u8), (1..1u64 << 62, 1..1u64 << 62), (1..u64::MAX, 1..u64::MAX)),
        ) {
            let sorted = |(a, b): (u64, u64)| (a.min(b), a.max(b));
            let ((soft, hard), (isoft, ihard)) = (sorted(bytes), sorted(inodes));
            let requested = Limits {
                bytes: limit(kinds.0, Bytes(soft), Bytes(hard)),
                inodes: limit(kinds.1, Inodes(isoft), Inodes(ihard)),
            };
            let mut quota = request(ID, requested).unwrap();
            prop_assert_eq!(quota.fieldmask & BYTES == 0, kinds.0 == 0);
            prop_assert_eq!(quota.fieldmask & INODES == 0, kinds.1 == 0);
            quota.blk_softlimit = quota.blk_softlimit.next_multiple_of(8);
            quota.blk_hardlimit = quota.blk_hardlimit.next_multiple_of(8);
            prop_assert!(quota.blk_hardlimit == 0 || quota.blk_hardlimit >= quota.blk_softlimit);
            let stored = Usage::read(ID, &quota).limits;
            prop_assert!(honoured(requested, &stored), "{requested:?} became {stored:?}");
        }

        #[test]
        fn soft_limits_above_hard_are_refused(hard in 1..1u64 << 62, more in 1..1u64 << 62) {
            let bytes = Limit::SoftHard { soft: Bytes(hard + more), hard: Bytes(hard) };
            let inodes = Limit::SoftHard { soft: Inodes(hard + more), hard: Inodes(hard) };
            for limits in [Limits { bytes, ..Limits::KEEP }, Limits { inodes, ..Limits::KEEP }] {
                prop_assert_eq!(request(ID, limits).unwrap_err().kind(), ErrorKind::InvalidInput);
            }
        }
    }

    #[test]
    fn values_with_special_meanings_are_refused() {
        for bytes in [
            Limit::Hard(Bytes(0)),
            Limit::SoftHard { soft: Bytes(0), hard: Bytes(1) },
            // In units of 512 this would be 2^55, which the kernel multiplies to 0: unlimited.
            Limit::Hard(Bytes(u64::MAX)),
        ] {
            let error = request(ID, Limits { bytes, ..Limits::KEEP }).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        let inodes = Limit::Hard(Inodes(0));
        assert!(request(ID, Limits { inodes, ..Limits::KEEP }).is_err());
    }

    #[test]
    fn deviating_limits_are_not_honoured() {
        let stored = |bytes: u64, inodes: u64| StoredLimits {
            bytes: Bounds { soft: None, hard: Some(Bytes(bytes)) },
            inodes: Bounds { soft: None, hard: Some(Inodes(inodes)) },
        };
        let requested = Limits::hard(Bytes(4096), Inodes(10));
        assert!(honoured(requested, &stored(4096, 10)));
        assert!(!honoured(requested, &stored(4095, 10)));
        assert!(!honoured(requested, &stored(4096, 11)));
        assert!(!honoured(requested, &StoredLimits::UNLIMITED));
        assert!(!honoured(Limits::UNLIMITED, &stored(4096, 10)));
        assert!(honoured(Limits::KEEP, &stored(4096, 10)));
        let with_soft = StoredLimits {
            bytes: Bounds { soft: Some(Bytes(512)), hard: Some(Bytes(4096)) },
            ..stored(4096, 10)
        };
        assert!(!honoured(requested, &with_soft), "statfs would show the soft limit");
    }

    #[test]
    fn grace_periods_can_have_forty_bits() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut quota = DiskQuota { btimer: -2, btimer_hi: 1, ..DiskQuota::default() };
        assert_eq!(
            Usage::read(ID, &quota).bytes_grace_ends,
            None,
            "without the flag the high part is padding"
        );
        quota.fieldmask = quotactl::FS_DQ_BIGTIME;
        assert_eq!(Usage::read(ID, &quota).bytes_grace_ends, Some(at(0x1_ffff_fffe)));
        assert_eq!(Usage::read(ID, &quota).inodes_grace_ends, None);
        quota = DiskQuota { itimer: 1_800_000_000, ..DiskQuota::default() };
        assert_eq!(Usage::read(ID, &quota).inodes_grace_ends, Some(at(1_800_000_000)));
    }
}
