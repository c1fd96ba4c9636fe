//! Tests of the settings of volumes: block sizes, direct I/O, thick and thin images.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use loopfs::loop_device::{Access, AttachOptions, Detach, Discard, IndexPolicy, LoopControl, LoopDevice};
use loopfs::volume_store::{ContentSource, Volume, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind, test_support};
use rstest::rstest;

use crate::environment::{
    Leaks, MIB, assert_close, available_after_recount, directory, id, image, linux_at_least, snapshot_id,
    wait_for_deferred_frees,
};
use crate::fixtures::{
    TestStore, allocated, assert_fails, open_image, remove, reserve_rest, write_scattered,
};

fn spec_of(settings: &[(&str, &str)]) -> VolumeSpec {
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(4 * MIB));
    for (name, value) in settings {
        spec.set(name, value).unwrap();
    }
    spec
}

fn block(store: &VolumeStore, name: &str, settings: &[(&str, &str)]) -> (VolumeId, Volume) {
    let id = id(name);
    let volume = store.create(&id, &spec_of(settings)).unwrap();
    (id, volume)
}

/// Attaches the volume as a driver does to publish it.
fn attach(control: &LoopControl, volume: &Volume) -> loopfs::Result<LoopDevice> {
    control.ensure_attached(open_image(volume), &volume.attach_options(Access::ReadWrite)?)
}

fn writable(device: &LoopDevice) -> File {
    File::options().read(true).write(true).open(device.path()).unwrap()
}

#[test]
fn discards_keep_a_thick_images_blocks() {
    let (store, control) = (TestStore::open(), LoopControl::open().unwrap());
    let (id, volume) = block(&store, "thick", &[]);
    let image = open_image(&volume);
    let device = attach(&control, &volume).unwrap();
    let through = writable(&device);
    through.write_all_at(&[7; 8192], 0).unwrap();
    through.sync_all().unwrap();
    assert_eq!(device.discard().unwrap(), Discard::Disabled);
    let refused = test_support::discard(&through, 0, 4 * MIB).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP), "{refused}");
    assert_eq!(allocated(&image), 4 * MIB);
    let mut content = [0; 8192];
    image.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(content, [7; 8192]);

    // The same holds after an expansion of the attached image.
    store.expand(&id, Bytes(8 * MIB)).unwrap();
    assert_eq!(device.refresh_capacity(&image).unwrap(), Bytes(8 * MIB));
    test_support::discard(&through, 4 * MIB, 4 * MIB).unwrap_err();
    assert_eq!(allocated(&image), 8 * MIB);

    // Deferring and cancelling a detach must leave discards disabled. Before Linux 6.9 LOOP_SET_STATUS64 enables them.
    drop(device);
    let Detach::Deferred(pending) = control.detach_all(&image).unwrap() else { panic!("it is open") };
    assert_eq!(pending.cancel().unwrap()[0].discard().unwrap(), Discard::Disabled);
    test_support::discard(&through, 0, 4 * MIB).unwrap_err();
    let device = attach(&control, &volume).unwrap();
    assert_eq!(allocated(&image), 8 * MIB);

    // A process that dies between attaching the device and disabling discards leaves this state.
    drop((device, through));
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    let unmasked = volume.attach_options(Access::ReadWrite).unwrap().discard(Discard::Enabled);
    let unmasked = control.attach(&image, &unmasked).unwrap();
    assert_eq!(unmasked.discard().unwrap(), Discard::Enabled);
    drop(unmasked);
    let device = attach(&control, &volume).unwrap();
    assert_eq!(device.discard().unwrap(), Discard::Disabled);
    drop(device);
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
}

/// The thin image keeps its reservation.
#[test]
fn discards_free_a_thin_images_blocks() {
    let (store, control) = (TestStore::open(), LoopControl::open().unwrap());
    let available = || store.space().unwrap().available.0;
    let before = available();
    let (id, volume) = block(&store, "thin", &[("provisioning", "thin")]);
    let reservation = before - available();
    assert_close(reservation, 4 * MIB + 4 * MIB / 128 + MIB);
    let image = open_image(&volume);
    assert_eq!((image.metadata().unwrap().len(), allocated(&image)), (4 * MIB, 0));
    let device = attach(&control, &volume).unwrap();
    assert_eq!(device.discard().unwrap(), Discard::Enabled);
    let through = writable(&device);
    let mut content = vec![1; 4 * MIB as usize];
    through.read_exact_at(&mut content, 0).unwrap();
    assert!(content.iter().all(|byte| *byte == 0));
    through.write_all_at(&vec![7; 2 * MIB as usize], 0).unwrap();
    through.sync_all().unwrap();
    let written = allocated(&image);
    assert!((2 * MIB..4 * MIB).contains(&written), "{written}");
    assert_eq!(store.stats(&id).unwrap().used, Bytes(written));
    test_support::discard(&through, 0, MIB).unwrap();
    assert_eq!(allocated(&image), written - MIB);
    assert_eq!(before - available(), reservation);
    let recounted = before - available_after_recount();
    assert!(recounted.abs_diff(reservation) <= MIB / 8, "{recounted} not {reservation}");

    store.expand(&id, Bytes(8 * MIB)).unwrap();
    assert_eq!((image.metadata().unwrap().len(), allocated(&image)), (8 * MIB, written - MIB));
    assert_eq!(device.refresh_capacity(&image).unwrap(), Bytes(8 * MIB));
    assert_close(before - available(), 8 * MIB + 8 * MIB / 128 + MIB);
    drop((device, through));
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    drop((image, volume));
    remove(&store, &id);
    wait_for_deferred_frees();
    assert_eq!(available(), before);
}

/// Another volume has reserved all other space.
#[test]
fn a_thin_image_can_be_filled() {
    const SIZE: u64 = 8 * MIB;
    let store = TestStore::open();
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(SIZE));
    spec.set("provisioning", "thin").unwrap();
    let volume = store.create(&id("thin"), &spec).unwrap();
    reserve_rest();
    let image = open_image(&volume);
    write_scattered(&image, SIZE, |_| vec![5; 4096]);
    assert!(allocated(&image) >= SIZE);
}

/// Later kernels keep discards disabled when the index is bound to another file. Newer ones keep them disabled until
/// the index is removed.
#[test]
fn discards_are_enabled_after_thick_volumes() {
    let _leaks = Leaks::watch();
    let control = LoopControl::open().unwrap();
    let directory = directory();
    let file = image(directory.path(), "image", MIB);
    let wish = |discard| AttachOptions::new(Access::ReadWrite).discard(discard);
    let index = control.attach(&file, &wish(Discard::Disabled)).unwrap().index();
    assert_eq!(control.detach_all(&file).unwrap(), Detach::Detached);
    let again = wish(Discard::Enabled).index(IndexPolicy::Exact(index));
    let device = control.attach(&file, &again).unwrap();
    assert_eq!(device.discard().unwrap(), Discard::Enabled);
    file.write_all_at(&vec![1; MIB as usize], 0).unwrap();
    file.sync_all().unwrap();
    test_support::discard(writable(&device), 0, MIB).unwrap();
    assert_eq!(allocated(&file), 0);
    drop(device);
    assert_eq!(control.detach_all(&file).unwrap(), Detach::Detached);
}

/// From Linux 6.15 on a file with shared blocks accepts direct I/O only in whole blocks of the file system.
#[rstest]
#[case::preferred_512("preferred", "512", !linux_at_least(6, 15))]
#[case::preferred_4096("preferred", "4096", true)]
#[case::required_4096("required", "4096", true)]
fn sharing_blocks_keeps_the_block_size(
    #[case] direct_io: &str,
    #[case] size: &str,
    #[case] granted: bool,
    #[values("thick", "thin")] provisioning: &str,
) {
    let (store, control) = (TestStore::open(), LoopControl::open().unwrap());
    let settings = [("directIO", direct_io), ("logicalBlockSize", size), ("provisioning", provisioning)];
    let (source, original) = block(&store, "source", &settings);
    assert!(!original.may_share_blocks().unwrap());
    open_image(&original).write_all_at(&[6; 8192], 0).unwrap();
    // The device that was attached before keeps its properties.
    let device = attach(&control, &original).unwrap();
    let clone = store.clone_from(ContentSource::Volume(&source), &id("clone"), &spec_of(&settings)).unwrap();
    assert_eq!(clone.image().unwrap(), original.image().unwrap());
    assert!(original.may_share_blocks().unwrap() && clone.may_share_blocks().unwrap());
    assert!(device.status().unwrap().direct_io);
    attach(&control, &original).unwrap();
    drop(device);
    assert_eq!(control.detach_all(open_image(&original).as_fd()).unwrap(), Detach::Detached);

    let unit = size.parse::<u32>().unwrap();
    for (volume, byte) in [(&original, 1), (&clone, 2)] {
        let device = attach(&control, volume).unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.block_size, status.direct_io), (unit, granted));
        let through = writable(&device);
        through.write_all_at(&vec![byte; unit as usize], u64::from(unit)).unwrap();
        through.sync_all().unwrap();
    }
    for (volume, byte) in [(&original, 1), (&clone, 2)] {
        let mut content = vec![0; 2 * unit as usize];
        open_image(volume).read_exact_at(&mut content, 0).unwrap();
        let (kept, written) = content.split_at(unit as usize);
        assert!(kept.iter().all(|found| *found == 6) && written.iter().all(|found| *found == byte));
        assert_eq!(control.detach_all(open_image(volume).as_fd()).unwrap(), Detach::Detached);
        // The clone is thick or thin like its source.
        let blocks = allocated(&open_image(volume));
        assert_eq!(blocks >= 4 * MIB, provisioning == "thick", "{blocks}");
    }
}

/// The settings of the source do not allow attaching an image with shared blocks.
#[test]
fn unattachable_clones_are_refused() {
    let store = TestStore::open();
    let (source, volume) = block(&store, "source", &[("directIO", "required"), ("logicalBlockSize", "512")]);
    let before = store.space().unwrap().available;
    let errors = [
        store.clone_from(ContentSource::Volume(&source), &id("clone"), &spec_of(&[])).unwrap_err(),
        store.create_snapshot(&source, &snapshot_id("snapshot")).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        for remedy in ["source", "directIO preferred", "logicalBlockSize 4096"] {
            assert!(error.to_string().contains(remedy), "no {remedy:?} in: {error}");
        }
    }
    assert_eq!(store.snapshots().unwrap(), []);
    assert!(!volume.may_share_blocks().unwrap());
    assert_eq!(store.space().unwrap().available, before);
    assert_eq!(store.list().unwrap(), std::slice::from_ref(&source));
}

#[rstest]
#[case::settings("trusted.loopfs.image", |volume: &Volume| volume.image().map(drop))]
#[case::capacity("trusted.loopfs.capacity", |volume: &Volume| volume.stats().map(drop))]
fn a_missing_attribute_is_an_error(#[case] attribute: &str, #[case] read: fn(&Volume) -> loopfs::Result<()>) {
    let store = TestStore::open();
    let (id, volume) = block(&store, "copied", &[]);
    read(&volume).unwrap();
    rustix::fs::fremovexattr(open_image(&volume), attribute).unwrap();
    let error = assert_fails(read(&volume), ErrorKind::Damaged);
    assert!(error.to_string().contains(attribute), "{error}");
    drop((volume, store.volume(&id).unwrap()));
    // It does not prevent the creation of others, and it can be deleted.
    drop(block(&store, "other", &[]));
}

#[test]
fn settings_of_later_versions_are_refused() {
    let store = TestStore::open();
    let (_, volume) = block(&store, "later", &[]);
    let image = open_image(&volume);
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::fsetxattr(&image, "trusted.loopfs.image", b"provisioning=striped", flags).unwrap();
    let error = volume.image().unwrap_err();
    assert!(error.to_string().contains("striped"), "{error}");
    // The invalid volume does not prevent the creation of others.
    drop((image, volume));
    drop(block(&store, "other", &[]));
}
