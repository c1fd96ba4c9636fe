//! A log file that is followed across rotation.
//!
//! A file may be rotated in two ways. If it is renamed and a new file is created, the old one is read to its end before
//! the new one is opened. If it is copied and truncated, reading starts again at the beginning; what the component wrote
//! between the last read and the truncation is lost, as for every program that follows such a file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use csi::inotify::{InotifyWatch, existing_ancestor};
use jiff::Timestamp;
use nix::fcntl::OFlag;

use super::line::LineSplitter;
use super::ring::Ring;

const CHUNK_BYTES: usize = 64 << 10;

/// The bytes that are read before other tasks get the thread.
const TURN_BYTES: usize = 1 << 20;

/// The state of reading one file.
#[derive(Debug)]
pub(super) struct Tail {
    path: PathBuf,
    ring: Arc<Ring>,
    lines: LineSplitter,
    current: Option<Current>,
    /// Where to continue if the same file is opened after a failure.
    resume: Option<Resume>,
    /// `true` until a file was opened. Only of the first file is the old content skipped that the ring cannot hold.
    is_first: bool,
}

#[derive(Debug)]
struct Current {
    file: File,
    identity: (u64, u64),
    offset: u64,
    /// Reading began in the middle of a line, which is skipped.
    in_partial_line: bool,
}

#[derive(Clone, Copy, Debug)]
struct Resume {
    identity: (u64, u64),
    offset: u64,
    in_partial_line: bool,
}

/// The result of one turn.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    /// There may be more to read.
    More,
    /// Everything was read.
    Idle,
    /// The file does not exist.
    Absent,
}

/// Appends the lines of the file to `ring`. `report` receives the reason why there are none, or `None`. `kept` has the
/// position in the file when it fails, so that the next call continues there.
pub(super) async fn follow(
    path: &Path,
    ring: &Arc<Ring>,
    kept: &mut Option<Tail>,
    report: impl Fn(Option<String>),
) -> anyhow::Result<()> {
    let mut watched: Option<(Watched, InotifyWatch)> = None;
    loop {
        let tail = kept.take().unwrap_or_else(|| Tail::new(path.to_owned(), Arc::clone(ring)));
        let turn = on_thread(tail, kept, |tail| Ok((tail.turn()?, Watched::of(tail))));
        let (turn, needed) = turn.await?;
        match turn {
            Turn::More => continue,
            Turn::Idle => report(None),
            Turn::Absent => report(Some(format!("{} does not exist yet", path.display()))),
        }
        match &watched {
            Some((current, watch)) if *current == needed => {
                if watch.changed().await? {
                    watched = None;
                }
            }
            // The file may have changed before the watch began, so the next turn comes before the wait.
            _ => {
                let Some(tail) = kept.take() else { continue };
                let watch = on_thread(tail, kept, move |tail| Ok((needed.watch(tail)?, needed)));
                let (watch, needed) = watch.await?;
                watched = Some((needed, watch));
            }
        }
    }
}

/// Runs `work` on a thread that may block on the disk. `kept` has the tail afterwards.
async fn on_thread<T: Send + 'static>(
    mut tail: Tail,
    kept: &mut Option<Tail>,
    work: impl FnOnce(&mut Tail) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let work = move || {
        let result = work(&mut tail);
        (tail, result)
    };
    let (tail, result) = tokio::task::spawn_blocking(work).await.context("read a log file")?;
    *kept = Some(tail);
    result
}

/// What has to be watched: directories in which the file may be replaced, and the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Watched {
    directories: Vec<PathBuf>,
    file: Option<(u64, u64)>,
}

impl Watched {
    fn of(tail: &Tail) -> Self {
        let mut directories = vec![existing_ancestor(&tail.path).to_owned()];
        // The path may be a symbolic link to a file that is rotated in another directory.
        if let Ok(target) = fs::canonicalize(&tail.path).or_else(|_| fs::read_link(&tail.path)) {
            directories.push(existing_ancestor(&target).to_owned());
        }
        directories.dedup();
        Self { directories, file: tail.current.as_ref().map(|current| current.identity) }
    }

    fn watch(&self, tail: &Tail) -> anyhow::Result<InotifyWatch> {
        let watch = InotifyWatch::new()?;
        for directory in &self.directories {
            watch.add_directory(directory)?;
        }
        if let Some(current) = &tail.current {
            watch.add_file(&current.file)?;
        }
        Ok(watch)
    }
}

impl Tail {
    fn new(path: PathBuf, ring: Arc<Ring>) -> Self {
        Self { path, ring, lines: LineSplitter::default(), current: None, resume: None, is_first: true }
    }

    /// Reads for one turn. After a failure, the file is opened again.
    fn turn(&mut self) -> anyhow::Result<Turn> {
        let turn = self.read_turn();
        if turn.is_err()
            && let Some(Current { identity, offset, in_partial_line, .. }) = self.current.take()
        {
            self.resume = Some(Resume { identity, offset, in_partial_line });
        }
        turn
    }

    fn read_turn(&mut self) -> anyhow::Result<Turn> {
        if self.current.is_none() && !self.open()? {
            return Ok(Turn::Absent);
        }
        let Some(current) = &mut self.current else { return Ok(Turn::Absent) };
        // The comparison comes first: what the component wrote before it changed to a new file is read now.
        let is_replaced = identity(&self.path)?.is_some_and(|found| found != current.identity);
        if current.file.metadata()?.len() < current.offset {
            current.offset = current.file.seek(SeekFrom::Start(0))?;
            current.in_partial_line = false;
            self.finish_line();
            return Ok(Turn::More);
        }
        if !self.read()? {
            return Ok(Turn::More);
        }
        if is_replaced {
            self.finish_line();
            self.current = None;
            return Ok(Turn::More);
        }
        Ok(Turn::Idle)
    }

    /// Opens the file. Returns `false` if it does not exist.
    fn open(&mut self) -> anyhow::Result<bool> {
        // Without O_NONBLOCK, opening a named pipe of this name would wait for a writer.
        let mut file =
            match OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&self.path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(error).with_context(|| format!("open {}", self.path.display())),
            };
        let metadata = file.metadata()?;
        let Some(entry) = symlink_metadata(&self.path)? else { return Ok(false) };
        if entry.is_symlink() {
            ensure!(
                is_trusted_link(entry.uid(), metadata.uid()),
                "{} is a symbolic link of user {} to a file of user {}; give node-debug the path of the file",
                self.path.display(),
                entry.uid(),
                metadata.uid()
            );
        } else if (entry.dev(), entry.ino()) != (metadata.dev(), metadata.ino()) {
            // It was replaced since it was opened.
            return Ok(false);
        }
        ensure!(
            metadata.is_file(),
            "{} is not a regular file; use fifo: or unix: for a stream",
            self.path.display()
        );
        let identity = (metadata.dev(), metadata.ino());
        let mut start = Resume { identity, offset: 0, in_partial_line: false };
        match self.resume.take() {
            Some(resume) if resume.identity == identity => start = resume,
            Some(_replaced) => self.finish_line(),
            None if self.is_first => {
                start.offset = metadata.len().saturating_sub(self.ring.max_bytes() as u64);
                start.in_partial_line = start.offset > 0;
            }
            None => {}
        }
        self.is_first = false;
        let Resume { offset, in_partial_line, .. } = start;
        file.seek(SeekFrom::Start(offset))?;
        self.current = Some(Current { file, identity, offset, in_partial_line });
        Ok(true)
    }

    /// Reads for one turn. Returns `true` if it reached the end of the file.
    fn read(&mut self) -> anyhow::Result<bool> {
        let Some(current) = &mut self.current else { return Ok(true) };
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut turn = 0;
        while turn < TURN_BYTES {
            let length = match current.file.read(&mut chunk) {
                Ok(0) => return Ok(true),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).with_context(|| format!("read {}", self.path.display())),
            };
            turn += length;
            current.offset += length as u64;
            let mut bytes = &chunk[..length];
            if current.in_partial_line {
                let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else { continue };
                bytes = &bytes[end + 1..];
                current.in_partial_line = false;
            }
            let now = Timestamp::now();
            self.lines.feed(bytes, |line| self.ring.push(line, now));
        }
        Ok(false)
    }

    fn finish_line(&mut self) {
        let line = self.lines.finish();
        line.into_iter().for_each(|line| self.ring.push(line, Timestamp::now()));
    }
}

/// Returns `true` if a symbolic link of this user may lead to a file of that user. The service runs as root: a user who can
/// write the directory of a log could otherwise have any file read.
fn is_trusted_link(link_owner: u32, file_owner: u32) -> bool {
    link_owner == 0 || link_owner == file_owner
}

fn symlink_metadata(path: &Path) -> io::Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn identity(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Links of root and of the owner of the file are trusted.
    #[rstest]
    #[case::of_root(0, 7, true)]
    #[case::of_the_same_user(7, 7, true)]
    #[case::to_a_file_of_root(7, 0, false)]
    #[case::to_a_file_of_another_user(7, 8, false)]
    fn link_of_another_user_is_untrusted(#[case] link: u32, #[case] file: u32, #[case] is_ok: bool) {
        assert_eq!(is_trusted_link(link, file), is_ok);
    }
}
