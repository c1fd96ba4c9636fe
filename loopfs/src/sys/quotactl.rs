//! `quotactl_fd(2)` (Linux 5.14) with the `Q_X*` commands of `linux/dqblk_xfs.h`.
//!
//! The kernel translates `Q_X*` for every file system with quotas. Unlike `Q_GETQUOTA`, the reads of `Q_X*` do not block on
//! a frozen file system.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use nix::errno::Errno;

use super::result::Result;

const PRJQUOTA: u32 = 2;
const Q_XGETQUOTA: u32 = 0x5803;
const Q_XSETQLIM: u32 = 0x5804;
const Q_XGETQSTATV: u32 = 0x5808;
const Q_XGETNEXTQUOTA: u32 = 0x5809;

pub(crate) const FS_DQUOT_VERSION: i8 = 1;
pub(crate) const FS_PROJ_QUOTA: i8 = 2;
pub(crate) const FS_DQ_ISOFT: u16 = 1 << 0;
pub(crate) const FS_DQ_IHARD: u16 = 1 << 1;
pub(crate) const FS_DQ_BSOFT: u16 = 1 << 2;
pub(crate) const FS_DQ_BHARD: u16 = 1 << 3;
pub(crate) const FS_QUOTA_PDQ_ACCT: u16 = 1 << 4;
pub(crate) const FS_QUOTA_PDQ_ENFD: u16 = 1 << 5;
const FS_QSTATV_VERSION1: i8 = 1;

/// `struct fs_disk_quota`. Block counts are in units of 512 bytes on every file system.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskQuota {
    pub(crate) version: i8,
    pub(crate) flags: i8,
    pub(crate) fieldmask: u16,
    pub(crate) id: u32,
    pub(crate) blk_hardlimit: u64,
    pub(crate) blk_softlimit: u64,
    pub(crate) ino_hardlimit: u64,
    pub(crate) ino_softlimit: u64,
    pub(crate) bcount: u64,
    pub(crate) icount: u64,
    pub(crate) itimer: i32,
    pub(crate) btimer: i32,
    pub(crate) iwarns: u16,
    pub(crate) bwarns: u16,
    pub(crate) itimer_hi: i8,
    pub(crate) btimer_hi: i8,
    pub(crate) rtbtimer_hi: i8,
    pub(crate) padding2: i8,
    pub(crate) rtb_hardlimit: u64,
    pub(crate) rtb_softlimit: u64,
    pub(crate) rtbcount: u64,
    pub(crate) rtbtimer: i32,
    pub(crate) rtbwarns: u16,
    pub(crate) padding3: i16,
    pub(crate) padding4: [u8; 8],
}

/// `struct fs_qfilestatv`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QuotaFileStat {
    pub(crate) ino: u64,
    pub(crate) nblks: u64,
    pub(crate) nextents: u32,
    pub(crate) pad: u32,
}

/// `struct fs_quota_statv`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QuotaState {
    pub(crate) version: i8,
    pub(crate) pad1: u8,
    pub(crate) flags: u16,
    pub(crate) incoredqs: u32,
    pub(crate) user: QuotaFileStat,
    pub(crate) group: QuotaFileStat,
    pub(crate) project: QuotaFileStat,
    pub(crate) btimelimit: i32,
    pub(crate) itimelimit: i32,
    pub(crate) rtbtimelimit: i32,
    pub(crate) bwarnlimit: u16,
    pub(crate) iwarnlimit: u16,
    pub(crate) rtbwarnlimit: u16,
    pub(crate) pad3: u16,
    pub(crate) pad4: u32,
    pub(crate) pad2: [u64; 7],
}

fn quotactl_fd<T>(fd: RawFd, command: u32, id: u32, data: *mut T) -> Result<()> {
    let command = (command << 8) | PRJQUOTA;
    // SAFETY: quotactl_fd(fd, cmd, id, addr) reads or writes one structure of the command's type
    // at addr; the callers below pair each command with its type.
    let result = unsafe { libc::syscall(libc::SYS_quotactl_fd, fd, command, id, data) };
    Errno::result(result).map(drop)
}

/// Returns `true` if the kernel has the call. ENOSYS for a real descriptor does not mean that the call is missing: a file
/// system without quota support also returns it.
pub(crate) fn syscall_exists() -> bool {
    quotactl_fd(-1, Q_XGETQUOTA, 0, &mut DiskQuota::default()) != Err(Errno::ENOSYS)
}

/// `Q_XGETQUOTA`: returns the limits and usage of `id`. Returns ENOENT if the id is unused.
pub(crate) fn get(fs: BorrowedFd<'_>, id: u32) -> Result<DiskQuota> {
    let mut quota = DiskQuota::default();
    quotactl_fd(fs.as_fd().as_raw_fd(), Q_XGETQUOTA, id, &mut quota).map(|()| quota)
}

/// `Q_XGETNEXTQUOTA` (Linux 4.6): returns the limits and usage of the first used id that is at least `id`.
pub(crate) fn get_next(fs: BorrowedFd<'_>, id: u32) -> Result<DiskQuota> {
    let mut quota = DiskQuota::default();
    quotactl_fd(fs.as_fd().as_raw_fd(), Q_XGETNEXTQUOTA, id, &mut quota).map(|()| quota)
}

/// `Q_XSETQLIM`: sets the fields named in `fieldmask`.
pub(crate) fn set_limits(fs: BorrowedFd<'_>, quota: &mut DiskQuota) -> Result<()> {
    quotactl_fd(fs.as_fd().as_raw_fd(), Q_XSETQLIM, quota.id, quota)
}

/// `Q_XGETQSTATV`: returns which quota types are accounted and enforced.
pub(crate) fn state(fs: BorrowedFd<'_>) -> Result<QuotaState> {
    let mut state = QuotaState { version: FS_QSTATV_VERSION1, ..QuotaState::default() };
    quotactl_fd(fs.as_fd().as_raw_fd(), Q_XGETQSTATV, 0, &mut state).map(|()| state)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layouts_match_dqblk_xfs_h() {
        assert_eq!(size_of::<DiskQuota>(), 112);
        assert_eq!(offset_of!(DiskQuota, blk_hardlimit), 8);
        assert_eq!(offset_of!(DiskQuota, bcount), 40);
        assert_eq!(offset_of!(DiskQuota, itimer), 56);
        assert_eq!(offset_of!(DiskQuota, btimer), 60);
        assert_eq!(offset_of!(DiskQuota, itimer_hi), 68);
        assert_eq!(offset_of!(DiskQuota, btimer_hi), 69);
        assert_eq!(offset_of!(DiskQuota, rtb_hardlimit), 72);
        assert_eq!(offset_of!(DiskQuota, rtbtimer), 96);
        assert_eq!(size_of::<QuotaFileStat>(), 24);
        assert_eq!(size_of::<QuotaState>(), 160);
        assert_eq!(offset_of!(QuotaState, project), 56);
        assert_eq!(offset_of!(QuotaState, btimelimit), 80);
    }
}
