//! Where the lines of a component come from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The source of a component's lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineSource {
    /// A file that the component appends to. It may be rotated, truncated, and not exist yet.
    File(PathBuf),
    /// A named pipe that the component writes to.
    Fifo(PathBuf),
    /// A unix socket that the component connects to.
    Unix(PathBuf),
    /// The kernel's log.
    Kmsg,
}

impl FromStr for LineSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let absolute = |path: &str| {
            let path = PathBuf::from(path);
            let is_usable = path.is_absolute() && path.file_name().is_some();
            if is_usable { Ok(path) } else { Err("the source must have an absolute path".to_owned()) }
        };
        match text.split_once(':') {
            _ if text == "kmsg" || text == "/dev/kmsg" => Ok(Self::Kmsg),
            Some(("file", path)) => absolute(path).map(Self::File),
            Some(("fifo", path)) => absolute(path).map(Self::Fifo),
            Some(("unix", path)) => absolute(path).map(Self::Unix),
            _ if text.starts_with('/') => absolute(text).map(Self::File),
            _ => {
                Err("the source must be file:PATH, fifo:PATH, unix:PATH, kmsg, or the path of a file"
                    .to_owned())
            }
        }
    }
}

impl LineSource {
    /// Returns the path of the file, pipe or socket. The kernel's log has none.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::Fifo(path) | Self::Unix(path) => Some(path),
            Self::Kmsg => None,
        }
    }
}

impl fmt::Display for LineSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Fifo(path) => write!(f, "fifo:{}", path.display()),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Kmsg => f.write_str("kmsg"),
        }
    }
}

/// A component and the source of its lines: `NAME=SOURCE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSource {
    /// The name of the component.
    pub name: String,
    /// Where its lines come from.
    pub source: LineSource,
}

/// The longest name of a component.
const MAX_NAME_LEN: usize = 63;

impl FromStr for LogSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, source) = text.split_once('=').ok_or("must be NAME=SOURCE")?;
        // The name becomes the name of a file in the archive of `dbg bundle`.
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_valid = (1..=MAX_NAME_LEN).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(is_name);
        if !is_valid {
            return Err(format!(
                "the name must be 1 to {MAX_NAME_LEN} letters, digits, dots, hyphens or underscores, and begin with a \
                 letter or digit"
            ));
        }
        Ok(Self { name: name.to_owned(), source: source.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::file("a=file:/l", Some(LineSource::File("/l".into())))]
    #[case::plain_path("a=/l", Some(LineSource::File("/l".into())))]
    #[case::fifo("a=fifo:/l", Some(LineSource::Fifo("/l".into())))]
    #[case::unix("a=unix:/l", Some(LineSource::Unix("/l".into())))]
    #[case::kernel("a=kmsg", Some(LineSource::Kmsg))]
    #[case::kernel_device("a=/dev/kmsg", Some(LineSource::Kmsg))]
    #[case::relative("a=file:l", None)]
    #[case::no_file("a=/", None)]
    #[case::unknown("a=tcp:1", None)]
    #[case::no_name("=kmsg", None)]
    #[case::path_as_name("../a=kmsg", None)]
    #[case::hidden_name(".a=kmsg", None)]
    #[case::no_source("a", None)]
    fn log_option_has_name_and_source(#[case] text: &str, #[case] source: Option<LineSource>) {
        let parsed: Result<LogSource, _> = text.parse();
        assert_eq!(parsed.as_ref().ok().map(|log| log.source.clone()), source, "{parsed:?}");
    }
}
