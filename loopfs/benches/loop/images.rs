//! Clones and snapshots of images of several sizes.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use loopfs::Bytes;
use loopfs::loop_device::Access;
use loopfs::volume_store::{
    ContentSource, SnapshotId, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};

use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

const CHUNK: usize = 8 << 20;

/// Runs the benchmark. `directory` must be the root of an empty XFS with project quotas.
pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let (mebibytes, runs): (&[u64], _) = match size {
        Size::Full => (&[1, 1 << 10, 8 << 10], 30),
        Size::Quick => (&[1, 256], 10),
    };
    let store = VolumeStore::open(directory, StoreOptions::default())?;
    let images: Result<Vec<Image>> =
        mebibytes.iter().map(|mebibytes| Image::make(&store, *mebibytes)).collect();
    let mut images = images?;
    // The images take turns, so that other load on this machine affects all of them alike. Run 0 fills the caches.
    for run in 0..=runs {
        eprintln!("run {run} of {runs}");
        for image in &mut images {
            stop::check()?;
            image.measure(&store, run > 0)?;
        }
    }
    for image in images {
        remove(&store, &image.id)?;
        image.clones.print();
        image.snapshots.print();
    }
    Ok(())
}

/// An image, and the times of its copies.
struct Image {
    id: VolumeId,
    spec: VolumeSpec,
    clones: Samples,
    snapshots: Samples,
}

impl Image {
    fn make(store: &VolumeStore, mebibytes: u64) -> Result<Image> {
        let id = VolumeId::parse(&format!("bench-{mebibytes}"))?;
        let spec = VolumeSpec::new(VolumeKind::Block, Bytes(mebibytes << 20));
        // A killed run may have left this volume.
        remove(store, &id)?;
        let volume = store.create(&id, &spec)?;
        fill(&volume.open_image(Access::ReadWrite)?.into(), mebibytes << 20)?;
        let n = usize::try_from(mebibytes)?;
        let (clones, snapshots) = (Samples::new("clone_image", n), Samples::new("snapshot_image", n));
        Ok(Image { id, spec, clones, snapshots })
    }

    fn measure(&mut self, store: &VolumeStore, counts: bool) -> Result<()> {
        let clone = VolumeId::parse("bench-clone")?;
        let snapshot = SnapshotId::parse("bench-snapshot")?;
        self.clones
            .share(counts, 1, || store.clone_from(ContentSource::Volume(&self.id), &clone, &self.spec))?;
        self.snapshots.share(counts, 1, || store.create_snapshot(&self.id, &snapshot))?;
        store.delete_snapshot(&snapshot)?;
        remove(store, &clone)
    }
}

/// Writes the whole image, because clones do not share preallocated blocks.
fn fill(image: &std::fs::File, size: u64) -> Result<()> {
    let chunk = vec![0x5a; CHUNK.min(size as usize)];
    for offset in (0..size).step_by(CHUNK) {
        stop::check()?;
        image.write_all_at(&chunk, offset)?;
        if offset.is_multiple_of(256 << 20) {
            eprintln!("{} MiB of {} written", offset >> 20, size >> 20);
        }
    }
    image.sync_all()?;
    Ok(nix::unistd::syncfs(image.as_fd())?)
}

fn remove(store: &VolumeStore, id: &VolumeId) -> Result<()> {
    store.delete(id)?;
    store.empty_trash()?;
    Ok(())
}
