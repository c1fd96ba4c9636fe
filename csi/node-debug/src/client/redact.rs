//! Replaces secrets in texts that leave the node.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// What stands in place of a secret.
pub(super) const REDACTED: &str = "[redacted]";

/// The lines of a private key after which its end is no longer expected. A key of 16,384 bits has 200.
const MAX_KEY_LINES: usize = 400;

/// Forms of secrets within a line. In each, the group `secret` is replaced; without such a group, everything is.
static FORMS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    let value = r#"(?:\\*"(?:[^"\\]|\\[^"])*|\\*'[^']*|[^\s"'\\,;&}\])]+)"#;
    [
        // A private key on one line, as in JSON and YAML.
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|$)".to_owned(),
        // A JSON Web Token: base64url of {" is eyJ.
        r"eyJ[A-Za-z0-9_=-]{6,}\.[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]*)*".to_owned(),
        // The header, to the end of its value.
        r#"(?i)\bauthorization\b["'\\]*\s*[:=]\s*[\[{"'\\]*(?<secret>[^"'\\\]}\r\n]+)"#.to_owned(),
        r#"(?i)\b(?:bearer|basic)\s+(?<secret>[A-Za-z0-9._~+/=-]{6,})"#.to_owned(),
        // The maps of secrets of CSI calls, as Go, protobuf and JSON print them.
        r#"(?i)secrets["'\\]*\s*[:=]?\s*(?<secret>map\[[^\]]*\]|\{(?:\\*"(?:[^"\\]|\\[^"])*\\*"|[^}"])*\}|<(?:"(?:[^"\\]|\\.)*"|[^>"])*>)"#.to_owned(),
        // Values whose name says that they are secret.
        format!(
            r#"(?i)(?:password|passwd|passphrase|secret|token|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|client[_-]key[_-]data|session[_-]?key|cookie)["'\\]*\s*[:=]\s*(?<secret>{value})"#
        ),
        // User and password of a URL.
        r"[a-z][a-z0-9+.-]*://[^\s/:@]*:(?<secret>[^\s/@]+)@".to_owned(),
        r"\bAKIA[A-Z0-9]{16}\b".to_owned(),
    ]
    .iter()
    .filter_map(|form| Regex::new(form).ok())
    .collect()
});

static KEY_BEGIN: &str = "-----BEGIN ";
static KEY_END: &str = "-----END ";
static PRIVATE_KEY: &str = "PRIVATE KEY-----";

/// Replaces secrets in the lines of one text, which it gets in their order: a private key has several lines.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Lines of a private key that may still follow.
    key_lines: usize,
}

impl Redactor {
    /// Returns the line without secrets.
    pub(super) fn line<'a>(&mut self, line: &'a str) -> Cow<'a, str> {
        if self.is_key_line(line) {
            return Cow::Borrowed(REDACTED);
        }
        FORMS.iter().fold(Cow::Borrowed(line), |line, form| match form.replace_all(&line, replacement) {
            Cow::Borrowed(_) => line,
            Cow::Owned(replaced) => Cow::Owned(replaced),
        })
    }

    /// Returns the text without secrets.
    pub(super) fn text(text: &str) -> String {
        let mut redactor = Self::default();
        text.split_inclusive('\n')
            .map(|line| {
                let (content, end) = line.strip_suffix('\n').map_or((line, ""), |content| (content, "\n"));
                redactor.line(content).into_owned() + end
            })
            .collect()
    }

    fn is_key_line(&mut self, line: &str) -> bool {
        let marker = |at: &str| line.rfind(at).filter(|at| line[*at..].contains(PRIVATE_KEY));
        let (begin, end) = (marker(KEY_BEGIN), marker(KEY_END));
        if begin > end {
            self.key_lines = MAX_KEY_LINES;
            return true;
        }
        if end.is_some() {
            // On one line, the text around the key stays.
            return std::mem::take(&mut self.key_lines) > 0 || begin.is_none();
        }
        if self.key_lines > 0 {
            self.key_lines -= 1;
            return true;
        }
        // A line of a key whose beginning was dropped or is in another entry.
        is_base64_line(line)
    }
}

/// Returns `true` if the last word of the line is as long as a line of a PEM file, and the only one, apart from what a
/// program may print before each line.
fn is_base64_line(line: &str) -> bool {
    let word = line.rsplit([' ', '\t']).next().unwrap_or_default();
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    (60..=80).contains(&word.len())
        && word.bytes().all(is_base64)
        // A hash in hexadecimal digits is no secret, and reports need it.
        && !word.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn replacement(found: &Captures<'_>) -> String {
    let whole = &found[0];
    let Some(secret) = found.name("secret") else { return REDACTED.to_owned() };
    let start = secret.start() - found.get_match().start();
    let end = secret.end() - found.get_match().start();
    // A quote that opens the value stays, so that what follows still looks like a string.
    let quotes = secret.as_str().len() - secret.as_str().trim_start_matches(['"', '\'', '\\']).len();
    format!("{}{REDACTED}{}", &whole[..start + quotes], &whole[end..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const JWT: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJlLXNpZ25hdHVyZQ";

    #[test]
    fn every_form_is_a_valid_expression() {
        assert_eq!(FORMS.len(), 8);
    }

    #[rstest]
    #[case::jwt(&format!("token is {JWT}, ok"), "token is [redacted], ok")]
    #[case::bearer("got Bearer abcdef-0123456789.x from 10.0.0.1", "got Bearer [redacted] from 10.0.0.1")]
    #[case::header("> Authorization: Basic dXNlcjpwYXNz", "> Authorization: [redacted]")]
    #[case::header_of_go(
        r#"map[Authorization:[Bearer s3cret-s3cret] Accept:[*/*]]"#,
        "map[Authorization:[[redacted]] Accept:[*/*]]"
    )]
    #[case::header_in_json(
        r#"{"authorization":"Token hunter2","a":1}"#,
        r#"{"authorization":"[redacted]","a":1}"#
    )]
    #[case::csi_of_go(
        r#"GRPC request: {"volume_id":"v","node_stage_secrets":{"user":"u","key":"hunt}er2"},"x":1}"#,
        r#"GRPC request: {"volume_id":"v","node_stage_secrets":[redacted],"x":1}"#
    )]
    #[case::csi_of_protobuf(
        r#"volume_id:"v" secrets:{key:"user" value:"hunter2"} secrets:<key:"a" value:"hunter3">"#,
        r#"volume_id:"v" secrets:[redacted] secrets:[redacted]"#
    )]
    #[case::csi_of_a_go_map("Secrets:map[user:hunter2 key:x] Volume:v", "Secrets:[redacted] Volume:v")]
    #[case::escaped_json(
        r#"msg="{\"secrets\":{\"a\":\"hunter2\"},\"b\":1}""#,
        r#"msg="{\"secrets\":[redacted],\"b\":1}""#
    )]
    #[case::password("mount -o username=u,password=hunter2,rw", "mount -o username=u,password=[redacted],rw")]
    #[case::quoted_password(r#"password: "hunter2 hunter3", next"#, r#"password: "[redacted]", next"#)]
    #[case::url("https://user:hunter2@host/path", "https://user:[redacted]@host/path")]
    #[case::key_of_kubeconfig("    client-key-data: LS0tLS1CRUdJTg==", "    client-key-data: [redacted]")]
    #[case::key_on_one_line(
        r"key=-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\n done",
        r"key=[redacted]\n done"
    )]
    fn a_secret_is_replaced_and_the_rest_of_the_line_kept(#[case] line: &str, #[case] expected: &str) {
        assert_eq!(Redactor::default().line(line), expected);
    }

    #[rstest]
    #[case::hash("image sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")]
    #[case::plain("2026-01-02T03:04:05Z  INFO csi: published volume pvc-1 at /var/lib/kubelet/pods/x")]
    #[case::certificate("-----BEGIN CERTIFICATE-----")]
    #[case::mount("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue")]
    fn a_line_without_a_secret_is_kept(#[case] line: &str) {
        assert_eq!(Redactor::default().line(line), line);
    }

    #[test]
    fn a_private_key_of_several_lines_is_replaced() {
        let text = "before\n2026 -----BEGIN PRIVATE KEY-----\n2026 MIIEvQ\n2026 short==\n2026 -----END PRIVATE KEY-----\nafter\n";
        let expected = format!("before\n{}after\n", format!("{REDACTED}\n").repeat(4));
        assert_eq!(Redactor::text(text), expected);
    }

    #[test]
    fn a_private_key_without_its_beginning_is_replaced() {
        let line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        assert_eq!(Redactor::text(&format!("{line}\n{line}\nx")), format!("{REDACTED}\n{REDACTED}\nx"));
    }

    #[test]
    fn a_key_without_an_end_does_not_replace_the_rest_of_the_log() {
        let text = format!("-----BEGIN RSA PRIVATE KEY-----\n{}last", "a line\n".repeat(2 * MAX_KEY_LINES));
        assert!(Redactor::text(&text).ends_with("a line\nlast"));
    }

    proptest! {
        #[test]
        fn a_token_is_replaced_wherever_it_is(before in "[ -~]{0,40}", after in "[ -~]{0,40}") {
            let line = format!("{before} {JWT} {after}");
            prop_assert!(!Redactor::default().line(&line).contains(JWT));
        }

        #[test]
        fn any_text_is_processed_without_panic(text in "\\PC{0,200}") {
            Redactor::text(&text);
        }
    }
}
