//! Tests of project ids in a user namespace whose root owns the directory through an idmapped mount, as in a pod with
//! `hostUsers: false`.

use std::fs::{File, Permissions, create_dir, metadata};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use loopfs::mount::unmount;
use loopfs::project_quota::{Limits, assign_project, project_of};
use loopfs::{Bytes, ErrorKind, Inodes, test_support};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

use crate::environment::{Leaks, MIB, directory, project, quota, scratch, xfs};
use crate::namespaces::{MAPPED, NOBODY, TARGET, start_in_user_namespace};
use crate::quota_refusals::assert_explained;

/// Enters a user namespace in which this process is root, and waits until the parent has mounted the volume.
fn enter_user_namespace() {
    unshare(CloneFlags::CLONE_NEWUSER).unwrap();
    std::fs::write("/proc/self/setgroups", "deny").unwrap();
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        std::fs::write(map, format!("0 {NOBODY} 1")).unwrap();
    }
    println!("{MAPPED}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Checks that root of the user namespace can do everything with its volume except escape its limit.
fn use_volume(volume: &Path) {
    assert_eq!(metadata(volume).unwrap().uid(), 0, "root owns the volume through the idmapped mount");
    let (nested, file) = (volume.join("nested"), volume.join("file"));
    create_dir(&nested).unwrap();
    let mut filled = File::create(&file).unwrap();
    for path in [volume, &nested, &file] {
        let refused = test_support::set_project(File::open(path).unwrap(), project(9999));
        assert_explained(refused, ErrorKind::InUserNamespace, Errno::EINVAL, "initial one");
    }
    for directory in [volume, &nested] {
        let refused = test_support::set_project_inheritance(File::open(directory).unwrap(), false);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EINVAL), "{}", directory.display());
    }
    let full = (0..=MIB / 4096).find_map(|_| {
        // Without this, the kernel's estimate for delayed allocation would be charged as well.
        filled.write_all(&[0x5a; 4096]).and_then(|()| filled.sync_data()).err()
    });
    assert_eq!(full.expect("the volume takes no more than its limit").raw_os_error(), Some(libc::ENOSPC));
}

/// The volume is mounted into the user namespace with mapped ids.
#[test]
fn namespace_root_cannot_change_projects() {
    if let Some(target) = std::env::var_os(TARGET) {
        enter_user_namespace();
        return use_volume(&PathBuf::from(target));
    }
    let _leaks = Leaks::watch();
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4011));
    quota.set_limits(id, Limits::hard(Bytes(MIB), Inodes(64))).unwrap();
    let (volume, target) = (directory(), scratch());
    assign_project(File::open(volume.path()).unwrap(), id).unwrap();
    std::fs::set_permissions(target.path(), Permissions::from_mode(0o755)).unwrap();

    let (mut child, mut output) = start_in_user_namespace(target.path());
    let namespace = File::open(format!("/proc/{}/ns/user", child.id())).unwrap();
    test_support::bind_mount_idmapped(File::open(volume.path()).unwrap(), target.path(), namespace).unwrap();
    writeln!(child.stdin.take().unwrap()).unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success() && rest.contains("1 passed"), "{rest}");

    for path in ["nested", "file"] {
        let path = volume.path().join(path);
        assert_eq!(metadata(&path).unwrap().uid(), 0, "the mount maps owners back to those on disk");
        assert_eq!(project_of(File::open(path).unwrap()).unwrap(), id.get());
    }
    // In the initial namespace the same owner can change the project: the limit is cooperative there.
    test_support::set_project(File::open(volume.path()).unwrap(), project(9999)).unwrap();
    assert_eq!(project_of(File::open(volume.path()).unwrap()).unwrap(), 9999);

    assert!(unmount(target.path()).unwrap());
    volume.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
}
