//! The kernel's log, `/dev/kmsg` (<https://docs.kernel.org/admin-guide/abi-testing.html#abi-file-testing-dev-kmsg>).

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context;
use jiff::{SignedDuration, Timestamp};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};

use super::file::CHUNK_BYTES;

const DEVICE: &str = "/dev/kmsg";

/// The kernel returns one record in each read, and none is longer.
const MAX_RECORD_BYTES: usize = 8 << 10;

/// The position in the kernel's log, which begins with the oldest record that the kernel has.
#[derive(Debug, Default)]
pub(super) struct KernelReader {
    device: Option<File>,
    /// The sequence number of the next record.
    expected: Option<u64>,
}

/// A record of the kernel's log.
#[derive(Debug, PartialEq, Eq)]
struct Record<'a> {
    level: &'static str,
    sequence: u64,
    since_boot: SignedDuration,
    text: &'a [u8],
}

impl KernelReader {
    /// Returns the records after the position, one on each line; nothing at the end of the log.
    pub(super) fn next(&mut self) -> anyhow::Result<Vec<u8>> {
        let context = || format!("read {DEVICE}; it needs root or CAP_SYSLOG");
        let device = match &mut self.device {
            Some(device) => device,
            none => {
                let device =
                    OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(DEVICE);
                none.insert(device.with_context(context)?)
            }
        };
        let mut content = Vec::new();
        let mut record = [0; MAX_RECORD_BYTES];
        while content.len() < CHUNK_BYTES {
            let length = match device.read(&mut record) {
                // The node is that of another device, such as /dev/null.
                Ok(0) => break,
                Ok(length) => length,
                // The kernel has overwritten records that were not read. The next read returns the oldest that it still
                // has, whose sequence number says how many were lost.
                Err(error) if error.raw_os_error() == Some(Errno::EPIPE as i32) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).with_context(context),
            };
            let Some(record) = parse(&record[..length]) else { continue };
            let time = time(record.since_boot, Timestamp::now())?;
            if let Some(lost) = lost(self.expected, record.sequence) {
                content.extend(
                    format!("[node-debug: the kernel has overwritten {lost} records here]\n").bytes(),
                );
            }
            self.expected = Some(record.sequence + 1);
            content.extend(format!("{time:.3} {:<5} ", record.level).bytes());
            content.extend(record.text);
            content.push(b'\n');
        }
        Ok(content)
    }
}

fn lost(expected: Option<u64>, sequence: u64) -> Option<u64> {
    expected.and_then(|expected| sequence.checked_sub(expected)).filter(|lost| *lost > 0)
}

/// Converts the time of a record. The kernel's log counts as CLOCK_MONOTONIC does, which stands still while the machine
/// sleeps.
fn time(since_boot: SignedDuration, now: Timestamp) -> anyhow::Result<Timestamp> {
    let clock = clock_gettime(ClockId::CLOCK_MONOTONIC).context("read CLOCK_MONOTONIC")?;
    let uptime = SignedDuration::new(clock.tv_sec(), i32::try_from(clock.tv_nsec())?);
    Ok(now.checked_sub(uptime - since_boot.min(uptime))?)
}

/// Parses `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,..];TEXT\n KEY=VALUE\n`.
fn parse(record: &[u8]) -> Option<Record<'_>> {
    let semicolon = record.iter().position(|byte| *byte == b';')?;
    let mut fields = std::str::from_utf8(&record[..semicolon]).ok()?.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let sequence = fields.next()?.parse().ok()?;
    let since_boot = SignedDuration::from_micros(fields.next()?.parse().ok()?);
    let text = record[semicolon + 1..].split(|byte| *byte == b'\n').next().unwrap_or_default();
    // The lower three bits are the level of syslog(3), the others the facility.
    let level = match priority & 7 {
        0..=3 => "ERROR",
        4 => "WARN",
        5 | 6 => "INFO",
        _ => "DEBUG",
    };
    Some(Record { level, sequence, since_boot, text })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::emergency(0, "ERROR")]
    #[case::warning(4, "WARN")]
    #[case::notice(5, "INFO")]
    #[case::debug(7, "DEBUG")]
    #[case::user_facility(8 + 3, "ERROR")]
    fn record_fields_are_parsed(#[case] priority: u32, #[case] level: &'static str) {
        let record = format!("{priority},339,5140900,-,caller=T1;XFS (vdb): a;b\n SUBSYSTEM=block\n");
        let since_boot = SignedDuration::from_micros(5_140_900);
        let expected = Record { level, sequence: 339, since_boot, text: b"XFS (vdb): a;b" };
        assert_eq!(parse(record.as_bytes()), Some(expected));
    }

    #[rstest]
    #[case::first(None, 9, None)]
    #[case::next(Some(9), 9, None)]
    #[case::gap(Some(9), 12, Some(3))]
    #[case::restarted(Some(9), 2, None)]
    fn sequence_gap_counts_lost_records(
        #[case] expected: Option<u64>,
        #[case] sequence: u64,
        #[case] count: Option<u64>,
    ) {
        assert_eq!(lost(expected, sequence), count);
    }

    /// The time is counted from the boot of the machine.
    #[test]
    fn record_time_is_never_in_future() {
        let now = Timestamp::now();
        let boot = time(SignedDuration::ZERO, now).unwrap();
        assert!(boot < now);
        assert_eq!(time(SignedDuration::from_secs(1), now).unwrap().as_second(), boot.as_second() + 1);
        assert_eq!(time(SignedDuration::MAX, now).unwrap(), now);
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_never_panics(record in "[0-9,;a\n-]{0,40}") {
            parse(record.as_bytes());
        }
    }
}
