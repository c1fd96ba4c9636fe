//! The API server's audit log, from which the writes of both contenders are counted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm_cluster::Cluster;

/// The audit log of a control plane with the benchmark profile.
#[derive(Clone, Debug)]
pub(super) struct AuditLog(PathBuf);

/// A line of the log: <https://kubernetes.io/docs/reference/config-api/apiserver-audit.v1/>.
#[derive(Debug, Deserialize)]
struct Entry {
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

impl AuditLog {
    pub(super) fn of(cluster: &Cluster) -> AuditLog {
        AuditLog(cluster.control_plane().layout().log("audit"))
    }

    /// Returns the current length of the log.
    pub(super) fn end(&self) -> Result<u64> {
        let metadata = std::fs::metadata(&self.0).with_context(|| format!("stat {}", self.0.display()))?;
        Ok(metadata.len())
    }

    /// Returns the number of a user's writes after the offset `from`, without events.
    pub(super) fn writes(&self, from: u64, user: &str) -> Result<u64> {
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

fn count(log: &str, user: &str) -> Result<u64> {
    let mut writes = 0;
    // A line without its line feed is still being written.
    for line in log.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let entry: Entry =
            serde_json::from_str(line).with_context(|| format!("read a line of the audit log: {line}"))?;
        let resource = entry.object.and_then(|object| object.resource);
        writes += u64::from(entry.user.username == user && resource.as_deref() != Some("events"));
    }
    Ok(writes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"verb":"create","user":{"username":"a"},"objectRef":{"resource":"persistentvolumes"}}
{"verb":"create","user":{"username":"a"},"objectRef":{"resource":"events"}}
{"verb":"patch","user":{"username":"b"},"objectRef":{"resource":"persistentvolumeclaims"}}
{"verb":"create","user":{"username":"a"}}
{"verb":"create","user":{"username":"a"},"objec"#;

    #[test]
    fn the_writes_of_a_user_are_counted_without_events() {
        assert_eq!(count(LOG, "a").unwrap(), 2);
        assert_eq!(count(LOG, "b").unwrap(), 1);
        assert_eq!(count(LOG, "c").unwrap(), 0);
    }

    #[test]
    fn a_malformed_line_is_an_error() {
        assert!(count("not JSON\n", "a").is_err());
    }
}
