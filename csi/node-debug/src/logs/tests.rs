//! Tests of the calls, with real files.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use rstest::rstest;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use super::*;

/// The longest time that a test waits for a line.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A call that follows a file.
struct Following {
    directory: TempDir,
    content: BoxStream<'static, anyhow::Result<Vec<u8>>>,
    text: String,
}

/// Follows the file `log` in a directory after `prepare` was called with its path.
fn follow(prepare: impl FnOnce(&Path)) -> Following {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    prepare(&path);
    Following { directory, content: read(&LineSource::File(path), None, true, permit()), text: String::new() }
}

impl Following {
    fn path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    /// Waits for `end`, and returns all that was read.
    async fn until(&mut self, end: &str) -> &str {
        while !self.text.ends_with(end) {
            let next = tokio::time::timeout(TIMEOUT, self.content.next()).await;
            let next = next.unwrap_or_else(|_| panic!("no {end:?} after {:?}", self.text));
            self.text += str::from_utf8(&next.unwrap().unwrap()).unwrap();
        }
        &self.text
    }
}

fn permit() -> OwnedSemaphorePermit {
    Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap()
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// Reads a file without following it.
async fn content(path: PathBuf, lines: Option<u64>) -> anyhow::Result<String> {
    let content: Vec<Vec<u8>> = read(&LineSource::File(path), lines, false, permit()).try_collect().await?;
    Ok(String::from_utf8(content.concat()).unwrap())
}

#[tokio::test]
async fn existing_and_appended_lines_are_read() {
    let mut log = follow(|path| append(path, "old\n"));
    log.until("old\n").await;
    append(&log.path(), "new");
    append(&log.path(), " line\n");
    assert_eq!(log.until("new line\n").await, "old\nnew line\n");
}

#[tokio::test]
async fn renamed_file_is_read_before_successor() {
    let mut log = follow(|path| append(path, "one\n"));
    log.until("one\n").await;
    let mut old = OpenOptions::new().append(true).open(log.path()).unwrap();
    fs::rename(log.path(), log.directory.path().join("log.1")).unwrap();
    old.write_all(b"two\nthree without end").unwrap();
    append(&log.path(), "four\n");
    assert_eq!(log.until("four\n").await, "one\ntwo\nthree without end\nfour\n");
}

#[tokio::test]
async fn truncated_file_is_read_from_start() {
    let mut log = follow(|path| append(path, "a long line of the old content"));
    log.until("content").await;
    File::create(log.path()).unwrap();
    append(&log.path(), "new\n");
    assert_eq!(log.until("new\n").await, "a long line of the old content\nnew\n");
}

#[tokio::test]
async fn missing_directory_and_file_are_awaited() {
    let mut log = follow(|path| fs::remove_dir(path.parent().unwrap()).unwrap());
    assert!(futures::poll!(log.content.next()).is_pending());
    fs::create_dir(log.directory.path()).unwrap();
    append(&log.path(), "first\n");
    log.until("first\n").await;
}

#[tokio::test]
async fn link_is_followed_after_target_rotation() {
    let targets = tempfile::tempdir().unwrap();
    let target = targets.path().join("0.log");
    append(&target, "one\n");
    let mut log = follow(|path| symlink(&target, path).unwrap());
    log.until("one\n").await;
    fs::rename(&target, targets.path().join("0.log.old")).unwrap();
    append(&target, "two\n");
    assert_eq!(log.until("two\n").await, "one\ntwo\n");
}

#[tokio::test]
async fn newest_whole_lines_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let lines: String = (0..500_000).map(|number| format!("line {number}\n")).collect();
    append(&path, &lines);
    let newest = content(path.clone(), None).await.unwrap();
    let newest = newest.strip_prefix(OLDER).unwrap();
    assert!(newest.starts_with("line ") && lines.ends_with(newest));
    assert!((MAX_BYTES - 20..=MAX_BYTES).contains(&newest.len()), "{}", newest.len());
    assert_eq!(content(path, Some(2)).await.unwrap(), "line 499998\nline 499999\n");
}

/// The name of a secret may be in the part that is left out.
#[tokio::test]
async fn line_without_beginning_is_omitted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    append(&path, &format!("password={}", "x".repeat(MAX_BYTES)));
    assert_eq!(content(path.clone(), None).await.unwrap(), OLDER);
    append(&path, "\nlast\n");
    assert_eq!(content(path, None).await.unwrap(), format!("{OLDER}last\n"));
}

#[rstest]
#[case::none(0, "")]
#[case::last(1, "c\n")]
#[case::all(3, "a\n\nc\n")]
#[case::more(9, "a\n\nc\n")]
fn last_lines_are_counted(#[case] lines: u64, #[case] expected: &str) {
    let content = "a\n\nc\n";
    assert_eq!(&content[start_of_last(content.as_bytes(), lines)..], expected);
}

proptest! {
    #[test]
    fn newest_lines_fit(content in "[a\n]{0,40}", max_bytes in 0..50usize) {
        let start = start_of_newest(content.as_bytes(), max_bytes);
        prop_assert!(content.len() - start <= max_bytes);
        prop_assert!(start == 0 || start == content.len() || content[..start].ends_with('\n'));
    }
}

#[tokio::test]
async fn path_without_readable_file_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let error = content(directory.path().join("absent"), None).await.unwrap_err().to_string();
    assert!(error.contains("/absent does not exist"), "{error}");
    let error = content(directory.path().to_owned(), None).await.unwrap_err().to_string();
    assert!(error.contains("is not a regular file"), "{error}");
}

/// A user could otherwise read a file of root through a link.
#[tokio::test]
async fn foreign_link_is_not_followed() {
    const FILE_OF_ROOT: &str = "/etc/passwd";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    symlink(FILE_OF_ROOT, &path).unwrap();
    let mut other = nix::unistd::geteuid().as_raw();
    // As root, the link needs another owner. Otherwise it already has one that differs from the file's.
    if other == 0 {
        other = 12_345;
        std::os::unix::fs::lchown(&path, Some(other), None).unwrap();
    }
    let error = content(path, None).await.unwrap_err().to_string();
    assert!(error.contains(&format!("is a symbolic link of user {other}")), "{error}");
}

#[rstest]
#[case::file("a=/l", Some(LineSource::File("/l".into())))]
#[case::kernel("a=kmsg", Some(LineSource::Kmsg))]
#[case::device_of_the_kernel("a=/dev/kmsg", Some(LineSource::Kmsg))]
#[case::relative("a=l", None)]
#[case::no_name("=kmsg", None)]
#[case::path_as_name("../a=kmsg", None)]
#[case::hidden_name(".a=kmsg", None)]
#[case::no_source("a", None)]
fn log_option_has_name_and_source(#[case] text: &str, #[case] source: Option<LineSource>) {
    let parsed: Result<LogSource, _> = text.parse();
    assert_eq!(parsed.as_ref().ok().map(|log| log.source.clone()), source, "{parsed:?}");
}
