//! The level and the time that a log line names, in the formats of the components of a node.
//!
//! | format | written by | level |
//! |---|---|---|
//! | `2026-01-02T03:04:05Z  WARN target: text` | the driver's programs | the word |
//! | `{"timestamp":"..","level":"WARN",..}` | the same with `--log-format json`; etcd | the value |
//! | `time="2026-.." level=warning msg=".."` | containerd | the value |
//! | `W0102 03:04:05.678901 123 file.go:1] text` | the kubelet | the first letter |
//! | `panic: text`, `thread 'x' panicked at` | Go, Rust | error |

use jiff::Timestamp;

use crate::proto::Level;

/// The part of a line in which its level and time are searched for. The message follows them.
const HEAD_BYTES: usize = 256;

/// Returns the level that the line names, or `None`.
pub(crate) fn level_of(line: &[u8]) -> Option<Level> {
    let head = head(line);
    let words = || head.split([' ', '\t']).filter(|word| !word.is_empty());
    klog_level(&head)
        .or_else(|| value_of(&head, "level").and_then(level_named))
        .or_else(|| is_panic(&head).then_some(Level::Error))
        // The level is the first word, or the second after the time.
        .or_else(|| words().take(2).find_map(|word| level_named(word.trim_matches(['[', ']', ':']))))
}

/// Returns the time that the line names in the form of RFC 3339, or `None`.
pub(crate) fn time_of(line: &[u8]) -> Option<Timestamp> {
    let head = head(line);
    let first = head.split([' ', '\t']).next().unwrap_or_default();
    let named = ["time", "timestamp", "ts"].iter().find_map(|key| value_of(&head, key));
    [Some(first), named].into_iter().flatten().find_map(|text| text.parse().ok())
}

fn head(line: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(&line[..line.len().min(HEAD_BYTES)])
}

/// Returns the value of `key=value`, `key="value"` or `"key":"value"`.
fn value_of<'a>(head: &'a str, key: &str) -> Option<&'a str> {
    let is_separator = |c: char| !(c.is_alphanumeric() || c == '_' || c == '-' || c == '.');
    head.match_indices(key).find_map(|(at, _)| {
        if head[..at].ends_with(|c| !is_separator(c)) {
            return None;
        }
        let rest = head[at + key.len()..].trim_start_matches('"');
        let rest = rest.strip_prefix(['=', ':'])?.trim_start_matches([' ', '"']);
        rest.split(['"', ' ', ',', '}']).next()
    })
}

fn klog_level(head: &str) -> Option<Level> {
    let mut bytes = head.bytes();
    let level = match bytes.next()? {
        b'I' => Level::Info,
        b'W' => Level::Warn,
        b'E' | b'F' => Level::Error,
        _ => return None,
    };
    let is_date = bytes.by_ref().take(4).filter(u8::is_ascii_digit).count() == 4;
    (is_date && bytes.next() == Some(b' ')).then_some(level)
}

fn level_named(word: &str) -> Option<Level> {
    Some(match word.to_ascii_lowercase().as_str() {
        "trace" => Level::Trace,
        "debug" => Level::Debug,
        "info" | "notice" => Level::Info,
        "warn" | "warning" => Level::Warn,
        "error" | "err" | "fatal" | "panic" | "critical" | "crit" | "dpanic" => Level::Error,
        _ => return None,
    })
}

fn is_panic(head: &str) -> bool {
    head.starts_with("panic: ") || (head.starts_with("thread '") && head.contains("panicked at"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::tracing("2026-01-02T03:04:05.678Z  WARN csi: disk is full", Some(Level::Warn))]
    #[case::tracing_json(
        r#"{"timestamp":"2026-01-02T03:04:05Z","level":"ERROR","fields":{}}"#,
        Some(Level::Error)
    )]
    #[case::containerd(r#"time="2026-01-02T03:04:05Z" level=warning msg="level=error""#, Some(Level::Warn))]
    #[case::kubelet("I0102 03:04:05.678901     123 server.go:1] Starting error", Some(Level::Info))]
    #[case::kubelet_fatal("F0102 03:04:05.678901     123 server.go:1] x", Some(Level::Error))]
    #[case::no_klog("Error 1", Some(Level::Error))]
    #[case::brackets("[WARN] x", Some(Level::Warn))]
    #[case::go_panic("panic: nil map", Some(Level::Error))]
    #[case::rust_panic("thread 'main' panicked at src/main.rs:1:1:", Some(Level::Error))]
    #[case::a_word_of_the_message("the operation ended with an error", None)]
    #[case::another_key("loglevel=error x", None)]
    #[case::none("\tat goroutine 1", None)]
    #[case::empty("", None)]
    fn the_level_of_a_line_is_found(#[case] line: &str, #[case] level: Option<Level>) {
        assert_eq!(level_of(line.as_bytes()), level);
    }

    #[rstest]
    #[case::tracing("2026-01-02T03:04:05.678Z  WARN csi: x", Some("2026-01-02T03:04:05.678Z"))]
    #[case::json(r#"{"level":"info","ts":"2026-01-02T03:04:05Z"}"#, Some("2026-01-02T03:04:05Z"))]
    #[case::containerd(r#"time="2026-01-02T03:04:05+01:00" level=info"#, Some("2026-01-02T02:04:05Z"))]
    #[case::kubelet("I0102 03:04:05.678901     123 server.go:1] x", None)]
    #[case::none("x", None)]
    fn timestamp_of_line_is_found(#[case] line: &str, #[case] time: Option<&str>) {
        assert_eq!(time_of(line.as_bytes()), time.map(|time| time.parse().unwrap()));
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_never_panics(line in proptest::collection::vec(any::<u8>(), 0..300)) {
            level_of(&line);
            time_of(&line);
        }
    }
}
