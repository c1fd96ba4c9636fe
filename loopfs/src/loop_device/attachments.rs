//! The devices of a file among all loop devices, including those of other programs.
//!
//! The kernel has no call that returns the devices of a file. Asking each device (open(2), `LOOP_GET_STATUS64`) takes about 4 µs for
//! each, and reading `backing_file` in sysfs about 20 µs. `/proc/locks`, which shows all index locks, is no shorter way: the kernel
//! waits for an RCU grace period in each read of it (5 ms to 20 ms), and all file locks of the machine wait until then.
//! So [`Attachments`] remembers the file of each attachment, and checks in one of two ways that it still is the same attachment:
//!
//! - The count of uevents is unchanged. The kernel sends one for each device that is bound, so there was none.
//! - The directory `loop` of the device in sysfs has the same inode number. The kernel creates that directory when it binds the device.
//!
//! `LOOP_CHANGE_FD` gives a device another file without either. It needs a read-only device, so those are always asked. A device is
//! returned only after it was asked, too.
//!
//! `docs/decisions/0041-remembered-attachments.md` and `docs/decisions/0044-no-probe-for-changed-attachments.md` give the reasons.

use std::collections::HashMap;
use std::fmt::Write;

use super::binding::{Access, BackingFile};
use super::unmanaged::backing_of;
use crate::boot::Boot;
use crate::error::{Context, Result};
use crate::sys::{kernel_version, loop_dev};
use crate::units::DeviceNumber;

/// The remembered attachments. [`to_text`](Self::to_text) and [`from_text`](Self::from_text) store them between processes, for
/// instance in a file below `/run` that only root can write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attachments {
    /// The count of uevents before the devices were listed.
    uevents: u64,
    /// The devices by index, in the order of sysfs.
    devices: Vec<(u32, Attachment)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attachment {
    /// The inode number of the directory in sysfs.
    inode: u64,
    backing: BackingFile,
    access: Access,
}

impl Attachments {
    /// Returns the indices of all devices that are bound to a file, writable or not, whichever program bound them. They have the order
    /// of `/sys/block`. Updates the remembered attachments.
    ///
    /// The process must be able to open the devices: others are not returned.
    ///
    /// # Errors
    /// Those of open(2): sysfs is not mounted.
    pub fn devices_of(&mut self, file: BackingFile) -> Result<Vec<u32>> {
        let uevents = loop_dev::uevent_count().unwrap_or_default();
        if uevents == 0 || uevents != self.uevents || !binding_sends_uevent() {
            self.list(uevents)?;
        }
        let found = self
            .devices
            .iter()
            .filter(|(_, attachment)| attachment.access == Access::ReadOnly || attachment.backing == file);
        let found = found.map(|(index, _)| *index);
        Ok(found.filter(|index| backing_of(*index).is_some_and(|(backing, _)| backing == file)).collect())
    }

    fn list(&mut self, uevents: u64) -> Result<()> {
        let known: HashMap<u32, Attachment> = self.devices.drain(..).collect();
        // If this fails, nothing is remembered.
        self.uevents = 0;
        let indices = loop_dev::indices_in_sysfs_order().context("list", "/sys/block")?;
        let inodes = loop_dev::attachment_inodes(&indices).context("list", "/sys/devices/virtual/block")?;
        for (index, inode) in indices.into_iter().zip(inodes) {
            let Some(inode) = inode else { continue };
            let same = known.get(&index).filter(|known| known.inode == inode);
            let attachment = same.copied().or_else(|| {
                let (backing, access) = backing_of(index)?;
                // If the device was bound again in the meantime, the next call must ask it again.
                let now = loop_dev::attachment_inodes(&[index]).ok().and_then(|inodes| inodes[0]);
                Some(Attachment { inode: now.filter(|now| *now == inode).unwrap_or(0), backing, access })
            });
            self.devices.extend(attachment.map(|attachment| (index, attachment)));
        }
        // A device that was bound again while this listed it has sent a uevent, so the next call lists again.
        self.uevents = uevents;
        Ok(())
    }

    /// Returns the attachments as text, for this boot of the machine.
    #[must_use]
    pub fn to_text(&self) -> String {
        // Without it, the text is never read back.
        let boot = Boot::current().map_or_else(|_| "unknown".to_owned(), |Boot(boot)| boot);
        let mut text = format!("{VERSION} {boot} {}\n", self.uevents);
        for (index, Attachment { inode, backing, access }) in &self.devices {
            let access = if *access == Access::ReadOnly { "ro" } else { "rw" };
            let DeviceNumber { major, minor } = backing.device;
            // Writing to a string cannot fail.
            writeln!(text, "{index} {inode} {major} {minor} {} {access}", backing.inode).ok();
        }
        text
    }

    /// Reads what [`to_text`](Self::to_text) returned. Returns no attachments if the text is damaged or from another boot.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        parse(text).unwrap_or_default()
    }
}

const VERSION: &str = "loopfs-attachments-1";

fn parse(text: &str) -> Option<Attachments> {
    let mut lines = text.lines();
    let boot = Boot::current().ok()?;
    let uevents = lines.next()?.strip_prefix(&format!("{VERSION} {boot} "))?.parse().ok()?;
    let devices = lines.map(|line| {
        let mut fields = line.split(' ');
        let index = fields.next()?.parse().ok()?;
        let inode = fields.next()?.parse().ok()?;
        let device =
            DeviceNumber { major: fields.next()?.parse().ok()?, minor: fields.next()?.parse().ok()? };
        let backing = BackingFile { device, inode: fields.next()?.parse().ok()? };
        let access = match fields.next()? {
            "ro" => Access::ReadOnly,
            "rw" => Access::ReadWrite,
            _ => return None,
        };
        fields.next().is_none().then_some((index, Attachment { inode, backing, access }))
    });
    Some(Attachments { uevents, devices: devices.collect::<Option<_>>()? })
}

/// Returns `true` if `LOOP_CONFIGURE` always sends a uevent. Linux 6.4 to 6.14 suppress it; only some of their stable releases do not.
fn binding_sends_uevent() -> bool {
    kernel_version::is_at_least(6, 15)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::sys::loop_dev as model;

    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file
    }

    fn bind(index: u32, file: &File) {
        let file = file.try_clone().unwrap();
        model::with(|model| model.bind_file(index, file, model::FOREIGN));
    }

    fn opens() -> usize {
        model::with(|model| model.calls.get("open").copied().unwrap_or_default())
    }

    /// Each request finds all devices of the file, but only the first request opens the devices of other files.
    #[test]
    fn other_files_devices_are_queried_once() {
        model::reset(|_| {});
        let (ours, other) = (file(), file());
        bind(4, &ours);
        (10..60).for_each(|index| bind(index, &other));
        bind(70, &ours);
        let mut attachments = Attachments::default();
        let backing = BackingFile::of(&ours).unwrap();
        assert_eq!(attachments.devices_of(backing).unwrap(), [4, 70]);
        let before = opens();
        assert_eq!(attachments.devices_of(backing).unwrap(), [4, 70]);
        assert_eq!(opens() - before, 2);
        let mut stored = Attachments::from_text(&attachments.to_text());
        assert_eq!(stored, attachments);
        assert_eq!(stored.devices_of(backing).unwrap(), [4, 70]);
        assert_eq!(opens() - before, 4);
    }

    /// Text is outdated if it was written during another boot.
    #[test]
    fn damaged_or_outdated_text_is_ignored() {
        let none = Attachments::default();
        let text = Attachments { uevents: 7, ..none.clone() }.to_text();
        assert_eq!(Attachments::from_text(&text).uevents, 7);
        for damaged in
            ["", "x", &text.replace(&Boot::current().unwrap().0, "other"), &format!("{text}1 2 3\n")]
        {
            assert_eq!(Attachments::from_text(damaged), none, "{damaged:?}");
        }
    }
}
