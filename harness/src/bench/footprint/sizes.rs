//! The sizes of the programs that a node downloads.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Returns the sum of the sizes of files in bytes.
pub(super) fn sum<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> Result<u64> {
    files.into_iter().map(|file| size(file)).sum()
}

fn size(file: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(file).with_context(|| format!("stat {}", file.display()))?;
    Ok(metadata.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_summed_and_an_absent_file_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| directory.path().join(name));
        std::fs::write(&files[0], [0; 10]).unwrap();
        std::fs::write(&files[1], [0; 5]).unwrap();
        assert_eq!(sum(&files).unwrap(), 15);
        assert!(sum([&directory.path().join("absent")]).is_err());
    }
}
