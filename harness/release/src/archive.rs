//! Compressed archives whose bytes depend only on the names and contents of the files.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

/// Writes a compressed tar archive of `files`: pairs of the path in the archive and the file. The files are owned by root and
/// have no date.
///
/// # Errors
/// A file cannot be read, or the archive cannot be written.
pub(crate) fn write(target: &Path, mut files: Vec<(PathBuf, PathBuf)>) -> Result<()> {
    files.sort();
    let written = || -> Result<()> {
        // The header that the encoder writes by default has neither a date nor a name.
        let mut archive = Builder::new(GzEncoder::new(File::create(target)?, Compression::best()));
        for (path, file) in &files {
            let content = fs::read(file).with_context(|| format!("read {}", file.display()))?;
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Regular);
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            let appended = archive.append_data(&mut header, path, content.as_slice());
            appended.with_context(|| format!("append {}", path.display()))?;
        }
        archive.into_inner()?.finish()?.flush()?;
        Ok(())
    };
    written().with_context(|| format!("write {}", target.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    /// The archives have the same bytes.
    #[test]
    fn file_order_and_dates_are_irrelevant() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = directory.path().join(name);
            fs::write(&path, name).unwrap();
            (Path::new("release").join(name), path)
        };
        let (one, other) = (directory.path().join("one.tgz"), directory.path().join("other.tgz"));
        write(&one, vec![file("a"), file("b")]).unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1);
        let (b, a) = (file("b"), file("a"));
        File::options().write(true).open(&a.1).unwrap().set_modified(old).unwrap();
        write(&other, vec![b, a]).unwrap();
        assert!(fs::read(&one).unwrap() == fs::read(&other).unwrap());

        let mut archive = tar::Archive::new(GzDecoder::new(File::open(&one).unwrap()));
        let mut contents = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            contents.push((path, text));
        }
        let expected = [("release/a", "a"), ("release/b", "b")];
        assert_eq!(contents, expected.map(|(path, text)| (path.to_owned(), text.to_owned())));
    }
}
