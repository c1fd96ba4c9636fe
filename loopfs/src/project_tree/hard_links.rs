//! Which files of a clone get additional hard links.
//!
//! A file is known by its handle, which holds the number and the generation of its inode: a number alone could be
//! another file's by the time the walk meets it again. The clone's file is reached by a handle too. It needs no
//! name for that, so nothing lies about in the tree while it is made, and nothing is left of it after a crash.

use std::collections::HashMap;

use super::flags::Flags;
use crate::sys::file_handle::FileHandle;

/// Files with several names, from the first name on until the last.
#[derive(Default)]
pub(super) struct HardLinks {
    made: HashMap<FileHandle, Made>,
}

/// A file of the clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) handle: FileHandle,
    /// What it gets when it has all its names: they would keep it from getting one.
    pub(super) flags: Flags,
    /// Names that its source has beyond those met.
    missing: u64,
}

impl HardLinks {
    pub(super) fn remember(&mut self, source: FileHandle, names: u64, handle: FileHandle, flags: Flags) {
        self.made.insert(source, Made { handle, flags, missing: names.saturating_sub(1) });
    }

    pub(super) fn find(&self, source: &FileHandle) -> Option<&FileHandle> {
        self.made.get(source).map(|made| &made.handle)
    }

    /// One more name was made; the file, if it was the last.
    pub(super) fn met(&mut self, source: &FileHandle) -> Option<Made> {
        let made = self.made.get_mut(source)?;
        made.missing = made.missing.saturating_sub(1);
        if made.missing == 0 { self.made.remove(source) } else { None }
    }

    /// Those whose further names were not met: they are outside the tree.
    pub(super) fn rest(&mut self) -> impl Iterator<Item = Made> {
        std::mem::take(&mut self.made).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::file_handle;

    #[test]
    fn a_file_is_forgotten_with_its_last_name() {
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
