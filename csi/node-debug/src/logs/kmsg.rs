//! The kernel's log, `/dev/kmsg` (<https://docs.kernel.org/admin-guide/abi-testing.html#abi-file-testing-dev-kmsg>).

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context;
use jiff::{SignedDuration, Timestamp};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};
use tokio::io::Interest;

use super::line::RawLine;
use super::ring::Ring;
use crate::proto::Level;

const DEVICE: &str = "/dev/kmsg";

/// The kernel returns one record in each read, and none is longer.
const MAX_RECORD_BYTES: usize = 8 << 10;

/// A record of the kernel's log.
#[derive(Debug, PartialEq, Eq)]
struct KmsgRecord<'a> {
    level: Level,
    sequence: u64,
    since_boot: SignedDuration,
    text: &'a [u8],
}

/// Appends the records to `ring`: those that the kernel has, and all later ones.
pub(super) async fn follow(ring: &Ring) -> anyhow::Result<()> {
    let context = || format!("read {DEVICE}; it needs root or CAP_SYSLOG");
    let device = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(DEVICE);
    let device = csi::async_fd::register(device.with_context(context)?.into(), Interest::READABLE)
        .with_context(|| format!("watch {DEVICE}"))?;
    let mut record = vec![0; MAX_RECORD_BYTES];
    let mut expected = None;
    loop {
        let mut ready = device.readable().await?;
        match ready.try_io(|device| Ok(nix::unistd::read(device.get_ref(), &mut record)?)) {
            Ok(Ok(length)) => {
                let Some(record) = parse(&record[..length]) else { continue };
                let now = Timestamp::now();
                if let Some(lost) = lost(expected, record.sequence) {
                    ring.push_lost(lost, now);
                }
                expected = Some(record.sequence + 1);
                let line = RawLine { text: record.text.to_vec(), cut_bytes: 0 };
                ring.push_classified(line, time(record.since_boot, now)?, Some(record.level));
            }
            // The kernel has overwritten records that were not read. The next read returns the oldest that it still
            // has, whose sequence number says how many were lost.
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::EPIPE as i32) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error).with_context(context),
            Err(_would_block) => {}
        }
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
fn parse(record: &[u8]) -> Option<KmsgRecord<'_>> {
    let semicolon = record.iter().position(|byte| *byte == b';')?;
    let mut fields = std::str::from_utf8(&record[..semicolon]).ok()?.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let sequence = fields.next()?.parse().ok()?;
    let since_boot = SignedDuration::from_micros(fields.next()?.parse().ok()?);
    let text = record[semicolon + 1..].split(|byte| *byte == b'\n').next().unwrap_or_default();
    // The lower three bits are the level of syslog(3), the others the facility.
    let level = match priority & 7 {
        0..=3 => Level::Error,
        4 => Level::Warn,
        5 | 6 => Level::Info,
        _ => Level::Debug,
    };
    Some(KmsgRecord { level, sequence, since_boot, text })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::emergency(0, Level::Error)]
    #[case::warning(4, Level::Warn)]
    #[case::notice(5, Level::Info)]
    #[case::debug(7, Level::Debug)]
    #[case::user_facility(8 + 3, Level::Error)]
    fn record_fields_are_parsed(#[case] priority: u32, #[case] level: Level) {
        let record = format!("{priority},339,5140900,-,caller=T1;XFS (vdb): a;b\n SUBSYSTEM=block\n");
        let since_boot = SignedDuration::from_micros(5_140_900);
        let expected = KmsgRecord { level, sequence: 339, since_boot, text: b"XFS (vdb): a;b" };
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
