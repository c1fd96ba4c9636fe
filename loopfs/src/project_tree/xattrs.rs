//! Copying extended attributes from one inode to another.

use std::ffi::CStr;

use nix::errno::Errno;

use crate::sys::xattr;

/// Copies the attributes of `source` to `target`. Both paths must lead directly to the inode. If `target` inherited an ACL
/// from a default ACL and `source` has no such ACL, the function removes it.
pub(super) fn copy_attributes(source: &CStr, target: &CStr) -> Result<(), Errno> {
    let names: Vec<_> = xattr::list_at(source)?.into_iter().filter(|name| is_content(name)).collect();
    for name in xattr::list_at(target)? {
        if is_acl(&name) && !names.contains(&name) {
            xattr::remove_at(target, &name)?;
        }
    }
    for name in names {
        // `None`: the attribute was removed in the meantime.
        if let Some(value) = xattr::get_at(source, &name)? {
            xattr::set_at(target, &name, &value)?;
        }
    }
    Ok(())
}

fn is_acl(name: &CStr) -> bool {
    name == c"system.posix_acl_access" || name == c"system.posix_acl_default"
}

/// Returns `true` for an attribute that belongs to the content of a tree. Excluded are the attributes that this crate sets on
/// volumes, and `trusted.SGI_ACL_*`, the names under which XFS stores ACLs and lists them a second time.
fn is_content(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    match bytes.strip_prefix(b"trusted.") {
        Some(own) => !own.starts_with(b"loopfs.") && !own.starts_with(b"SGI_ACL_"),
        None => bytes.starts_with(b"user.") || bytes.starts_with(b"security.") || is_acl(name),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(c"user.a", true)]
    #[case(c"user.trusted.loopfs.volume", true)]
    #[case(c"trusted.overlay.opaque", true)]
    #[case(c"trusted.loopfs", true)]
    #[case(c"trusted.loopfs.volume", false)]
    #[case(c"trusted.SGI_ACL_FILE", false)]
    #[case(c"trusted.SGI_ACL_DEFAULT", false)]
    #[case(c"security.capability", true)]
    #[case(c"system.posix_acl_access", true)]
    #[case(c"system.posix_acl_default", true)]
    #[case(c"system.nfs4_acl", false)]
    fn attributes_of_the_tenant_are_content(#[case] name: &CStr, #[case] expected: bool) {
        assert_eq!(is_content(name), expected, "{name:?}");
    }
}
