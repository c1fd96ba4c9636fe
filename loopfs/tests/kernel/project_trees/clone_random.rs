//! Property test of clones of random trees.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, lchown, symlink};
use std::path::PathBuf;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use proptest::prelude::*;

use super::Fixture;
use super::clone::{set_attribute, set_times};
use super::portrait::{assert_equal_trees, read_tree_metadata, without_access_times_of_links};

/// One change of a tree. A number selects one of the existing directories or names.
#[derive(Clone, Debug)]
enum Step {
    Directory { parent: usize },
    File { parent: usize, pieces: Vec<(u32, u16)>, size: u32 },
    Link { parent: usize, to: usize },
    Symlink { parent: usize, destination: String },
    Special { parent: usize, kind: usize, device: (u8, u16) },
    Owner { of: usize, uid: u32, gid: u32 },
    Mode { of: usize, mode: u32 },
    Attribute { of: usize, namespace: usize, name: u8, length: u16 },
    Times { of: usize, accessed: (i32, u32), modified: (i32, u32) },
}

fn step() -> impl Strategy<Value = Step> {
    let time = || (any::<i32>(), 0..1_000_000_000u32);
    let any_name = any::<usize>;
    prop_oneof![
        3 => any_name().prop_map(|parent| Step::Directory { parent }),
        5 => (any_name(), prop::collection::vec((0..1u32 << 22, 1..20_000u16), 0..4), 0..1u32 << 22)
            .prop_map(|(parent, pieces, size)| Step::File { parent, pieces, size }),
        3 => (any_name(), any_name()).prop_map(|(parent, to)| Step::Link { parent, to }),
        1 => (any_name(), "[a-z/.]{1,300}")
            .prop_map(|(parent, destination)| Step::Symlink { parent, destination }),
        2 => (any_name(), 0..4usize, any::<(u8, u16)>())
            .prop_map(|(parent, kind, device)| Step::Special { parent, kind, device }),
        2 => (any_name(), 0..100_000u32, 0..100_000u32).prop_map(|(of, uid, gid)| Step::Owner { of, uid, gid }),
        2 => (any_name(), 0..=0o7777u32).prop_map(|(of, mode)| Step::Mode { of, mode }),
        3 => (any_name(), 0..3usize, any::<u8>(), any::<u16>())
            .prop_map(|(of, namespace, name, length)| Step::Attribute { of, namespace, name, length }),
        3 => (any_name(), time(), time())
            .prop_map(|(of, accessed, modified)| Step::Times { of, accessed, modified }),
    ]
}

struct TreeBuilder {
    directories: Vec<PathBuf>,
    /// All names, including the directories.
    names: Vec<PathBuf>,
}

impl TreeBuilder {
    fn new_name(&mut self, parent: usize) -> PathBuf {
        let path = self.directories[parent % self.directories.len()].join(self.names.len().to_string());
        self.names.push(path.clone());
        path
    }

    fn name(&self, of: usize) -> &PathBuf {
        &self.names[of % self.names.len()]
    }

    fn act(&mut self, step: &Step) {
        match step {
            Step::Directory { parent } => {
                let path = self.new_name(*parent);
                fs::create_dir(&path).unwrap();
                self.directories.push(path);
            }
            Step::File { parent, pieces, size } => {
                let file = File::create(self.new_name(*parent)).unwrap();
                for (at, length) in pieces {
                    let content: Vec<u8> = (0..*length).map(|n| (u32::from(n) ^ at) as u8).collect();
                    file.write_all_at(&content, u64::from(*at)).unwrap();
                }
                file.set_len(u64::from(*size)).unwrap();
            }
            Step::Link { parent, to } => {
                let to = self.name(*to).clone();
                if !to.symlink_metadata().unwrap().is_dir() {
                    fs::hard_link(to, self.new_name(*parent)).unwrap();
                }
            }
            Step::Symlink { parent, destination } => symlink(destination, self.new_name(*parent)).unwrap(),
            Step::Special { parent, kind, device } => {
                let kind = [SFlag::S_IFIFO, SFlag::S_IFSOCK, SFlag::S_IFCHR, SFlag::S_IFBLK][*kind];
                let device = makedev(device.0.into(), device.1.into());
                mknod(&self.new_name(*parent), kind, Mode::S_IRUSR, device).unwrap();
            }
            Step::Owner { of, uid, gid } => lchown(self.name(*of), Some(*uid), Some(*gid)).unwrap(),
            Step::Mode { of, mode } => {
                let path = self.name(*of);
                if !path.is_symlink() {
                    let mode = std::os::unix::fs::PermissionsExt::from_mode(*mode);
                    fs::set_permissions(path, mode).unwrap();
                }
            }
            Step::Attribute { of, namespace, name, length } => {
                let path = self.name(*of);
                let kind = path.symlink_metadata().unwrap().file_type();
                let mut namespace = ["user", "trusted", "security"][*namespace];
                // xattr(7): user attributes are only allowed on regular files and directories.
                if namespace == "user" && !kind.is_file() && !kind.is_dir() {
                    namespace = "trusted";
                }
                set_attribute(path, &format!("{namespace}.{name}"), &vec![*name; usize::from(*length)]);
            }
            Step::Times { of, accessed, modified } => {
                let time = |(seconds, nanoseconds): (i32, u32)| (seconds.into(), nanoseconds.into());
                set_times(self.name(*of), time(*accessed), time(*modified));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_random_clone_equals_its_source(steps in prop::collection::vec(step(), 1..80)) {
        let fixture = Fixture::new(5441);
        let mut planting = TreeBuilder { directories: vec![fixture.tree()], names: vec![fixture.tree()] };
        for step in &steps {
            planting.act(step);
        }
        let expected = read_tree_metadata(&fixture.tree());
        let (copy, report) = fixture.clone();
        prop_assert!(report.is_complete(), "{:?}", report);
        prop_assert_eq!(report.names, expected.len() as u64);
        assert_equal_trees(&read_tree_metadata(&copy), &expected);
        let unchanged = without_access_times_of_links;
        assert_equal_trees(&unchanged(read_tree_metadata(&fixture.tree())), &unchanged(expected));
    }
}
