//! Tests of the sources with real files, pipes and sockets.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::*;

/// The longest time that a test waits for a line.
const TIMEOUT: Duration = Duration::from_secs(60);

const MAX_BYTES: usize = 64 << 10;

struct Fixture {
    directory: TempDir,
    logs: Logs,
    _following: JoinSet<()>,
}

/// Follows `SCHEME:DIRECTORY/log` after `prepare` was called with this path.
fn follow(scheme: &str, prepare: impl FnOnce(&Path)) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    prepare(&path);
    follow_in(directory, &format!("{scheme}:{}", path.display()))
}

fn follow_in(directory: TempDir, source: &str) -> Fixture {
    let logs = Logs::new(vec![format!("a={source}").parse().unwrap()], MAX_BYTES);
    Fixture { _following: logs.follow(), logs, directory }
}

impl Fixture {
    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("log")
    }

    fn component(&self) -> &LoggedComponent {
        self.logs.component("a").unwrap()
    }

    fn texts(&self) -> Vec<String> {
        let batch = self.component().ring.read(0, Position::MAX, Selection::default(), usize::MAX);
        batch.lines.iter().map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect()
    }

    /// Waits until the source has a problem, and returns it.
    async fn until_problem(&self) -> String {
        let wait = async {
            loop {
                match self.component().problem() {
                    Some(problem) => break problem,
                    None => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(TIMEOUT, wait).await.expect("the source has a problem")
    }

    /// Connects to the socket as soon as the service listens.
    async fn connected(&self) -> UnixStream {
        let connected = async {
            loop {
                match UnixStream::connect(self.path()) {
                    Ok(stream) => break stream,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(TIMEOUT, connected).await.expect("the service listens")
    }

    /// Waits until the newest line is `last`, and returns all lines.
    async fn lines_until(&self, last: &str) -> Vec<String> {
        let mut end = self.component().ring.subscribe();
        let wait = async {
            while self.texts().last().map(String::as_str) != Some(last) {
                end.changed().await.unwrap();
            }
        };
        tokio::time::timeout(TIMEOUT, wait).await.unwrap_or_else(|_| {
            panic!("no line {last:?}: {:?}, {:?}", self.texts(), self.component().problem())
        });
        self.texts()
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[tokio::test]
async fn existing_and_appended_lines_are_read() {
    let log = follow("file", |path| append(path, "old\n"));
    log.lines_until("old").await;
    append(&log.path(), "new");
    append(&log.path(), " line\n");
    assert_eq!(log.lines_until("new line").await, ["old", "new line"]);
    assert_eq!(log.component().problem(), None);
}

#[tokio::test]
async fn renamed_file_is_read_before_successor() {
    let log = follow("file", |path| append(path, "one\n"));
    log.lines_until("one").await;
    let mut old = OpenOptions::new().append(true).open(log.path()).unwrap();
    fs::rename(log.path(), log.directory.path().join("log.1")).unwrap();
    old.write_all(b"two\nthree without end").unwrap();
    append(&log.path(), "four\n");
    assert_eq!(log.lines_until("four").await, ["one", "two", "three without end", "four"]);
}

#[tokio::test]
async fn truncated_file_is_read_from_start() {
    let log = follow("file", |path| append(path, "a long line of the old content\n"));
    log.lines_until("a long line of the old content").await;
    File::create(log.path()).unwrap();
    append(&log.path(), "new\n");
    assert_eq!(log.lines_until("new").await, ["a long line of the old content", "new"]);
}

/// Directories that are removed later are awaited again.
#[tokio::test]
async fn missing_parent_directories_are_awaited() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods/a/log");
    let log = follow_in(directory, &path.display().to_string());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    append(&path, "first\n");
    assert_eq!(log.lines_until("first").await, ["first"]);
    fs::remove_dir_all(log.directory.path().join("pods")).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    append(&path, "second\n");
    assert_eq!(log.lines_until("second").await, ["first", "second"]);
}

#[tokio::test]
async fn link_is_followed_after_target_rotation() {
    let targets = tempfile::tempdir().unwrap();
    let target = targets.path().join("0.log");
    append(&target, "one\n");
    let log = follow("file", |path| std::os::unix::fs::symlink(&target, path).unwrap());
    log.lines_until("one").await;
    fs::rename(&target, targets.path().join("0.log.old")).unwrap();
    append(&target, "two\n");
    assert_eq!(log.lines_until("two").await, ["one", "two"]);
}

#[tokio::test]
async fn only_fitting_whole_lines_are_read() {
    let lines: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
    let log = follow("file", |path| append(path, &lines));
    let texts = log.lines_until("line 19999").await;
    assert!(texts.iter().all(|text| text.starts_with("line ")));
    // Of what does not fit, nothing is read: the dropped lines of the ring are from the overhead of its entries alone.
    let all = texts.len() as u64 + log.component().ring.counts().dropped;
    assert!(all < 10_000, "{all} lines were read");
}

#[tokio::test]
async fn directory_instead_of_file_is_reported() {
    let log = follow("file", |path| fs::create_dir(path).unwrap());
    let problem = log.until_problem().await;
    assert!(problem.contains("is not a regular file") && problem.contains("/log"), "{problem}");
}

#[tokio::test]
async fn pipe_accepts_writers_one_after_another() {
    let log = follow("fifo", |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap());
    for text in ["one", "two"] {
        // Without O_NONBLOCK, opening waits until the pipe is open for reading.
        let path = log.path();
        tokio::task::spawn_blocking(move || append(&path, &format!("{text}\n"))).await.unwrap();
        log.lines_until(text).await;
    }
    assert_eq!(log.texts(), ["one", "two"]);
}

#[tokio::test]
async fn socket_accepts_last_line_without_newline() {
    let log = follow("unix", |_| ());
    let mut stream = log.connected().await;
    stream.write_all(b"one\ntwo").unwrap();
    drop(stream);
    assert_eq!(log.lines_until("two").await, ["one", "two"]);
}

#[tokio::test]
async fn endless_line_does_not_exceed_ring() {
    let log = follow("unix", |_| ());
    let mut stream = log.connected().await;
    tokio::task::spawn_blocking(move || {
        for _ in 0..64 {
            stream.write_all(&[0x1b; 64 << 10]).unwrap();
        }
        stream.write_all(b"\nend\n").unwrap();
    })
    .await
    .unwrap();
    log.lines_until("end").await;
    let batch = log.component().ring.read(0, Position::MAX, Selection::default(), usize::MAX);
    assert_eq!(batch.lines.len(), 2);
    assert_eq!(batch.lines[0].cut_bytes, (64 * (64 << 10) - line::MAX_LINE_BYTES) as u64);
    assert!(log.component().ring.counts().bytes <= MAX_BYTES as u64);
}

#[tokio::test]
async fn socket_of_another_process_is_kept() {
    let mut other = None;
    let log = follow("unix", |path| other = Some(std::os::unix::net::UnixListener::bind(path).unwrap()));
    let problem = log.until_problem().await;
    assert!(problem.contains("another process listens on"), "{problem}");
    let Fixture { directory, logs: _, _following: following } = log;
    drop(following);
    UnixStream::connect(directory.path().join("log")).unwrap();
}

/// Another user could put a symbolic link in the place of the socket before its mode is set, or any pipe in the place of the pipe.
#[rstest::rstest]
#[tokio::test]
async fn stream_in_writable_directory_is_refused(#[values("fifo", "unix")] scheme: &str) {
    use std::os::unix::fs::PermissionsExt;
    let log = follow(scheme, |path| {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
    });
    let problem = log.until_problem().await;
    assert!(problem.contains("other users can change this directory"), "{problem}");
}

/// A user could otherwise read a file of root through a link.
#[tokio::test]
async fn foreign_link_is_not_followed() {
    const OTHER: u32 = 12_345;
    // Only root can give a link to another user.
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let targets = tempfile::tempdir().unwrap();
    let target = targets.path().join("shadow");
    append(&target, "secret\n");
    let log = follow("file", |path| {
        std::os::unix::fs::symlink(&target, path).unwrap();
        std::os::unix::fs::lchown(path, Some(OTHER), None).unwrap();
    });
    let problem = log.until_problem().await;
    assert!(problem.contains("is a symbolic link of user 12345"), "{problem}");
    assert!(log.texts().is_empty());
}

#[tokio::test]
async fn reading_resumes_at_position_after_failure() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("d");
    let moved = scratch.path().join("moved");
    let path = directory.join("log");
    fs::create_dir(&directory).unwrap();
    append(&path, "one\n");
    let ring = Arc::new(Ring::new(MAX_BYTES));
    let mut end = ring.subscribe();
    let mut tail = None;
    // A file in place of the directory is a failure, and not a file that does not exist.
    let breaking = async {
        end.wait_for(|end| *end == 1).await.unwrap();
        fs::rename(&directory, &moved).unwrap();
        append(&directory, "");
    };
    let (ended, ()) = tokio::join!(file::follow(&path, &ring, &mut tail, |_| ()), breaking);
    assert!(ended.is_err());
    fs::remove_file(&directory).unwrap();
    fs::rename(&moved, &directory).unwrap();
    append(&path, "two\n");
    let read = async { *end.wait_for(|end| *end >= 2).await.unwrap() };
    let following = file::follow(&path, &ring, &mut tail, |_| ());
    let read = tokio::time::timeout(TIMEOUT, async {
        tokio::select! {
            ended = following => panic!("{ended:?}"),
            read = read => read,
        }
    });
    assert_eq!(read.await.unwrap(), 2);
    let texts: Vec<_> = ring.read(0, Position::MAX, Selection::default(), usize::MAX).lines;
    assert_eq!(texts.iter().map(|line| line.text.as_slice()).collect::<Vec<_>>(), [&b"one"[..], b"two"]);
}
