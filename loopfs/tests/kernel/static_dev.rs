//! Tests with a `/dev` that is a copy from before the loop devices were created, as in a container of Docker or kind: a tmpfs in
//! which the kernel creates no nodes.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use loopfs::loop_device::{Access, AttachOptions, Detach, IndexPolicy, LoopControl, LoopDevice};
use nix::mount::MsFlags;
use nix::sys::stat::fstat;

use crate::device_cgroup::DeviceCgroup;
use crate::environment::{Leaks, MIB};
use crate::fixtures::TestImage;
use crate::module::unload_loop_module;
use crate::namespaces::{NodeAside, no_loop_nodes, with_static_dev};

#[test]
fn an_attached_device_gets_its_node() {
    let TestImage { image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite);
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let control = LoopControl::open().unwrap();
        control.verify().unwrap();
        let device = control.attach(image, &options).unwrap();
        let node = std::fs::metadata(device.path()).unwrap();
        assert!(node.file_type().is_block_device());
        assert_eq!(node.rdev(), fstat(&device).unwrap().st_rdev);
        assert_eq!(node.mode() & 0o777, 0o600, "only root may open it");
        let found = control.find(image).unwrap();
        assert_eq!(found[0].binding(), device.binding());
        drop(found);
        assert_eq!(LoopDevice::open_path(&device.path()).unwrap().binding(), device.binding());
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
        // The index is idle in the pool, and its node is still there.
        let again = control.attach(image, &options).unwrap();
        assert_eq!(control.detach(again).unwrap(), Detach::Detached);
    });
}

/// Another mount namespace attached the device.
#[test]
fn finding_a_device_creates_its_node() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let binding = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap().binding().clone();
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let node = format!("/dev/loop{}", binding.index);
        assert!(!Path::new(&node).exists());
        assert!(control.list().unwrap().devices.iter().any(|status| status.binding == binding));
        assert_eq!(control.find(image).unwrap()[0].binding(), &binding);
        assert!(Path::new(&node).exists());
        assert_eq!(control.detach_all(image).unwrap(), Detach::Detached);
    });
}

/// The node has outlived the previous device of its index.
#[test]
fn a_stale_node_hinders_no_device() {
    let TestImage { image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(0x6_0000));
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let control = LoopControl::open().unwrap();
        for _ in 0..2 {
            let device = control.attach(image, &options).unwrap();
            assert_eq!(device.detach().unwrap(), Detach::Detached);
            loopfs::loop_device::unmanaged::remove(0x6_0000).unwrap();
            let is_absent =
                || Path::new("/dev/loop393216").exists() && !Path::new("/sys/block/loop393216").exists();
            assert!(is_absent());
            assert!(control.find(image).unwrap().is_empty());
            let error = LoopDevice::open_index(0x6_0000).unwrap_err();
            assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
            assert_eq!(loopfs::loop_device::unmanaged::attributes(0x6_0000).backing, None);
            assert!(is_absent(), "the kernel has created the device again");
        }
    });
}

#[test]
fn the_control_node_is_created() {
    let _leaks = Leaks::watch();
    unload_loop_module();
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        LoopControl::open().unwrap().verify().unwrap();
        let names: Vec<_> = std::fs::read_dir("/dev").unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(names.contains(&"loop-control".into()), "{names:?}");
        assert!(!names.iter().any(|name| name.to_string_lossy().starts_with('.')), "{names:?}");
    });
}

#[test]
fn a_devtmpfs_gets_no_node() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let aside = NodeAside::of(&device.path());
    let error = LoopDevice::open_path(&device.path()).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
    let error = control.find(image).unwrap_err();
    assert!(error.to_string().contains("/dev has no node"), "{error}");
    assert!(!device.path().exists(), "the kernel would not remove this node with its device");
    drop(aside);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
}

#[test]
fn a_nodev_dev_is_an_error() {
    let error = with_static_dev(no_loop_nodes, MsFlags::MS_NODEV, LoopControl::open).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
    assert!(error.to_string().contains("see the host's /dev"), "no remedy in: {error}");
}

/// By default, engines let a container create the nodes of all devices, and open few of them.
#[test]
fn device_cgroup_errors_have_a_remedy() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let index = control.attach(image, &AttachOptions::new(Access::ReadWrite)).unwrap().index();
    let cgroup = DeviceCgroup::with_rules(&[("devices.deny", "c 10:237 rw"), ("devices.deny", "b 7:* rw")]);
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let errors =
            cgroup.run(|| [LoopControl::open().unwrap_err(), LoopDevice::open_index(index).unwrap_err()]);
        for error in errors {
            assert_eq!(error.errno(), Some(libc::EPERM), "{error}");
            assert!(error.to_string().contains("c 10:237 rwm"), "no remedy in: {error}");
        }
        let names: Vec<_> = std::fs::read_dir("/dev").unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(!names.iter().any(|name| name.to_string_lossy().starts_with('.')), "{names:?}");
    });
}
