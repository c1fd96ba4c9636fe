//! The state of the node for a bug report, as text files.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::Context;
use loopfs::loop_device::unmanaged;
use loopfs::project_quota::{ProjectId, ProjectQuota};

/// All projects that can have a quota.
const FIRST_PROJECT: ProjectId = ProjectId::new(1).unwrap();
const LAST_PROJECT: ProjectId = ProjectId::new(u32::MAX - 1).unwrap();

/// A file of the report.
#[derive(Debug)]
pub(crate) struct StateFile {
    pub(crate) name: &'static str,
    pub(crate) content: Vec<u8>,
}

/// Reads the state. A part that cannot be read has the reason as its content, so that the others are still returned.
pub(crate) fn read(data_dir: Option<&Path>) -> Vec<StateFile> {
    let parts: [(&'static str, anyhow::Result<Vec<u8>>); 4] = [
        ("versions.txt", Ok(versions().into_bytes())),
        ("mountinfo.txt", fs::read("/proc/self/mountinfo").context("read /proc/self/mountinfo")),
        ("loop-devices.txt", loop_devices().map(String::into_bytes)),
        ("quotas.txt", quotas(data_dir).map(String::into_bytes)),
    ];
    let file = |(name, content): (_, anyhow::Result<Vec<u8>>)| {
        let content = content.unwrap_or_else(|error| format!("could not be read: {error:#}\n").into_bytes());
        StateFile { name, content }
    };
    parts.into_iter().map(file).collect()
}

fn versions() -> String {
    let mut text = format!("node-debug {}\n", env!("CARGO_PKG_VERSION"));
    for path in ["/proc/version", "/etc/os-release", "/proc/uptime", "/proc/loadavg", "/proc/meminfo"] {
        match fs::read_to_string(path) {
            Ok(content) => text += &format!("\n# {path}\n{content}"),
            Err(error) => text += &format!("\n# {path}: {error}\n"),
        }
    }
    text
}

fn loop_devices() -> anyhow::Result<String> {
    let mut text = "# device, backing file, offset, size limit, flags\n".to_owned();
    for index in unmanaged::bound_indices()? {
        let device = unmanaged::attributes(index);
        // A device that was detached since it was listed.
        let Some(path) = &device.backing_path else { continue };
        let flags = [
            ("read-only", device.read_only),
            ("direct-io", device.direct_io),
            ("autoclear", device.auto_clear),
            ("partition-scan", device.partition_scan),
        ];
        let flags: Vec<&str> =
            flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect();
        writeln!(
            text,
            "/dev/loop{index}\t{path:?}\t{}\t{}\t{}",
            device.offset.unwrap_or(0),
            device.size_limit.unwrap_or(0),
            flags.join(",")
        )?;
    }
    Ok(text)
}

fn quotas(data_dir: Option<&Path>) -> anyhow::Result<String> {
    let data_dir = data_dir.context("node-debug was started without --data-dir")?;
    let directory = File::open(data_dir).with_context(|| format!("open {}", data_dir.display()))?;
    let quota = ProjectQuota::of(directory.as_fd());
    let mut text =
        format!("# {}: {:?}\n# project, usage and limits\n", data_dir.display(), quota.enforcement()?);
    for usage in quota.ids(FIRST_PROJECT..=LAST_PROJECT) {
        writeln!(text, "{:?}", usage?)?;
    }
    Ok(text)
}
