//! A volume on the command line, and the errors of its checks.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) const USAGE: &str = "\
usage: volume-check check-new BYTES FLAGS VOLUME.. | check-kept BYTES BYTES FLAGS VOLUME..
       volume-check hold [VOLUME..] | write FILE TEXT | read FILE | read-at DEVICE BYTES
       volume-check write-pattern [--unsynced] VOLUME.. | verify-pattern VOLUME.. | watch-size VOLUME
       volume-check execute-copy DIRECTORY | check-limit DIRECTORY BYTES | plant DIRECTORY DIRECTORY TARGET
       volume-check attack VOLUME DIRECTORY SOCKET
VOLUME is writable:PATH, readonly:PATH or block:PATH, and FLAGS is a list of nosuid, nodev and noexec, or none";

pub(crate) type Checked<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Volume {
    Writable(PathBuf),
    Readonly(PathBuf),
    Block(PathBuf),
}

impl Volume {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Volume::Writable(path) | Volume::Readonly(path) | Volume::Block(path) => path,
        }
    }
}

pub(crate) fn parse_volume(word: &str) -> Checked<Volume> {
    match word.split_once(':') {
        Some(("writable", path)) => Ok(Volume::Writable(path.into())),
        Some(("readonly", path)) => Ok(Volume::Readonly(path.into())),
        Some(("block", path)) => Ok(Volume::Block(path.into())),
        _ => Err(format!("{word:?} is not a volume\n{USAGE}").into()),
    }
}

/// Parses one volume or more.
pub(crate) fn parse_volumes(words: &[&str]) -> Checked<Vec<Volume>> {
    if words.is_empty() {
        return Err(format!("no volume is given\n{USAGE}").into());
    }
    words.iter().map(|word| parse_volume(word)).collect()
}

pub(crate) fn named(what: &str, error: io::Error) -> Box<dyn Error + Send + Sync> {
    format!("{what}: {error}").into()
}
