//! Data that a volume must preserve: `write-pattern` writes it, and `verify-pattern` checks that it is unchanged.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::pattern::Pattern;
use crate::volume::{Checked, Volume, named, parse_volume, parse_volumes};

/// The size of the file in a Filesystem volume. A block volume is filled completely.
const FILE_SIZE: u64 = 64 * 1024;

/// Writes the pattern of each volume. Returns when the data survives a power cut, unless `--unsynced` is given.
pub(crate) fn write_all(words: &[&str]) -> Checked {
    let (synced, words) = match words {
        ["--unsynced", words @ ..] => (false, words),
        words => (true, words),
    };
    for volume in parse_volumes(words)? {
        let path = volume.path();
        write(&volume, synced).map_err(|reason| format!("{}: {reason}", path.display()))?;
    }
    Ok(())
}

/// Writes the pattern of each volume without fsync(2), and returns the open files.
pub(crate) fn write_and_keep_open(words: &[&str]) -> Checked<Vec<File>> {
    words.iter().map(|word| write(&parse_volume(word)?, false)).collect()
}

/// Checks all volumes, and returns one error that names each volume with other data.
pub(crate) fn verify_all(words: &[&str]) -> Checked {
    let complaints: Vec<String> = parse_volumes(words)?
        .iter()
        .filter_map(|volume| {
            let reason = compare(volume).err()?;
            Some(format!("what is in {} is not what was written: {reason}", volume.path().display()))
        })
        .collect();
    if complaints.is_empty() { Ok(()) } else { Err(complaints.join("; ").into()) }
}

fn write(volume: &Volume, synced: bool) -> Checked<File> {
    let pattern = pattern(volume);
    let (mut file, size) = match volume {
        Volume::Block(device) => {
            let mut device =
                OpenOptions::new().read(true).write(true).open(device).map_err(|e| named("open", e))?;
            let size = device.seek(SeekFrom::End(0))?;
            device.seek(SeekFrom::Start(0))?;
            (device, size)
        }
        Volume::Writable(directory) | Volume::Readonly(directory) => {
            let file = file_in(directory);
            fs::create_dir_all(file.parent().unwrap_or(directory))
                .map_err(|e| named("create a directory", e))?;
            (File::create(&file).map_err(|e| named("create a file", e))?, FILE_SIZE)
        }
    };
    file.write_all(&pattern.bytes(0..size)).map_err(|e| named("write", e))?;
    if synced {
        file.sync_all().map_err(|e| named("sync", e))?;
        if let Volume::Writable(directory) | Volume::Readonly(directory) = volume {
            for named_in in file_in(directory).ancestors().skip(1).take(2) {
                File::open(named_in)?.sync_all().map_err(|e| named("sync a directory", e))?;
            }
        }
    }
    Ok(file)
}

fn compare(volume: &Volume) -> Checked {
    let (path, size) = match volume {
        Volume::Block(device) => (device.clone(), None),
        Volume::Writable(directory) | Volume::Readonly(directory) => (file_in(directory), Some(FILE_SIZE)),
    };
    let mut file = File::open(&path).map_err(|e| named(&format!("open {}", path.display()), e))?;
    let found = file.seek(SeekFrom::End(0))?;
    if let Some(size) = size.filter(|size| *size != found) {
        return Err(format!("{found} bytes of {size}").into());
    }
    pattern(volume).check(&mut file, 0..found)
}

fn file_in(directory: &Path) -> PathBuf {
    directory.join("kept").join("data")
}

/// Returns the pattern of a volume. It depends on the path, so that a volume at another path is detected.
fn pattern(volume: &Volume) -> Pattern {
    Pattern::of(&volume.path().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Intact data passes.
    #[test]
    fn damaged_or_swapped_volumes_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::write(path("device"), vec![0; 8192]).unwrap();
        let words = [("writable", "a"), ("writable", "b"), ("block", "device")]
            .map(|(kind, name)| format!("{kind}:{}", path(name).display()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let reason = verify_all(&words).unwrap_err().to_string();
        assert_eq!(reason.matches("what is in ").count(), 3, "{reason}");

        write_all(&words).unwrap();
        verify_all(&words).unwrap();
        let mut device = fs::read(path("device")).unwrap();
        device[8191] ^= 1;
        fs::write(path("device"), device).unwrap();
        let reason = verify_all(&words).unwrap_err().to_string();
        assert!(reason.contains("device") && !reason.contains("/a"), "{reason}");

        write_all(&words).unwrap();
        fs::rename(path("a"), path("c")).unwrap();
        fs::rename(path("b"), path("a")).unwrap();
        fs::rename(path("c"), path("b")).unwrap();
        let reason = verify_all(&words).unwrap_err().to_string();
        assert_eq!(reason.matches("what is in ").count(), 2, "{reason}");
        assert!(write_all(&[]).is_err() && verify_all(&[]).is_err());
    }
}
