//! Calls with malformed names, and with paths outside the kubelet directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use loopfs::loop_device::LoopControl;
use loopfs::mount::table as mountinfo;
use tonic::{Code, Status};

use super::{CallResult, MalformedName, Rpc, Subject, clean_up};
use crate::fixture::Fixture;
use crate::support::*;

const MALFORMED_NAMES: [&str; 6] = ["..", "../../outside", "a/b", ".hidden", "two\nlines", "nul\0"];

/// A directory beside the kubelet directory, which no call may reach, and a symbolic link to it.
pub(super) struct Outside {
    directory: PathBuf,
    symlink_path: PathBuf,
}

impl Outside {
    pub(super) fn create(fixture: &Fixture) -> Self {
        let outside =
            Self { directory: fixture.scratch().join("outside"), symlink_path: fixture.target("way") };
        fs::create_dir(&outside.directory).unwrap();
        fs::write(outside.directory.join("file"), "precious").unwrap();
        symlink(&outside.directory, &outside.symlink_path).unwrap();
        outside
    }

    pub(super) fn remove(self) {
        fs::remove_file(self.symlink_path).unwrap();
        fs::remove_dir_all(self.directory).unwrap();
    }

    fn paths(&self, fixture: &Fixture) -> [PathBuf; 4] {
        let up = fixture.directories.kubelet.join("../outside/target");
        [self.directory.join("target"), up, self.symlink_path.join("target"), Path::new("target").to_owned()]
    }

    fn assert_untouched(&self, rpc: &Rpc) {
        let names: Vec<_> =
            fs::read_dir(&self.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"], "{}", rpc.name);
        assert_eq!(fs::read_to_string(self.directory.join("file")).unwrap(), "precious", "{}", rpc.name);
        let mounts = mountinfo::read().unwrap();
        assert!(
            !mounts.iter().any(|mount| mount.mount_point.starts_with(&self.directory)),
            "{}: {mounts:?}",
            rpc.name
        );
    }
}

pub(super) fn call_with_malformed_names(
    fixture: &Fixture,
    node: &Client,
    outside: &Outside,
    number: usize,
    rpc: &Rpc,
) {
    if rpc.malformed_name == MalformedName::TakesNoName {
        return;
    }
    let code_of = |result: &CallResult| result.as_ref().err().map_or(Code::Ok, Status::code);
    let locked = || {
        let devices = LoopControl::open().unwrap().list().unwrap().devices.len();
        (fixture.store.list().unwrap(), fixture.store.snapshots().unwrap(), devices)
    };
    let before = locked();
    for name in MALFORMED_NAMES {
        let subject = Subject { name: name.to_owned(), ..Subject::new(fixture, "malformed") };
        let result = (rpc.call)(node, &subject);
        let allowed = match (rpc.malformed_name, code_of(&result)) {
            (_, Code::InvalidArgument) => true,
            (MalformedName::Refused, code) => code == Code::NotFound,
            (_, code) => code == Code::Ok,
        };
        assert!(allowed, "{} of {name:?}: {result:?}", rpc.name);
        for volume in fixture.store.list().unwrap().iter().filter(|volume| !before.0.contains(volume)) {
            assert!(
                rpc.malformed_name == MalformedName::Accepted,
                "{} of {name:?} created {volume:?}",
                rpc.name
            );
            node.delete_volume(delete(volume.as_str())).unwrap();
        }
        outside.assert_untouched(rpc);
    }
    assert!(locked() == before, "{} has changed the state of the node", rpc.name);

    if rpc.name.starts_with("Node") {
        let subject = Subject::new(fixture, &format!("outside-{number}"));
        (rpc.prepare)(fixture, node, &subject);
        for path in outside.paths(fixture) {
            let outside_path = Subject { target: path.clone(), staging: path.clone(), ..subject.clone() };
            let result = (rpc.call)(node, &outside_path);
            let refused =
                [Code::InvalidArgument, Code::FailedPrecondition, Code::NotFound].contains(&code_of(&result));
            // The other calls use only the id: staging leaves nothing at its path, health is a property of the volume, and a
            // device is refreshed wherever it is published.
            let at_path =
                ["NodePublish", "NodeUnpublish", "NodeGetVolumeStats"].map(|name| rpc.name.starts_with(name));
            let at_path = at_path.contains(&true);
            assert!(refused || !at_path, "{} at {}: {result:?}", rpc.name, path.display());
            outside.assert_untouched(rpc);
        }
        clean_up(node, &subject);
    }
}
