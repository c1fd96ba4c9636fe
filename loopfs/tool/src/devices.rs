//! The commands `list`, `attach` and `detach`.

use std::fs::{File, OpenOptions};
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use loopfs::ErrorKind;
use loopfs::loop_device::{
    Access, AttachOptions, Binding, BlockSize, Detach, DeviceList, DirectIo, IndexPolicy, LoopControl,
    LoopDevice, PoolOptions, Status,
};
use serde::Serialize;

use crate::output::{Output, Side, Table, counted, object, yes_no};
use crate::size;

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// Show the loop devices that are bound to a file
    ///
    /// The command reads the state of each device from the kernel. FILE is the device and inode number of the bound file.
    /// LABEL is the name that the program which attached the device has set. A binding identifies one attachment:
    /// `loopfs detach BINDING` detaches only this attachment, even if the device is bound to another file by then.
    ///
    /// JSON: {"devices": [{index, device, size_bytes, block_size_bytes, direct_io, auto_clear, access ("rw" or "ro"),
    /// label, file: {device, inode}, offset_bytes, size_limit_bytes, disk_sequence, binding}], "idle"}
    #[command(verbatim_doc_comment)]
    List(ListDevices),
    /// Attach a file to a loop device and print the device's path
    ///
    /// The command reads the requested properties back from the kernel. If the kernel did not grant one of them, the
    /// command fails and detaches the file again. A file that already has a writable device, even of another program,
    /// gets no second one.
    ///
    /// JSON: the device, in the format of `loopfs list`.
    #[command(verbatim_doc_comment)]
    Attach(Attach),
    /// Detach a file, or one device
    ///
    /// If a device is open in a process, the kernel detaches it at its last close and the exit code is 1. Use --wait to
    /// wait for the last close, or `loopfs attach --ensure FILE` to cancel the detach.
    ///
    /// JSON: {"outcome" ("gone" or "deferred"), "detached": [binding], "deferred": [binding]}
    #[command(verbatim_doc_comment)]
    Detach(DetachArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ListDevices {
    /// Include the devices of other programs, outside the range of indices that loopfs uses
    #[arg(long)]
    all: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Attach {
    /// The file
    file: PathBuf,
    /// Attach the file read-only
    #[arg(long)]
    read_only: bool,
    /// The offset of the device in the file: a multiple of the block size
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    offset: u64,
    /// The maximum size of the device: a multiple of the block size
    #[arg(long, value_name = "SIZE", value_parser = nonzero_size)]
    size_limit: Option<NonZeroU64>,
    /// Direct I/O, which bypasses the page cache of the file
    #[arg(long, value_name = "required|preferred|off", default_value = "required", value_parser = direct_io)]
    direct_io: DirectIo,
    /// 512, 1024, 2048 or 4096; `match`: the smallest for direct I/O on the file; `kernel`: the default of the kernel
    #[arg(long, value_name = "SIZE", default_value = "512", value_parser = block_size)]
    block_size: BlockSize,
    /// The name of the device in other programs, at most 63 bytes. The default is the path of the file
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// `pool`: an idle device in the range of loopfs; `any`: a device that the kernel selects; N: /dev/loopN
    #[arg(long, value_name = "INDEX", default_value = "pool", value_parser = index)]
    index: IndexPolicy,
    /// If the file is already attached with these properties, print its device
    #[arg(long)]
    ensure: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DetachArgs {
    /// A file, a device such as /dev/loop7, or a binding in the format of `loopfs list`
    #[arg(value_name = "FILE|DEVICE|BINDING")]
    target: PathBuf,
    /// The time to wait for the last close of a device in use
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u32,
}

fn direct_io(text: &str) -> Result<DirectIo, String> {
    DirectIo::parse(text).ok_or_else(|| "write required, preferred or off".to_owned())
}

fn nonzero_size(text: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(size::parse(text)?).ok_or_else(|| "a device of 0 bytes has no content".to_owned())
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    match text {
        "match" => Ok(BlockSize::MatchDirectIo),
        "kernel" => Ok(BlockSize::KernelDefault),
        text => match size::parse(text).map(u32::try_from) {
            Ok(Ok(size @ (512 | 1024 | 2048 | 4096))) => Ok(BlockSize::Exact(size)),
            _ => Err("write 512, 1024, 2048, 4096, match or kernel".to_owned()),
        },
    }
}

fn index(text: &str) -> Result<IndexPolicy, String> {
    match text {
        "pool" => Ok(IndexPolicy::Pool),
        "any" => Ok(IndexPolicy::Any),
        text => {
            size::number(text).map(IndexPolicy::Exact).ok_or_else(|| "write pool, any or a number".to_owned())
        }
    }
}

impl DeviceCommand {
    pub(crate) fn run(&self) -> Result<Output> {
        match self {
            Self::List(command) => command.run(),
            Self::Attach(command) => command.run(),
            Self::Detach(command) => command.run(),
        }
    }
}

impl ListDevices {
    fn run(&self) -> Result<Output> {
        let control = LoopControl::open()?;
        let DeviceList { devices: mut bound, skipped, .. } = control.list()?;
        for error in skipped {
            eprintln!("loopfs: skipped a device: {error}");
        }
        let ours = PoolOptions::default().range;
        bound.retain(|status| self.all || ours.contains(&status.binding.index));
        bound.sort_by_key(|status| status.binding.index);
        let idle = control.idle();
        Ok(Output::new(listing_text(&bound, idle), &listing_json(&bound, idle))?)
    }
}

impl Attach {
    fn run(&self) -> Result<Output> {
        let file = open(&self.file)?;
        let control = LoopControl::open()?;
        let options = self.options()?;
        let device = if self.ensure {
            // The path is no request: the file may have been attached by another one.
            let is_attached = self.label.is_none() && !control.find(file.as_fd())?.is_empty();
            let options = if is_attached { options.label("") } else { options };
            control.ensure_attached(file.as_fd(), &options)
        } else {
            control.attach(file.as_fd(), &options)
        };
        let status = device.and_then(|device| device.status()).map_err(|error| {
            let remedy = match error.kind() {
                ErrorKind::AlreadyExists if !self.ensure => "; use --ensure to print the device that it has",
                ErrorKind::NotHonoured => {
                    "; request less with `--direct-io preferred` or `--block-size match`"
                }
                _ => "",
            };
            anyhow::anyhow!("attach {}: {error}{remedy}", self.file.display())
        })?;
        Ok(Output::new(node(status.binding.index), &device_json(&status))?)
    }

    fn options(&self) -> Result<AttachOptions> {
        let label = match &self.label {
            Some(label) => label.clone(),
            // Other programs use the path too. loopfs identifies the file by its inode.
            None => std::path::absolute(&self.file)
                .with_context(|| self.file.display().to_string())?
                .to_string_lossy()
                .into_owned(),
        };
        let options = AttachOptions::new(if self.read_only { Access::ReadOnly } else { Access::ReadWrite })
            .offset(self.offset)
            .direct_io(self.direct_io)
            .block_size(self.block_size)
            .label(&label)
            .index(self.index);
        Ok(match self.size_limit {
            Some(limit) => options.size_limit(limit),
            None => options,
        })
    }
}

impl DetachArgs {
    fn run(&self) -> Result<Output> {
        let shown = || format!("detach {}", self.target.display());
        let (before, outcome) = match DetachTarget::of(&self.target)? {
            DetachTarget::Device(device) => {
                let binding = device.binding().clone();
                (vec![binding], device.detach().with_context(shown)?)
            }
            DetachTarget::File(file) => {
                let control = LoopControl::open()?;
                let found = control.find(file.as_fd()).with_context(shown)?;
                let bindings: Vec<Binding> = found.iter().map(|device| device.binding().clone()).collect();
                // While they are open here, they count as in use.
                drop(found);
                anyhow::ensure!(!bindings.is_empty(), "{}: the file is attached to no loop device", shown());
                (bindings, control.detach_all(file.as_fd()).with_context(shown)?)
            }
        };
        let outcome = match outcome {
            Detach::Deferred(pending) if self.wait > 0 => {
                pending.wait(Duration::from_secs(self.wait.into())).with_context(shown)?
            }
            outcome => outcome,
        };
        let deferred = match outcome {
            Detach::Detached => Vec::new(),
            Detach::Deferred(pending) => pending.bindings().to_vec(),
        };
        let (deferred, detached): (Vec<_>, Vec<_>) =
            before.into_iter().partition(|binding| deferred.contains(binding));
        let (text, json) = (detached_text(&detached, &deferred), detached_json(&detached, &deferred));
        Ok(Output::new(text, &json)?.good(deferred.is_empty()))
    }
}

enum DetachTarget {
    Device(LoopDevice),
    File(File),
}

impl DetachTarget {
    fn of(target: &Path) -> Result<Self> {
        if let Some(binding) = target.to_str().and_then(|text| text.parse::<Binding>().ok()) {
            return Ok(Self::Device(LoopDevice::open_binding(&binding)?));
        }
        let kind =
            std::fs::metadata(target).with_context(|| format!("stat {}", target.display()))?.file_type();
        if kind.is_block_device() {
            return Ok(Self::Device(LoopDevice::open_path(target)?));
        }
        anyhow::ensure!(
            kind.is_file(),
            "{} is neither a file nor a loop device nor a binding",
            target.display()
        );
        open(target).map(Self::File)
    }
}

/// Opens a file for reading. If it were open for writing, the library would have to search all devices for it.
/// `O_NONBLOCK` prevents that a FIFO given by mistake blocks the command.
fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.with_context(|| format!("open {}", path.display()))
}

fn node(index: u32) -> String {
    format!("/dev/loop{index}")
}

fn listing_json(devices: &[Status], idle: usize) -> impl Serialize {
    object! { devices: devices.iter().map(device_json).collect::<Vec<_>>(), idle: idle }
}

fn device_json(status: &Status) -> impl Serialize {
    let Binding { index, disk_sequence, backing, range, access: _ } = &status.binding;
    object! {
        index: index,
        device: node(*index),
        size_bytes: status.size.0,
        block_size_bytes: status.block_size,
        direct_io: status.direct_io,
        auto_clear: status.auto_clear,
        access: access(status),
        label: &status.label,
        file: object! { device: backing.device.to_string(), inode: backing.inode },
        offset_bytes: range.offset,
        size_limit_bytes: range.size_limit,
        disk_sequence: disk_sequence,
        binding: status.binding.to_string(),
    }
}

fn access(status: &Status) -> &'static str {
    match status.binding.access {
        Access::ReadWrite => "rw",
        Access::ReadOnly => "ro",
    }
}

fn listing_text(devices: &[Status], idle: usize) -> String {
    let mut table = Table::new([
        ("DEVICE", Side::Left),
        ("SIZE", Side::Right),
        ("BLOCK", Side::Right),
        ("DIRECT-IO", Side::Left),
        ("ACCESS", Side::Left),
        ("AUTO-CLEAR", Side::Left),
        ("FILE", Side::Left),
        ("LABEL", Side::Left),
        ("BINDING", Side::Left),
    ]);
    for status in devices {
        let binding = &status.binding;
        table.row([
            node(binding.index),
            size::show(status.size.0),
            status.block_size.to_string(),
            yes_no(status.direct_io),
            access(status).to_owned(),
            yes_no(status.auto_clear),
            format!("{}/{}", binding.backing.device, binding.backing.inode),
            status.label.clone(),
            binding.to_string(),
        ]);
    }
    let (bound, idle) = (counted(devices.len(), "device"), counted(idle, "idle device"));
    format!("{}{bound}, and {idle} in the pool of loopfs\n", table.print())
}

fn detached_text(detached: &[Binding], deferred: &[Binding]) -> String {
    let mut text = String::new();
    for binding in detached {
        text.push_str(&format!("{} is detached\n", node(binding.index)));
    }
    for binding in deferred {
        text.push_str(&format!(
            "{} is in use, and the kernel detaches it at its last close: wait for that with --wait SECONDS, or cancel the \
             detach with `loopfs attach --ensure FILE`\n",
            node(binding.index)
        ));
    }
    text
}

fn detached_json(detached: &[Binding], deferred: &[Binding]) -> impl Serialize {
    let texts = |bindings: &[Binding]| bindings.iter().map(ToString::to_string).collect::<Vec<_>>();
    object! {
        outcome: if deferred.is_empty() { "gone" } else { "deferred" },
        detached: texts(detached),
        deferred: texts(deferred),
    }
}

#[cfg(test)]
mod tests {
    use loopfs::Bytes;
    use rstest::rstest;

    use super::*;

    fn status(index: u32) -> Status {
        let binding = format!("loop{index} seq=9 dev=254:0 ino=133 offset=0 limit=0 rw").parse().unwrap();
        Status {
            binding,
            size: Bytes(64 << 20),
            block_size: 512,
            direct_io: true,
            auto_clear: false,
            partition_scan: false,
            label: String::new(),
        }
    }

    #[test]
    fn list_prints_devices_as_a_table() {
        let labelled = Status { label: "/srv/a\n.img".to_owned(), size: Bytes(1_234_567), ..status(65_537) };
        assert_eq!(
            listing_text(&[status(7), labelled], 3),
            "\
DEVICE            SIZE  BLOCK  DIRECT-IO  ACCESS  AUTO-CLEAR  FILE       LABEL         BINDING
/dev/loop7       64MiB    512  yes        rw      no          254:0/133  -             loop7 seq=9 dev=254:0 ino=133 offset=0 limit=0 rw
/dev/loop65537  1.2MiB    512  yes        rw      no          254:0/133  /srv/a\\n.img  loop65537 seq=9 dev=254:0 ino=133 offset=0 limit=0 rw
2 devices, and 3 idle devices in the pool of loopfs
"
        );
    }

    #[rstest]
    #[case("512", Some(BlockSize::Exact(512)))]
    #[case("4KiB", Some(BlockSize::Exact(4096)))]
    #[case("match", Some(BlockSize::MatchDirectIo))]
    #[case("kernel", Some(BlockSize::KernelDefault))]
    #[case("1000", None)]
    #[case("8192", None)]
    #[case("", None)]
    fn block_sizes_are_parsed_or_rejected(#[case] text: &str, #[case] expected: Option<BlockSize>) {
        assert_eq!(block_size(text).ok(), expected);
    }

    #[rstest]
    #[case("pool", Some(IndexPolicy::Pool))]
    #[case("any", Some(IndexPolicy::Any))]
    #[case("7", Some(IndexPolicy::Exact(7)))]
    #[case("+7", None)]
    #[case("loop7", None)]
    #[case("4294967296", None)]
    #[case("", None)]
    fn indices_are_parsed_or_rejected(#[case] text: &str, #[case] expected: Option<IndexPolicy>) {
        assert_eq!(index(text).ok(), expected);
    }
}
