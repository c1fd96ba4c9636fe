//! What the file system can still promise.
//!
//! A directory's limit is a promise although nothing is allocated for it, so free blocks alone
//! would let volumes be sold twice. So it is with a thin image, and with a clone: its blocks are the source's until one of
//! the two is written, and then there must be others.

use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;
use nix::sys::statvfs::fstatvfs;

use super::ledger::{Account, Ledger, Promised};
use super::pending::Pending;
use super::sharing::{self, SharedBlocks};
use super::{ContentSource, Image, Provisioning, VolumeStore, layout, snapshot};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;

/// Room on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size.
    pub total: Bytes,
    /// Bytes that are neither reserved for a volume, whether used or not, nor taken by the file system's own
    /// structures. [`largest_volume`](Self::largest_volume) returns the capacity of a volume that fits into them.
    pub available: Bytes,
    /// What is promised to volumes, whether used or not; deleted ones are among them until their space is free.
    pub promised: Bytes,
}

/// Bytes set aside for what is being made. Once this is dropped they are the volume's, which can be counted.
#[must_use = "dropped before the volume is made, its bytes are promised to nobody that can be counted"]
pub(super) struct Promise<'a> {
    store: &'a VolumeStore,
    bytes: Bytes,
    pending: Option<Pending>,
}

impl Promise<'_> {
    /// Nothing was made.
    pub(super) fn withdraw(self) {
        self.store.withdraw(self.bytes);
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let pending = self.pending.take();
        self.store.adjust(|account| {
            let bytes = pending.as_ref().map_or(Bytes(0), |pending| pending.bytes);
            drop(pending);
            account.pending = account.pending.saturating_sub(bytes);
        });
    }
}

impl VolumeStore {
    /// Room on the file system for new volumes.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn space(&self) -> Result<Space> {
        let ledger = match self.layout.ledger() {
            Ok(ledger) => ledger,
            // Nothing can be promised there, and nobody changes what is.
            Err(error) if error.kind() == ErrorKind::ReadOnly => return self.space_beside(self.count()?),
            Err(error) => return Err(error),
        };
        let account = ledger.read()?;
        match account.promised {
            Some(promised) => self.space_beside(promised),
            None => self.space_beside(self.count_into(&ledger, account)?),
        }
    }

    /// Sets bytes aside for a volume, or says how much was asked and how much there is.
    pub(super) fn promise(
        &self,
        entry: ContentSource<'_>,
        bytes: Bytes,
        operation: &'static str,
    ) -> Result<Promise<'_>> {
        let mut waited = false;
        loop {
            let ledger = self.layout.ledger()?;
            let account = ledger.read()?;
            let mut promised = match account.promised {
                Some(promised) if !waited => promised,
                _ => self.count_into(&ledger, account)?,
            };
            let space = self.space_beside(promised)?;
            if bytes <= space.available {
                promised.volumes = promised.volumes.saturating_add(bytes);
                let held = ledger.hold(bytes)?;
                let pending = account.pending.saturating_add(held.bytes);
                ledger.write(Account { pending, promised: Some(promised) })?;
                return Ok(Promise { store: self, bytes, pending: Some(held) });
            }
            if waited {
                let detail = format!(
                    "{bytes} asked, {} available of {} that the file system has",
                    space.available, space.total
                );
                return Err(Error::new(ErrorKind::NoSpace, operation, entry, detail));
            }
            // A process that was killed may have left the account too high, and XFS frees the blocks of what was
            // deleted in the background. What is waited for here, nobody else has to wait for.
            drop(ledger);
            self.finish_all_frees()?;
            waited = true;
        }
    }

    /// Takes a promise back.
    pub(super) fn withdraw(&self, bytes: Bytes) {
        self.adjust(|account| account.withdraw(bytes));
    }

    /// Forgets the count: what it says is no longer so.
    pub(super) fn count_anew(&self) {
        self.adjust(|account| account.promised = None);
    }

    /// An account that could not be written is too high, and is counted again before anything is refused.
    fn adjust(&self, change: impl FnOnce(&mut Account)) {
        let adjusted = self.with_account(|account| {
            change(account);
            Ok(())
        });
        adjusted.ok();
    }

    /// Does something that changes what is promised. Nobody counts in between, so that what is gone is not taken back
    /// from a count that was made without it.
    pub(super) fn with_account<T>(&self, change: impl FnOnce(&mut Account) -> Result<T>) -> Result<T> {
        let ledger = self.layout.ledger()?;
        let mut account = ledger.read()?;
        let outcome = change(&mut account);
        ledger.write(account)?;
        outcome
    }

    /// Counts, and writes down what was counted. What is pending may be among it already: rather twice than never.
    fn count_into(&self, ledger: &Ledger<'_>, account: Account) -> Result<Promised> {
        let mut promised = self.count()?;
        promised.volumes = promised.volumes.saturating_add(account.pending);
        ledger.write(Account { promised: Some(promised), ..account })?;
        Ok(promised)
    }

    fn space_beside(&self, promised: Promised) -> Result<Space> {
        let (total, free) = self.blocks()?;
        let unpromised = total.saturating_sub(promised.volumes).saturating_sub(promised.overhead);
        Ok(Space { total, available: unpromised.min(free), promised: promised.volumes })
    }

    /// Waits until the blocks of what was deleted are free. XFS finishes the frees of the whole file system, whichever
    /// project it is asked for; only blocks past the end of files are those of the project.
    pub(super) fn finish_all_frees(&self) -> Result<()> {
        self.filesystem.quota().finish_frees(*self.options.project_ids.start())
    }

    pub(super) fn blocks(&self) -> Result<(Bytes, Bytes)> {
        let status = fstatvfs(&self.filesystem.root).context("statfs", self.filesystem.path.display())?;
        let unit = status.fragment_size();
        Ok((Bytes(status.blocks() * unit), Bytes(status.blocks_available() * unit)))
    }

    fn count(&self) -> Result<Promised> {
        let (mut volumes, mut in_use) = (Bytes(0), Bytes(0));
        for usage in self.filesystem.quota().ids(self.options.project_ids.clone()) {
            let usage = usage?;
            // Over its limit, a volume takes more than it was promised.
            volumes = volumes.saturating_add(usage.limits.bytes.hard.unwrap_or_default().max(usage.bytes));
            in_use = in_use.saturating_add(usage.bytes);
        }
        let mut shared = SharedBlocks::default();
        for directory in self.layout.shelves() {
            for name in layout::names(directory, "volumes, snapshots and trash")? {
                if let Some(image) = count_image(directory, &name, &mut shared)? {
                    volumes = volumes.saturating_add(image.promised);
                    in_use = in_use.saturating_add(image.alone);
                }
            }
        }
        in_use = in_use.saturating_add(shared.once());
        let (total, free) = self.blocks()?;
        let overhead = total.saturating_sub(free).saturating_sub(in_use).max(self.least_overhead(total)?);
        Ok(Promised { volumes, overhead })
    }
}

struct ImageSpace {
    promised: Bytes,
    /// In use, without the blocks that it shares.
    alone: Bytes,
}

/// None for what is not an image, and for one that was removed since it was listed.
fn count_image(directory: &OwnedFd, name: &str, shared: &mut SharedBlocks) -> Result<Option<ImageSpace>> {
    let Ok(status) = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) else { return Ok(None) };
    if status.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    let size = Bytes(status.st_size as u64);
    let allocated = Bytes::from_basic_blocks(status.st_blocks as u64);
    let mut alone = allocated;
    let Ok(image) = layout::open_beneath(directory.as_fd(), name, OFlag::O_RDONLY | OFlag::O_NONBLOCK) else {
        return Ok(None);
    };
    let mut shares = false;
    if sharing::may_share(&image)? {
        let common = shared.add(&image).context("list the blocks of image", name)?;
        alone = alone.saturating_sub(common);
        shares = common > Bytes(0);
    }
    // One that cannot be read is promised rather too much.
    let thin = Image::read(&image).map_or(true, |image| image.provisioning == Provisioning::Thin);
    let promised = if snapshot::is_one(&image)? {
        // It is not written to: its blocks stay, and the tree of its extents came on top when it was made.
        size.max(allocated)
    } else {
        // The extent tree of a fragmented image comes on top of its size. What the file system has set aside for
        // writes to shared blocks it gives back when it is needed.
        let margin = if shares || thin { sharing::margin(size) } else { Bytes(0) };
        size.max(alone).saturating_add(margin)
    };
    Ok(Some(ImageSpace { promised, alone }))
}
