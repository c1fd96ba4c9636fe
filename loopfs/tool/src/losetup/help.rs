//! The help of losetup.

use std::fmt::Write;

use super::columns::COLUMNS;
use super::options::{OPTIONS, Opt, Value};

const USAGE: &str = "\
Set up and control loop devices, with the options, output and exit codes of losetup(8) of util-linux 2.41.

Usage:
  losetup [-l] [-a | DEVICE]               list the bound devices, or one
  losetup -j FILE [-o OFFSET]              list the devices of a file
  losetup -f                               print the first unbound device
  losetup [OPTION...] -f | DEVICE FILE     bind a file, to the first unbound device or to the given one
  losetup -d DEVICE... | -D                detach devices
  losetup -c DEVICE                        set the capacity of a device after its file has grown

Options:
";

const NOTES: &str = "
SIZE is a number of bytes, or a number with K, M, G, T, P, E (or KiB, ...: powers of 1024) or KB, MB, ... (powers of
1000). DEVICE is a path, or a name in /dev. Long options can be shortened as long as they are unique.

Exit codes: 0 success, 1 failure with the cause on standard error. Binding a file needs Linux 5.8.

-j asks the kernel only for devices that were bound since the last call. It stores what it knows in
/run/loopfs/attachments, which can be deleted at any time.

`loopfs attach` and `loopfs detach` bind a file once only, and check that the kernel grants what was requested.

Examples:
  losetup -f --show disk.img               # prints /dev/loop0
  losetup -j disk.img                      # /dev/loop0: [65024]:131 (/srv/disk.img)
  losetup -f -P --direct-io=on disk.img    # with partitions, without the page cache
  losetup -l -O NAME,BACK-FILE --json
  losetup -d /dev/loop0
";

fn names(option: &Opt) -> String {
    let short = option.short.map_or("    ".to_owned(), |letter| format!("-{letter}, "));
    let value = match option.value {
        Value::Optional => format!("[={}]", option.metavariable),
        _ if option.metavariable.is_empty() => String::new(),
        _ => format!(" {}", option.metavariable),
    };
    format!("{short}--{}{value}", option.long)
}

/// Returns the text of `--help`.
pub(crate) fn text() -> String {
    let mut text = USAGE.to_owned();
    // Writing to a string cannot fail.
    for option in OPTIONS {
        writeln!(text, "  {:<30} {}", names(option), option.help).ok();
    }
    text.push_str("\nColumns of -O, and of --output-all in this order:\n");
    for column in &COLUMNS {
        writeln!(text, "  {:<14} {}", column.title, column.help).ok();
    }
    text + NOTES
}

/// Returns the text of `--version`.
pub(crate) fn version() -> String {
    format!("losetup from loopfs {} (compatible with util-linux 2.41)\n", env!("CARGO_PKG_VERSION"))
}
