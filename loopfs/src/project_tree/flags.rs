//! The attributes of an inode that its owner can choose. The project and the flags that the kernel maintains are not among
//! them.

use linux_raw_sys::general::{
    FS_XFLAG_APPEND, FS_XFLAG_COWEXTSIZE, FS_XFLAG_DAX, FS_XFLAG_EXTSIZE, FS_XFLAG_EXTSZINHERIT,
    FS_XFLAG_FILESTREAM, FS_XFLAG_IMMUTABLE, FS_XFLAG_NOATIME, FS_XFLAG_NODEFRAG, FS_XFLAG_NODUMP,
    FS_XFLAG_NOSYMLINKS, FS_XFLAG_REALTIME, FS_XFLAG_RTINHERIT, FS_XFLAG_SYNC,
};

/// Flags that prevent changing, linking or moving an inode.
pub(super) const FREEZING: u32 = FS_XFLAG_IMMUTABLE | FS_XFLAG_APPEND;
/// Flags that control block allocation. The kernel accepts them only for a file without blocks.
pub(super) const ALLOCATION: u32 =
    FS_XFLAG_REALTIME | FS_XFLAG_EXTSIZE | FS_XFLAG_COWEXTSIZE | FS_XFLAG_DAX | FS_XFLAG_FILESTREAM;
/// All flags that the owner of an inode, or a process with `CAP_FOWNER`, can choose.
pub(super) const CHOSEN: u32 = FREEZING
    | ALLOCATION
    | FS_XFLAG_SYNC
    | FS_XFLAG_NOATIME
    | FS_XFLAG_NODUMP
    | FS_XFLAG_RTINHERIT
    | FS_XFLAG_NOSYMLINKS
    | FS_XFLAG_EXTSZINHERIT
    | FS_XFLAG_NODEFRAG;

/// Flags (`FS_XFLAG_*`) and the extent size hints that belong to them, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Flags {
    bits: u32,
    extent: u32,
    cow_extent: u32,
}

impl Flags {
    pub(super) fn new(bits: u64, extent: u32, cow_extent: u32) -> Self {
        let bits = bits as u32 & CHOSEN;
        let hint = |flag, value| if bits & flag != 0 { value } else { 0 };
        Self {
            bits,
            extent: hint(FS_XFLAG_EXTSIZE | FS_XFLAG_EXTSZINHERIT, extent),
            cow_extent: hint(FS_XFLAG_COWEXTSIZE, cow_extent),
        }
    }

    pub(super) fn bits(self) -> u32 {
        self.bits
    }

    pub(super) fn hints(self) -> (u32, u32) {
        (self.extent, self.cow_extent)
    }

    pub(super) fn are_none(self) -> bool {
        self.bits == 0
    }

    pub(super) fn has_any(self, of: u32) -> bool {
        self.bits & of != 0
    }

    pub(super) fn only(self, of: u32) -> Self {
        Self::new(u64::from(self.bits & of), self.extent, self.cow_extent)
    }

    pub(super) fn without(self, those: u32) -> Self {
        self.only(!those)
    }
}

#[cfg(test)]
mod tests {
    use linux_raw_sys::general::{FS_XFLAG_HASATTR, FS_XFLAG_PREALLOC, FS_XFLAG_PROJINHERIT};

    use super::*;

    /// These are the project inheritance flag, the flags that the kernel only reports, and unknown flags.
    #[test]
    fn uncopied_flags_are_dropped() {
        let reported = FS_XFLAG_PREALLOC | FS_XFLAG_HASATTR | FS_XFLAG_PROJINHERIT;
        assert!(Flags::new(u64::from(reported) | 1 << 40, 8, 8).are_none());
        assert_eq!(Flags::new(u64::from(reported), 8, 8), Flags::default());
    }

    #[test]
    fn a_hint_without_flag_is_zero() {
        let both = Flags::new(u64::from(FS_XFLAG_EXTSIZE | FS_XFLAG_COWEXTSIZE | FS_XFLAG_SYNC), 8192, 4096);
        assert_eq!(both.hints(), (8192, 4096));
        assert_eq!(both.only(FS_XFLAG_COWEXTSIZE).hints(), (0, 4096));
        assert_eq!(both.without(ALLOCATION), Flags::new(u64::from(FS_XFLAG_SYNC), 0, 0));
        assert!(both.has_any(ALLOCATION) && !both.has_any(FREEZING));
    }
}
