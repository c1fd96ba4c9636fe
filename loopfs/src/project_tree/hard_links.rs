//! Files of a clone that get additional hard links.
//!
//! A source file is identified by its handle, which contains the number and the generation of its inode. The number alone
//! could belong to another file by the time the walk meets it again. The file of the clone is also opened by its handle. It
//! therefore needs no temporary name in the tree, and a crash leaves none behind.

use std::collections::HashMap;

use super::flags::Flags;
use crate::sys::file_handle::FileHandle;

/// Files with several hard links, from their first name in the walk to their last.
#[derive(Default)]
pub(super) struct HardLinks {
    made: HashMap<FileHandle, Made>,
}

/// A file of the clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) handle: FileHandle,
    /// The flags to set once all its hard links exist, because they prevent linking.
    pub(super) flags: Flags,
    /// Number of names of its source that the walk has not met yet.
    missing: u64,
}

impl HardLinks {
    pub(super) fn remember(&mut self, source: FileHandle, names: u64, handle: FileHandle, flags: Flags) {
        self.made.insert(source, Made { handle, flags, missing: names.saturating_sub(1) });
    }

    pub(super) fn find(&self, source: &FileHandle) -> Option<&FileHandle> {
        self.made.get(source).map(|made| &made.handle)
    }

    /// Records that another name was created. Returns the file if this was its last name.
    pub(super) fn met(&mut self, source: &FileHandle) -> Option<Made> {
        let made = self.made.get_mut(source)?;
        made.missing = made.missing.saturating_sub(1);
        if made.missing == 0 { self.made.remove(source) } else { None }
    }

    /// Removes and returns the files with names that the walk did not meet, because they are outside the tree.
    pub(super) fn rest(&mut self) -> impl Iterator<Item = Made> {
        std::mem::take(&mut self.made).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::file_handle;

    #[test]
    fn a_file_is_removed_after_its_last_name() {
        let directory = tempfile::tempdir().unwrap();
        let handle = |name: &str| {
            file_handle::of(std::fs::File::create(directory.path().join(name)).unwrap()).unwrap()
        };
        let (source, copy, other) = (handle("source"), handle("copy"), handle("other"));
        let mut links = HardLinks::default();
        links.remember(source.clone(), 3, copy.clone(), Flags::default());
        assert_eq!((links.find(&source), links.find(&other)), (Some(&copy), None));
        assert_eq!((links.met(&other), links.met(&source)), (None, None));
        assert_eq!(links.met(&source).unwrap().handle, copy);
        assert_eq!(links.find(&source), None);
        assert_eq!(links.met(&source), None);
        links.remember(source, 2, copy.clone(), Flags::default());
        assert_eq!(links.rest().map(|made| made.handle).collect::<Vec<_>>(), [copy]);
        assert_eq!(links.rest().count(), 0);
    }
}
