//! `listmount(2)` and `statmount(2)` (Linux 6.8): the mounts of the thread's mount namespace, by ids that the kernel never uses
//! again.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use linux_raw_sys::general as uapi;
use nix::errno::Errno;

use super::result::Result;

/// The room for the strings of one mount: its type, and two paths of the usual greatest length.
const STRINGS: usize = 3 * libc::PATH_MAX as usize;

/// One mount.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MountStatus {
    /// The first field of its line in `/proc/self/mountinfo`, unlike the id of these calls.
    pub(crate) id: u32,
    pub(crate) parent: u32,
    pub(crate) device: (u32, u32),
    /// `MOUNT_ATTR_*`.
    pub(crate) attributes: u64,
    pub(crate) fs_type: Vec<u8>,
    pub(crate) root: Vec<u8>,
    pub(crate) mount_point: Vec<u8>,
}

/// Writes the ids of the mounts that are greater than `after` into `buffer`, in ascending order, and returns their number. A full
/// buffer may not have all.
pub(crate) fn list(after: u64, buffer: &mut [u64]) -> Result<usize> {
    let request = request(u64::from_ne_bytes(i64::from(uapi::LSMT_ROOT).to_ne_bytes()), after);
    // SAFETY: listmount reads one request of the size that the request has in its first field, and writes at most
    // `buffer.len()` ids.
    let result = unsafe {
        libc::syscall(
            i64::from(uapi::__NR_listmount),
            &raw const request,
            buffer.as_mut_ptr(),
            buffer.len(),
            0_u32,
        )
    };
    Ok(usize::try_from(Errno::result(result)?).unwrap_or_default())
}

/// Returns the status of the mount with this id, or ENOENT if it was unmounted. EOVERFLOW: its paths are longer than the buffer.
pub(crate) fn status(id: u64) -> Result<MountStatus> {
    #[repr(C)]
    struct Reply {
        status: MaybeUninit<uapi::statmount>,
        strings: [u8; STRINGS],
    }
    let fields = uapi::STATMOUNT_SB_BASIC
        | uapi::STATMOUNT_MNT_BASIC
        | uapi::STATMOUNT_MNT_ROOT
        | uapi::STATMOUNT_MNT_POINT
        | uapi::STATMOUNT_FS_TYPE;
    let request = request(id, u64::from(fields));
    let mut reply = Reply { status: MaybeUninit::zeroed(), strings: [0; STRINGS] };
    // SAFETY: statmount reads one request of the size that the request has in its first field, and writes at most the given
    // size: one `struct statmount` with the strings behind it.
    let result = unsafe {
        libc::syscall(
            i64::from(uapi::__NR_statmount),
            &raw const request,
            &raw mut reply,
            size_of::<Reply>(),
            0_u32,
        )
    };
    Errno::result(result)?;
    // SAFETY: every bit pattern is a `struct statmount`, which has only integers, and it was zeroed before the call.
    let status = unsafe { reply.status.assume_init() };
    if status.mask & u64::from(fields) != u64::from(fields) {
        return Err(Errno::ENODATA);
    }
    let string = |offset: u32| {
        let rest = reply.strings.get(offset as usize..).unwrap_or_default();
        CStr::from_bytes_until_nul(rest).map(|text| text.to_bytes().to_vec()).unwrap_or_default()
    };
    Ok(MountStatus {
        id: status.mnt_id_old,
        parent: status.mnt_parent_id_old,
        device: (status.sb_dev_major, status.sb_dev_minor),
        attributes: status.mnt_attr,
        fs_type: string(status.fs_type),
        root: string(status.mnt_root),
        mount_point: string(status.mnt_point),
    })
}

/// A request of the first version of `struct mnt_id_req`, which every kernel that has the calls accepts.
fn request(mnt_id: u64, param: u64) -> uapi::mnt_id_req {
    uapi::mnt_id_req { size: uapi::MNT_ID_REQ_SIZE_VER0, spare: 0, mnt_id, param, mnt_ns_id: 0 }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layout_matches_mount_h() {
        assert_eq!(offset_of!(uapi::mnt_id_req, mnt_ns_id), uapi::MNT_ID_REQ_SIZE_VER0 as usize);
        assert_eq!(size_of::<uapi::statmount>(), 512);
        assert_eq!(offset_of!(uapi::statmount, mnt_point), 108);
    }
}
