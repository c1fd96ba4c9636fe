//! The judgement of the data directory.

use std::path::Path;

use loopfs::{Bytes, ErrorKind};

use super::check::{Check, Status};
use super::facts::{DataDir, DataFilesystemFacts, QuotaRecords};
use crate::data_disk::feature_problems;
use crate::shell::quoted;

const DIRECTORY: &str = "data-dir";
const OPTIONS: &str = "data-dir-options";
const QUOTA: &str = "data-dir-quota";
const FEATURES: &str = "data-dir-features";
const SPACE: &str = "data-dir-space";

/// The share of the file system that should be available, as a divisor: 5 %.
const AVAILABLE_SHARE: u64 = 20;

/// The blocks of quota records that an id in use may take, before a check warns. An id alone in its block takes one.
pub(super) const BLOCKS_OF_AN_ID: u64 = 4;
/// The blocks of quota records that no check warns about: those of some ten thousand earlier volumes.
const FEW_BLOCKS: u64 = 1024;

/// Directories that hold the files of other programs. The chart of the CSI driver refuses them too.
const SHARED: [&str; 20] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/opt", "/proc", "/root", "/run",
    "/sbin", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/log", "/var/run",
];

/// `kubelet_dir` is the kubelet's directory, if it was given.
pub(super) fn judge(directory: Option<&DataDir>, kubelet_dir: Option<&Path>) -> Vec<Check> {
    const ALL: [&str; 5] = [DIRECTORY, OPTIONS, QUOTA, FEATURES, SPACE];
    let Some(directory) = directory else {
        return ALL.map(|id| Check::not_checked(id, "no data directory was given (--data-dir)")).into();
    };
    let mut checks = vec![verified(directory, kubelet_dir)];
    match &directory.filesystem {
        Some(filesystem) => {
            checks.extend([options(filesystem), quota(filesystem), features(filesystem), space(filesystem)]);
        }
        None => {
            let reason =
                format!("{} is not the mount of an XFS that this process can open", directory.path.display());
            checks.extend(ALL[1..].iter().map(|id| Check::not_checked(id, reason.clone())));
        }
    }
    checks
}

/// Judges the result of the checks that the store makes at its start.
fn verified(directory: &DataDir, kubelet_dir: Option<&Path>) -> Check {
    match &directory.verified {
        Ok(()) => mounted(&directory.path, kubelet_dir),
        // The check of the quota reports it.
        Err(failure) if failure.kind == ErrorKind::NotEnforced && directory.filesystem.is_some() => {
            mounted(&directory.path, kubelet_dir)
        }
        Err(failure) if failure.is_denied() => {
            Check::not_checked(DIRECTORY, &failure.message).with_remedy("check as root")
        }
        Err(failure) => Check::missing(DIRECTORY, &failure.message, remedy(directory, failure.kind)),
    }
}

/// Judges the parent of the mount point, which the pods of the CSI driver mount from the host.
fn mounted(path: &Path, kubelet_dir: Option<&Path>) -> Check {
    let found = format!("an XFS is mounted at {}", path.display());
    let holds_others = |parent: &&Path| {
        SHARED.iter().any(|shared| *parent == Path::new(shared))
            || kubelet_dir.is_some_and(|kubelet| kubelet.starts_with(parent))
    };
    match path.parent().filter(holds_others) {
        None => Check::ok(DIRECTORY, found),
        Some(parent) => Check::warning(
            DIRECTORY,
            format!(
                "{found}; pods of the driver mount all of {}, with the files of other programs",
                parent.display()
            ),
            "mount the disk in a directory that holds nothing else, such as /var/lib/loopfs/data; services of the host do not need that",
        ),
    }
}

fn remedy(directory: &DataDir, kind: ErrorKind) -> String {
    let path = quoted(&directory.path);
    let mount = format!("`loopfs data-dir mount UUID=... {path}`");
    match kind {
        ErrorKind::NeverMounted if directory.occupied => format!(
            "give an empty directory, such as /var/lib/loopfs/data: a disk that is mounted at {path} would hide the files there"
        ),
        // A machine that was installed again has no record of its data disk, either.
        ErrorKind::NeverMounted => format!(
            "if a disk has volumes already, mount it with {mount}; otherwise, format an empty disk with `loopfs data-dir format \
             DEVICE --yes-format-this-disk`, and mount it so"
        ),
        ErrorKind::NotMounted => format!("mount the disk of the volumes with {mount}"),
        ErrorKind::WrongFilesystem => format!(
            "give the mount point of the disk for volumes, which may hold nothing else; if {path} is to be that, unmount it and \
             mount the disk there with {mount}"
        ),
        ErrorKind::InvalidInput => {
            "give the path of a directory below /, without symbolic links at its end, at which a disk for volumes is mounted"
                .to_owned()
        }
        _ => format!(
            "look at the directory with `loopfs data-dir check {path}`, and for I/O errors in the kernel log"
        ),
    }
}

fn options(filesystem: &DataFilesystemFacts) -> Check {
    let mount = &filesystem.mount;
    if let Some(problem) = mount.read_only_problem(&filesystem.device) {
        return Check::problem(OPTIONS, Status::Missing, problem);
    }
    match mount.flags_problem() {
        Some(problem) => Check::problem(OPTIONS, Status::Warning, problem),
        None => Check::ok(OPTIONS, mount.options.join(",")),
    }
}

fn quota(filesystem: &DataFilesystemFacts) -> Check {
    if let Some(problem) = filesystem.mount.quota_problem(&filesystem.device) {
        return Check::problem(QUOTA, Status::Missing, problem);
    }
    match filesystem.quota_records {
        Some(QuotaRecords { blocks, ids })
            if blocks > FEW_BLOCKS.max(ids.saturating_mul(BLOCKS_OF_AN_ID)) =>
        {
            Check::warning(
                QUOTA,
                format!(
                    "the quota records of projects take {blocks} blocks, and {ids} project ids are in use; XFS never frees such \
                     a block, and each count of the reservations reads all of them"
                ),
                "if the number grows, look for the owner of files with many different project ids, by `loopfs quota list` and \
                 `loopfs quota check`; to be rid of the records, move the volumes to a disk that was formatted again",
            )
        }
        _ => Check::ok(QUOTA, "the kernel counts the usage of projects and enforces their limits"),
    }
}

fn features(filesystem: &DataFilesystemFacts) -> Check {
    let problems = feature_problems(filesystem.features);
    let found: Vec<_> = problems.iter().map(|problem| problem.problem.as_str()).collect();
    match problems.first() {
        Some(first) => Check::warning(FEATURES, found.join("; "), first.remedy.clone()),
        None => Check::ok(FEATURES, "reflink, ftype and checksums"),
    }
}

fn space(filesystem: &DataFilesystemFacts) -> Check {
    let DataFilesystemFacts { size, available, .. } = filesystem;
    let found = format!("{} MiB of {} MiB are available", available.0 / Bytes::MIB.0, size.0 / Bytes::MIB.0);
    if available.0 < size.0 / AVAILABLE_SHARE {
        return Check::warning(SPACE, found, "enlarge the disk, or delete volumes");
    }
    Check::ok(SPACE, found)
}

#[cfg(test)]
mod tests {
    use loopfs::project_quota::Enforcement;
    use rstest::rstest;

    use super::*;
    use crate::preflight::facts::Failure;
    use crate::preflight::facts::tests::data_dir;
    use crate::preflight::tests::assert_check;

    fn filesystem(directory: &mut DataDir) -> &mut DataFilesystemFacts {
        directory.filesystem.as_mut().unwrap()
    }

    fn failed(kind: ErrorKind) -> Result<(), Failure> {
        Err(Failure { kind, message: "open the data directory".to_owned() })
    }

    fn fail(directory: &mut DataDir, kind: ErrorKind) {
        directory.verified = failed(kind);
        directory.filesystem = None;
    }

    /// The kernel tests have further facts.
    #[rstest]
    #[case::occupied(DIRECTORY, |d: &mut DataDir| {
        d.occupied = true;
        fail(d, ErrorKind::NeverMounted);
    }, Status::Missing, "give an empty directory")]
    #[case::reinstalled(DIRECTORY, |d: &mut DataDir| fail(d, ErrorKind::NeverMounted), Status::Missing, "loopfs data-dir format")]
    #[case::not_mounted(DIRECTORY, |d: &mut DataDir| fail(d, ErrorKind::NotMounted), Status::Missing, "loopfs data-dir mount UUID=... /loopfs/data")]
    #[case::other(DIRECTORY, |d: &mut DataDir| fail(d, ErrorKind::WrongFilesystem), Status::Missing, "give the mount point of the disk for volumes")]
    #[case::root(DIRECTORY, |d: &mut DataDir| fail(d, ErrorKind::InvalidInput), Status::Missing, "directory below /")]
    #[case::space(DIRECTORY, |d: &mut DataDir| {
        d.path = "/mnt/a b".into();
        fail(d, ErrorKind::NotMounted);
    }, Status::Missing, "UUID=... '/mnt/a b'`")]
    #[case::space_in_the_mount_point(OPTIONS, |d: &mut DataDir| {
        filesystem(d).mount.directory = "/mnt/a b".into();
        filesystem(d).mount.options.retain(|o| o != "nodev");
    }, Status::Warning, "noexec '/mnt/a b'`")]
    #[case::shut_down(DIRECTORY, |d: &mut DataDir| fail(d, ErrorKind::ShutDown), Status::Missing, "kernel log")]
    #[case::denied(DIRECTORY, |d: &mut DataDir| d.verified = failed(ErrorKind::PermissionDenied), Status::NotChecked, "root")]
    #[case::in_var(DIRECTORY, |d: &mut DataDir| d.path = "/var/loopfs".into(), Status::Warning, "/var/lib/loopfs/data")]
    #[case::beside_the_kubelet(DIRECTORY, |d: &mut DataDir| d.path = "/mnt/loopfs".into(), Status::Warning, "holds nothing else")]
    #[case::in_the_kubelets_directory(DIRECTORY, |d: &mut DataDir| d.path = "/mnt/kubelet/data".into(), Status::Warning, "holds nothing else")]
    #[case::below_the_kubelets_directory(DIRECTORY, |d: &mut DataDir| d.path = "/mnt/kubelet/loopfs/data".into(), Status::Ok, "")]
    #[case::only_quota_off(DIRECTORY, |d: &mut DataDir| d.verified = failed(ErrorKind::NotEnforced), Status::Ok, "")]
    #[case::many_records(QUOTA, |d: &mut DataDir| filesystem(d).quota_records = Some(QuotaRecords { blocks: 2000, ids: 499 }), Status::Warning, "loopfs quota list")]
    #[case::many_ids(QUOTA, |d: &mut DataDir| filesystem(d).quota_records = Some(QuotaRecords { blocks: 2000, ids: 500 }), Status::Ok, "")]
    #[case::few_records(QUOTA, |d: &mut DataDir| filesystem(d).quota_records = Some(QuotaRecords { blocks: 1024, ids: 0 }), Status::Ok, "")]
    #[case::unreadable_records(QUOTA, |d: &mut DataDir| filesystem(d).quota_records = None, Status::Ok, "")]
    #[case::counted(QUOTA, |d: &mut DataDir| filesystem(d).mount.quota = Some(Enforcement::AccountingOnly), Status::Missing, "pqnoenforce")]
    #[case::read_only(OPTIONS, |d: &mut DataDir| filesystem(d).mount.options.push("ro".into()), Status::Missing, "kernel log")]
    #[case::no_reflink(FEATURES, |d: &mut DataDir| filesystem(d).features.reflink = false, Status::Warning, "loopfs data-dir format")]
    #[case::nearly_full(SPACE, |d: &mut DataDir| filesystem(d).available = Bytes(1 << 30), Status::Warning, "enlarge the disk")]
    #[case::enough(SPACE, |d: &mut DataDir| filesystem(d).available = Bytes(5 << 30), Status::Ok, "")]
    fn each_fact_decides_its_status(
        #[case] id: &str,
        #[case] change: fn(&mut DataDir),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut directory = data_dir();
        change(&mut directory);
        assert_check(&judge(Some(&directory), Some(Path::new("/mnt/kubelet"))), id, status, remedy);
    }
}
