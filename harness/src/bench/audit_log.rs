//! The API server's audit log, from which the requests of each contender are counted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm_cluster::Layout;

/// The audit log of a control plane with the benchmark profile.
#[derive(Clone, Debug)]
pub(super) struct AuditLog(PathBuf);

/// The numbers of a user's requests. Those for leases are not counted, because a leader election does not depend on claims.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Requests {
    /// The requests that return one object or a list.
    pub(super) reads: u64,
    /// The watches that have started.
    pub(super) watches: u64,
    /// The writes of objects that are no events.
    pub(super) writes: u64,
    pub(super) event_writes: u64,
}

/// A line of the log: <https://kubernetes.io/docs/reference/config-api/apiserver-audit.v1/>.
#[derive(Debug, Deserialize)]
struct Entry {
    verb: String,
    user: User,
    #[serde(rename = "objectRef")]
    object: Option<Object>,
}

#[derive(Debug, Deserialize)]
struct User {
    username: String,
}

#[derive(Debug, Deserialize)]
struct Object {
    resource: Option<String>,
}

impl Requests {
    /// Returns the number of all requests.
    pub(super) fn all(self) -> u64 {
        self.reads + self.watches + self.writes + self.event_writes
    }
}

impl AuditLog {
    pub(super) fn of(control_plane: &Layout) -> AuditLog {
        AuditLog(control_plane.log("audit"))
    }

    /// Returns the current length of the log.
    pub(super) fn end(&self) -> Result<u64> {
        let metadata = std::fs::metadata(&self.0).with_context(|| format!("stat {}", self.0.display()))?;
        Ok(metadata.len())
    }

    /// Counts a user's requests after the offset `from`.
    pub(super) fn requests(&self, from: u64, user: &str) -> Result<Requests> {
        let end = self.end()?;
        anyhow::ensure!(end >= from, "{} ends at {end}, before the offset {from}", self.0.display());
        let read = || {
            let mut file = File::open(&self.0)?;
            file.seek(SeekFrom::Start(from))?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        };
        let text = read().with_context(|| format!("read {}", self.0.display()))?;
        count(&text, user)
    }
}

fn count(log: &str, user: &str) -> Result<Requests> {
    let mut requests = Requests::default();
    // A line without its line feed is still being written.
    for line in log.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let entry: Entry =
            serde_json::from_str(line).with_context(|| format!("read a line of the audit log: {line}"))?;
        let resource = entry.object.and_then(|object| object.resource);
        if entry.user.username != user || resource.as_deref() == Some("leases") {
            continue;
        }
        let count = match (entry.verb.as_str(), resource.as_deref()) {
            ("get" | "list", _) => &mut requests.reads,
            ("watch", _) => &mut requests.watches,
            (_, Some("events")) => &mut requests.event_writes,
            _ => &mut requests.writes,
        };
        *count += 1;
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"verb":"create","user":{"username":"a"},"objectRef":{"resource":"persistentvolumes"}}
{"verb":"create","user":{"username":"a"},"objectRef":{"resource":"events"}}
{"verb":"patch","user":{"username":"b"},"objectRef":{"resource":"persistentvolumeclaims"}}
{"verb":"create","user":{"username":"a"}}
{"verb":"get","user":{"username":"a"},"objectRef":{"resource":"events"}}
{"verb":"list","user":{"username":"a"}}
{"verb":"get","user":{"username":"a"},"objectRef":{"resource":"leases"}}
{"verb":"watch","user":{"username":"a"},"objectRef":{"resource":"events"}}
{"verb":"create","user":{"username":"a"},"objec"#;

    /// The counts are those of one user.
    #[test]
    fn requests_are_counted_by_kind() {
        let requests = count(LOG, "a").unwrap();
        assert_eq!(requests, Requests { reads: 2, watches: 1, writes: 2, event_writes: 1 });
        assert_eq!(requests.all(), 6);
        assert_eq!(count(LOG, "b").unwrap(), Requests { writes: 1, ..Requests::default() });
        assert_eq!(count(LOG, "c").unwrap(), Requests::default());
    }

    #[test]
    fn offset_beyond_log_end_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), LOG).unwrap();
        let log = AuditLog(file.path().to_owned());
        let end = log.end().unwrap();
        assert_eq!(log.requests(end, "a").unwrap(), Requests::default());
        std::fs::write(file.path(), "").unwrap();
        assert!(log.requests(end, "a").unwrap_err().to_string().contains("before the offset"));
    }

    #[test]
    fn a_malformed_line_is_an_error() {
        assert!(count("not JSON\n", "a").is_err());
    }
}
