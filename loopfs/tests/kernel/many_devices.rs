//! Tests of a node with hundreds of Block volumes, each of which has two loop devices.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use loopfs::loop_device::{Access, AttachOptions, Binding, Detach, LoopControl, LoopDevice, PoolOptions};
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind};

use crate::environment::{id, loop_devices, wait_until};
use crate::fixtures::TestStore;

/// Each device uses about 136 KiB of kernel memory.
const DEVICES: usize = 1000;
const ACCESSES: [Access; 2] = [Access::ReadWrite, Access::ReadOnly];
const THREADS: usize = 8;

/// Runs the work in several threads, so that they wait for the disk concurrently.
fn for_each<T: Send>(volumes: &[VolumeId], work: impl Fn(&VolumeId) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let parts = volumes.chunks(volumes.len().div_ceil(THREADS));
        let start = |part: &'_ [VolumeId]| {
            let part = part.to_vec();
            scope.spawn(move || part.iter().map(work).collect::<Vec<T>>())
        };
        let workers: Vec<_> = parts.map(start).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

/// All devices are attached, found, listed, detached and removed.
#[test]
fn a_thousand_devices_can_be_managed() {
    // Opening it loads the module, which creates devices.
    let store = TestStore::open();
    let devices_before = loop_devices().len();
    // The pool has its own range, so that idle devices of other tests are not counted.
    let options = PoolOptions { range: 0x3_0000..0x4_0000, keep_idle: DEVICES };
    let control = LoopControl::with_pool(options.clone()).unwrap();
    let volumes: Vec<VolumeId> = (0..DEVICES / ACCESSES.len()).map(|n| id(&format!("many-{n}"))).collect();
    let image = |id: &VolumeId, access| -> OwnedFd { store.volume(id).unwrap().open_image(access).unwrap() };

    let bindings: Vec<[Binding; 2]> = for_each(&volumes, |id| {
        store.create(id, &VolumeSpec::new(VolumeKind::Block, Bytes(4096))).unwrap();
        ACCESSES.map(|access| {
            // If the image were open for writing, attaching would query every device.
            let image = image(id, Access::ReadOnly);
            let device = control.attach(&image, &AttachOptions::new(access)).unwrap();
            device.binding().clone()
        })
    });
    assert_eq!(loop_devices().len(), devices_before + DEVICES);

    // A slow query leaves its device out.
    let mut listed = HashMap::new();
    wait_until(|| {
        let list = control.list().unwrap();
        listed = list.devices.into_iter().map(|status| (status.binding.index, status.binding)).collect();
        list.skipped.is_empty()
    });
    for binding in bindings.iter().flatten() {
        assert_eq!(listed.get(&binding.index), Some(binding));
    }
    // This control acts as another process, which has attached none of the devices.
    let other = LoopControl::with_pool(options).unwrap();
    assert_eq!(other.idle(), 0);
    for (id, bindings) in volumes.iter().zip(&bindings).step_by(31) {
        let found = other.find(image(id, Access::ReadOnly).as_fd()).unwrap();
        assert_eq!(found.iter().map(LoopDevice::binding).collect::<Vec<_>>(), [&bindings[0], &bindings[1]]);
    }

    for outcome in for_each(&volumes, |id| control.detach_all(image(id, Access::ReadOnly).as_fd()).unwrap()) {
        assert_eq!(outcome, Detach::Detached);
    }
    for binding in bindings.iter().flatten().step_by(31) {
        assert_eq!(LoopDevice::open_binding(binding).unwrap_err().kind(), ErrorKind::NotFound);
    }
    // A slow removal goes on in the background.
    control.remove_idle(0);
    wait_until(|| loop_devices().len() <= devices_before);
    assert!(for_each(&volumes, |id| store.delete(id).unwrap()).into_iter().all(|deleted| deleted));
    assert_eq!(store.empty_trash().unwrap(), volumes.len());
}
