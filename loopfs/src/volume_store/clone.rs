//! Copies of images that share blocks with the original until one of the two is written.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, Flock, FlockArg, OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{fsync, linkat};

use super::grow::allocate;
use super::id::VolumeId;
use super::{Image, ImageSpec, Provisioning, Volume, VolumeKind, VolumeStore, rounded, sharing};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::{self, Access, reopen};
use crate::sys::reflink;
use crate::units::Bytes;

impl VolumeStore {
    /// Makes a Block volume with the content of another one, in a time that does not grow with its bytes
    /// (a little with the number of pieces it lies in): the blocks are shared until one of the two volumes
    /// writes to them. The whole `capacity` is promised to the clone all the same, so that no write to
    /// either ever lacks space, and for what pieces cost 1/128 of the size and 1 MiB more, to the clone and
    /// once to the source. Repeating the call answers the clone that is there.
    ///
    /// # What the clone holds
    /// The source may be attached and in use. The clone is the image at one moment, between two writes: what a
    /// loss of power at that moment would leave (crash-consistent). Writes of a loop device with direct I/O are
    /// waited for, and what the page cache holds of the image (a device without direct I/O) is written first.
    /// What lies above the device is not: call fsync(2) on the node if programs write to it, syncfs(2) on the
    /// file system if one is mounted from it, or freeze that with `FIFREEZE` for a copy that needs no replay of
    /// its journal. The clone of a file system has its UUID: XFS mounts it beside the original with `nouuid`.
    ///
    /// # Attaching it
    /// From Linux 6.15 on a file that shares blocks takes direct I/O in whole blocks of the file system only,
    /// the source no less than the clone, until nothing of it is shared. A device attached before keeps what it
    /// has; one attached later has the sectors that the content was made for and, if those are of 512 bytes, no
    /// direct I/O ([`ImageDirectIo`](super::ImageDirectIo)). The clone takes the settings of the source's image over.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no such source. [`ErrorKind::InvalidInput`]: the source is a Filesystem
    /// volume, or no such size. [`ErrorKind::WouldShrink`]: `capacity` is less than the source has.
    /// [`ErrorKind::AlreadyExists`]: the id names another volume than a clone of `source` that is large
    /// enough. [`ErrorKind::NoSpace`]: more than the file system can promise.
    /// [`ErrorKind::Unsupported`]: the file system cannot share blocks (EOPNOTSUPP), or the source requires direct I/O in
    /// blocks of 512 bytes. After an error nothing is left.
    #[doc(alias = "FICLONE")]
    #[doc(alias = "reflink")]
    pub fn clone_image(&self, source: &VolumeId, id: &VolumeId, capacity: Bytes) -> Result<Volume> {
        let capacity = rounded(capacity, id)?;
        let _lock = self.layout.lock_shared()?;
        // Asked before the source is: that may be gone by the time the call is repeated.
        if let Some(volume) = self.existing(id, VolumeKind::Block, capacity, Some(source))? {
            // Whoever made it may have died before it was durable.
            self.layout.make_durable()?;
            return Ok(volume);
        }
        let original = self.volume(source)?.open_image(Access::ReadOnly)?;
        // One copy of a source at a time, and it must not grow between the question how large it is and the copy.
        // A lock of its own file description, as in growing.
        let own = reopen(original.as_fd(), OFlag::O_RDONLY).context("open the image of volume", source)?;
        let _lock_source = Flock::lock(own, FlockArg::LockExclusive)
            .map_err(|(_, errno)| Error::sys("lock volume", source, errno))?;
        if let Some(volume) = self.existing(id, VolumeKind::Block, capacity, Some(source))? {
            return Ok(volume);
        }
        let size = Bytes(fstat(&original).context("fstat volume", source)?.st_size as u64);
        if capacity < size {
            let detail = format!("{capacity} asked, and volume {source} has {size}");
            return Err(Error::new(ErrorKind::WouldShrink, "clone volume", id, detail));
        }
        let of_source = Image::read(&original)?;
        let Image { direct_io, provisioning, .. } = of_source;
        let asked = ImageSpec { direct_io, provisioning, logical_block_size: None };
        let settings = of_source.settle_clone(source, asked, id)?;
        let promised = promise_of(&original, of_source, source, size, capacity)?;
        let promise = self.promise(id, promised, "clone volume")?;
        match self.link_clone(&original, source, id, capacity, settings) {
            Ok(()) => self.volume(id),
            Err(error) => {
                promise.withdraw();
                // What the source shares now depends on how far it went.
                self.count_anew();
                self.or_of_other(error, id, VolumeKind::Block, capacity, Some(source))
            }
        }
    }

    /// As an empty image, it has no name until it is complete.
    fn link_clone(
        &self,
        original: &OwnedFd,
        source: &VolumeId,
        id: &VolumeId,
        capacity: Bytes,
        settings: Image,
    ) -> Result<()> {
        let image = self.unnamed_image(id)?;
        settings.record(&image, id)?;
        sharing::mark_source(original).context("mark volume", source)?;
        sharing::record_source(&image, source).context("set up volume", id)?;
        share(original, &image, id)?;
        // All of it: where the source was never written, FICLONE leaves a hole. What is shared stays shared.
        allocate(&image, Bytes(0), capacity, settings.provisioning).context("allocate volume", id)?;
        self.publish_image(&image, id)
    }

    /// A file on the file system of the volumes that goes with its descriptor unless it is published.
    pub(super) fn unnamed_image(&self, id: &VolumeId) -> Result<OwnedFd> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        openat(&self.layout.volumes, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR)
            .context("make the image of volume", id)
    }

    /// Makes a complete image a volume, durably.
    pub(super) fn publish_image(&self, image: &OwnedFd, id: &VolumeId) -> Result<()> {
        loop_device::record_attachments(image).context("set up volume", id)?;
        fsync(image).context("fsync volume", id)?;
        let path = format!("/proc/self/fd/{}", image.as_raw_fd());
        linkat(AT_FDCWD, path.as_str(), &self.layout.volumes, id.as_str(), AtFlags::AT_SYMLINK_FOLLOW)
            .context("create volume", id)?;
        fsync(&self.layout.volumes).context("fsync", "volumes")
    }
}

/// The clone and what it and its source may take beyond their sizes from now on.
fn promise_of(
    original: &OwnedFd,
    of_source: Image,
    source: &VolumeId,
    size: Bytes,
    capacity: Bytes,
) -> Result<Bytes> {
    let promised = capacity.saturating_add(sharing::margin(capacity));
    let shares = sharing::may_share(original).context("read the attributes of volume", source)?;
    let has_margin = shares || of_source.provisioning == Provisioning::Thin;
    Ok(if has_margin { promised } else { promised.saturating_add(sharing::margin(size)) })
}

fn share(original: &OwnedFd, image: &OwnedFd, id: &VolumeId) -> Result<()> {
    reflink::clone(original, image).map_err(|errno| {
        let error = Error::sys("clone volume", id, errno);
        match errno {
            Errno::EOPNOTSUPP => error.explain(
                "the file system cannot share blocks between files; clones need XFS made with \
                 mkfs.xfs -m reflink=1 (the default since xfsprogs 5.1)",
            ),
            _ => error,
        }
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_file_system_that_cannot_share_blocks_is_named_with_what_to_do() {
        let memory = || memfd_create(c"image", MFdFlags::MFD_CLOEXEC).unwrap();
        let id = VolumeId::parse("copy").unwrap();
        let error = share(&memory(), &memory(), &id).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("reflink=1"), "{error}");
    }
}
