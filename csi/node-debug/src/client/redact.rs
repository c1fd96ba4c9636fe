//! Replaces secrets in texts that leave the node.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use super::secret_value::{self, ValueExtent};

/// What stands in place of a secret.
pub(super) const REDACTED: &str = "[redacted]";

/// The lines of a private key after which its end is no longer expected. A key of 16,384 bits has 200.
const MAX_KEY_LINES: usize = 400;

/// The lines of a collection of secrets after which its end is no longer expected.
const MAX_COLLECTION_LINES: usize = 200;

/// A form of secrets within a line.
struct Form {
    expression: Regex,
    secret: Secret,
}

/// What of a match is secret.
#[derive(Clone, Copy)]
enum Secret {
    /// The group `secret`; without such a group, everything.
    Match,
    /// The value that follows the match.
    After(ValueExtent),
    /// The collection whose bracket is the last character of the match.
    Collection,
}

/// Between a name and its value.
const SEPARATOR: &str = r#"["'`\\\])]*\s*(?::=|=>|[:=])\s*"#;

/// Colours and other control sequences of a terminal, which could stand between a name and its value.
static CONTROL_SEQUENCE: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?:\x1b\[|\u{9b})[0-?]*[ -/]*[@-~]").ok());

/// A line of a PEM file, possibly within a string. A program may print something before it.
static BASE64_WORD: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"(?:^|[\s"'`])(?<secret>[A-Za-z0-9+/=]{60,80})(?:$|[\s"'`\\])"#).ok());

static FORMS: LazyLock<Vec<Form>> = LazyLock::new(|| {
    let value = Secret::After(ValueExtent::Value);
    [
        // A private key on one line, as in JSON and YAML.
        (
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|$)"
                .to_owned(),
            Secret::Match,
        ),
        // The same in base64, as in kubeconfigs and Secrets. Certificates have this form as well.
        (r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]+".to_owned(), Secret::Match),
        // A JSON Web Token: base64url of {" is eyJ.
        (r"eyJ[A-Za-z0-9_=-]{6,}\.[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]*)*".to_owned(), Secret::Match),
        // Headers, to the end of their values.
        (format!(r"(?i)\bauthorization{SEPARATOR}"), Secret::After(ValueExtent::Line)),
        (r#"(?i)\bauthorization\\*["'`]\)?\s*,\s*"#.to_owned(), Secret::After(ValueExtent::Line)),
        (format!(r"(?i)cookies?{SEPARATOR}"), Secret::After(ValueExtent::Line)),
        (
            r#"(?i)\b(?:bearer|basic)\s+(?:\\*["'`])?(?<secret>[A-Za-z0-9._~+/=-]{6,})"#.to_owned(),
            Secret::Match,
        ),
        // Collections of secrets in the text form of protobuf, which has no colon before a bracket.
        (r#"(?i)secrets?["'`\\]*\s*[{<]"#.to_owned(), Secret::Collection),
        // Environment variables, as the kubelet, JSON and protobuf print them.
        (
            format!(
                r#"(?i)\bname["'`\\]*\s*[:=]\s*["'`\\]*[\w.-]*(?:pass|pwd|secret|token|key|cred|auth)[\w.-]*["'`\\]*,?\s*["'`\\]*value{SEPARATOR}"#
            ),
            Secret::After(ValueExtent::Environment),
        ),
        // Values whose name says that they are secret.
        (
            format!(
                r"(?i)(?:pass(?:word|wd|phrase)|pwd|secret|token|credential|dockerconfigjson|dockercfg|(?:api|access|private|session|client|account|encryption)[_.-]?key|\b(?:auth|pass))(?:s|[_.-]?(?:key|data|value|string))?{SEPARATOR}"
            ),
            value,
        ),
        // The same as options of a command, in a line or in a list.
        (
            r#"(?i)--[\w-]*(?:token|password|passphrase|secret)(?:\\*["'`]\s*,?|\s)\s*"#.to_owned(),
            value,
        ),
        // User and password of a URL, or a token in place of both.
        (
            r#"(?i)\b[a-z][a-z0-9+.-]*://(?:[^\s/:@"'`]*:)?(?<secret>[^\s/"'`]+)@"#.to_owned(),
            Secret::Match,
        ),
        (r"\bAKIA[A-Z0-9]{16}\b".to_owned(), Secret::Match),
    ]
    .into_iter()
    .filter_map(|(form, secret)| Some(Form { expression: Regex::new(&form).ok()?, secret }))
    .collect()
});

const KEY_BEGIN: &str = "-----BEGIN ";
const KEY_END: &str = "-----END ";
const PRIVATE_KEY: &str = "PRIVATE KEY";

/// Replaces secrets in the lines of one text, which it gets in their order: a private key has several lines.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Private keys that have begun and not ended. Several programs may write to one log.
    open_keys: usize,
    /// Lines of a private key that may still follow.
    key_lines: usize,
    /// The line before was one of a key whose beginning is unknown.
    is_in_base64: bool,
    /// The brackets that close a collection of secrets, the innermost last.
    open_brackets: Vec<u8>,
    /// Lines of that collection that may still follow.
    collection_lines: usize,
}

impl Redactor {
    /// Returns the line without secrets and without control sequences of a terminal.
    pub(super) fn line<'a>(&mut self, line: &'a str) -> Cow<'a, str> {
        let line = CONTROL_SEQUENCE.as_ref().map_or(Cow::Borrowed(line), |all| all.replace_all(line, ""));
        if self.is_key_line(&line) {
            return Cow::Borrowed(REDACTED);
        }
        if self.open_brackets.is_empty() {
            return self.replace_forms(line);
        }
        let found = secret_value::close(&line, std::mem::take(&mut self.open_brackets));
        let rest = line[found.range.end..].to_owned();
        self.collection_lines = self.collection_lines.saturating_sub(1);
        if self.collection_lines > 0 {
            self.open_brackets = found.open;
        }
        Cow::Owned(format!("{REDACTED}{}", self.replace_forms(rest.into())))
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

    fn replace_forms<'a>(&mut self, line: Cow<'a, str>) -> Cow<'a, str> {
        FORMS.iter().fold(line, |line, form| match form.secret {
            Secret::Match => replace_matches(&form.expression, line),
            Secret::After(extent) => self.replace_values(&form.expression, line, extent, 0),
            Secret::Collection => self.replace_values(&form.expression, line, ValueExtent::Value, 1),
        })
    }

    /// Replaces the values that begin so many bytes before the end of a match.
    fn replace_values<'a>(
        &mut self,
        names: &Regex,
        line: Cow<'a, str>,
        extent: ValueExtent,
        before_end: usize,
    ) -> Cow<'a, str> {
        let mut replaced = String::new();
        let mut done = 0;
        let mut from = 0;
        while let Some(name) = names.find_at(&line, from) {
            from = name.end();
            let Some(found) = secret_value::find(&line, name.end() - before_end, extent) else { continue };
            replaced.push_str(&line[done..found.range.start]);
            replaced.push_str(REDACTED);
            done = found.range.end;
            from = done.max(from);
            if !found.open.is_empty() {
                self.open_brackets = found.open;
                self.collection_lines = MAX_COLLECTION_LINES;
            }
        }
        if replaced.is_empty() {
            return line;
        }
        replaced.push_str(&line[done..]);
        Cow::Owned(replaced)
    }

    fn is_key_line(&mut self, line: &str) -> bool {
        let marker = |at: &str| line.rfind(at).filter(|at| line[*at..].contains(PRIVATE_KEY));
        let (begin, end) = (marker(KEY_BEGIN), marker(KEY_END));
        if begin > end {
            self.open_keys += 1;
            self.key_lines = MAX_KEY_LINES;
            return true;
        }
        if end.is_some() {
            let was_open = self.open_keys > 0;
            if begin.is_none() {
                self.open_keys = self.open_keys.saturating_sub(1);
            }
            // On one line, the text around the key stays.
            return was_open || begin.is_none();
        }
        if self.open_keys > 0 {
            self.key_lines -= 1;
            if self.key_lines == 0 {
                self.open_keys = 0;
            }
            return true;
        }
        // A line of a key whose beginning was dropped or is in another entry.
        let is_last = self.is_in_base64 && is_end_of_base64(last_word(line));
        self.is_in_base64 = has_base64_line(line);
        self.is_in_base64 || is_last
    }
}

/// Returns `true` if a word of the line is as long as a line of a PEM file and looks like one.
fn has_base64_line(line: &str) -> bool {
    let words = BASE64_WORD.iter().flat_map(|word| word.captures_iter(line));
    words.filter_map(|found| found.name("secret")).any(|word| {
        let has = |kind: fn(&u8) -> bool| word.as_str().as_bytes().iter().any(kind);
        // A hash in hexadecimal digits is no secret, and reports need it.
        let is_hash = word.as_str().bytes().all(|byte| byte.is_ascii_hexdigit());
        !is_hash && has(u8::is_ascii_uppercase) && has(u8::is_ascii_lowercase) && has(u8::is_ascii_digit)
    })
}

fn last_word(line: &str) -> &str {
    line.rsplit([' ', '\t']).next().unwrap_or_default()
}

/// Returns `true` for what may be the last line of a PEM file, which is shorter.
fn is_end_of_base64(word: &str) -> bool {
    let has_length = word.len().is_multiple_of(4) && (word.len() >= 16 || word.ends_with('='));
    has_length && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte))
}

fn replace_matches<'a>(form: &Regex, line: Cow<'a, str>) -> Cow<'a, str> {
    match form.replace_all(&line, replacement) {
        Cow::Borrowed(_) => line,
        Cow::Owned(replaced) => Cow::Owned(replaced),
    }
}

fn replacement(found: &Captures<'_>) -> String {
    let whole = &found[0];
    let Some(secret) = found.name("secret") else { return REDACTED.to_owned() };
    let start = secret.start() - found.get_match().start();
    let end = secret.end() - found.get_match().start();
    format!("{}{REDACTED}{}", &whole[..start], &whole[end..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const JWT: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJlLXNpZ25hdHVyZQ";

    #[test]
    fn every_form_is_a_valid_expression() {
        assert_eq!(FORMS.len(), 13);
        assert!(CONTROL_SEQUENCE.is_some() && BASE64_WORD.is_some());
    }

    #[rstest]
    #[case::jwt(&format!("token is {JWT}, ok"), "token is [redacted], ok")]
    #[case::bearer("got Bearer abcdef-0123456789.x from 10.0.0.1", "got Bearer [redacted] from 10.0.0.1")]
    #[case::header("> Authorization: Basic dXNlcjpwYXNz", "> Authorization: [redacted]")]
    #[case::header_of_go(
        r#"map[Authorization:[Bearer s3cret-s3cret] Accept:[*/*]]"#,
        "map[Authorization:[redacted] Accept:[*/*]]"
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
    #[case::coloured(
        "\x1b[3mtoken\x1b[0m\x1b[2m=\x1b[0mhunter2 \x1b[1;31mred\x1b[0m",
        "token=[redacted] red"
    )]
    #[case::header_with_quotes(
        r#"Authorization: Token token="hunter2", x="hunter2""#,
        "Authorization: [redacted]"
    )]
    #[case::header_of_digest(
        r#"{"authorization":"Digest response=\"hunter2\", uri=\"hunter2\"","a":1}"#,
        r#"{"authorization":"[redacted]","a":1}"#
    )]
    #[case::header_of_rust(
        r#"("authorization", "Token hunter2"), ("a", "b")"#,
        r#"("authorization", "[redacted]"), ("a", "b")"#
    )]
    #[case::bearer_in_quotes(r#"with Bearer "hunter2", ok"#, r#"with Bearer "[redacted]", ok"#)]
    #[case::cookies("Cookie: a=hunter2; session=hunter2", "Cookie: [redacted]")]
    #[case::escaped_quote(r#"{"password":"hun\"ter2","a":1}"#, r#"{"password":"[redacted]","a":1}"#)]
    #[case::backslash_at_the_end(r#"{"password":"hunter2\\","a":1}"#, r#"{"password":"[redacted]","a":1}"#)]
    #[case::nested_escaped_quote(
        r#"msg="{\"password\":\"hun\\\"ter2\",\"a\":1}""#,
        r#"msg="{\"password\":\"[redacted]\",\"a\":1}""#
    )]
    #[case::twice_nested(
        r#"a="b=\"{\\\"token\\\":\\\"hunter2\\\",\\\"c\\\":1}\"""#,
        r#"a="b=\"{\\\"token\\\":\\\"[redacted]\\\",\\\"c\\\":1}\"""#
    )]
    #[case::go_syntax(
        r#"Secrets:map[string]string{"userKey":"hunter2", "b":"hun\"}ter2"}, Volume:"v""#,
        r#"Secrets:[redacted], Volume:"v""#
    )]
    #[case::cut_map(r#"secrets:{"a":"b","userKey":"hunter2"#, "secrets:[redacted]")]
    #[case::cut_go_map("Secrets:map[user:hunter2 key:hun", "Secrets:[redacted]")]
    #[case::brace_after_escaped_quote(
        r#"{"secrets":{"a":"x\"}hunter2"},"b":1}"#,
        r#"{"secrets":[redacted],"b":1}"#
    )]
    #[case::bracket_in_a_go_map("Secrets:map[user:a]hunter2 key:x] Volume:v", "Secrets:[redacted] Volume:v")]
    #[case::variable_of_the_kubelet(
        "EnvVar{Name:DB_PASSWORD,Value:hunter2, hunter2,ValueFrom:nil,}",
        "EnvVar{Name:DB_PASSWORD,Value:[redacted],ValueFrom:nil,}"
    )]
    #[case::variable_in_json(
        r#"{"name":"DB_PASSWORD","value":"hunter2"},"#,
        r#"{"name":"DB_PASSWORD","value":"[redacted]"},"#
    )]
    #[case::variable_of_protobuf(
        r#"env:{name:"API_TOKEN" value:"hunter2"}"#,
        r#"env:{name:"API_TOKEN" value:"[redacted]"}"#
    )]
    #[case::secret_key("secretKey: hunter2", "secretKey: [redacted]")]
    #[case::variable_of_a_shell("MINIO_SECRET_KEY=hunter2 x", "MINIO_SECRET_KEY=[redacted] x")]
    #[case::list("tokens:[hunter2 hunter2] x", "tokens:[redacted] x")]
    #[case::list_of_strings(r#"{"token":["hunter2","hunter2"],"a":1}"#, r#"{"token":[redacted],"a":1}"#)]
    #[case::short_name("pwd=hunter2 x", "pwd=[redacted] x")]
    #[case::registry(r#"{"auth":"aHVudGVyMg==","a":1}"#, r#"{"auth":"[redacted]","a":1}"#)]
    #[case::registry_in_base64(".dockerconfigjson: eyJodW50ZXIyIjoxfQ==", ".dockerconfigjson: [redacted]")]
    #[case::arrow("password => hunter2 x", "password => [redacted] x")]
    #[case::assignment(r#"password := "hunter2" x"#, r#"password := "[redacted]" x"#)]
    #[case::option_of_rust(r#"token: Some("hunter2"), a: 1"#, "token: [redacted], a: 1")]
    #[case::pointer_of_go(r#"Secret:&v1.Secret{Data:"hunter2"}, a:1"#, "Secret:[redacted], a:1")]
    #[case::index(r#"headers["x-auth-token"]="hunter2""#, r#"headers["x-auth-token"]="[redacted]""#)]
    #[case::option(
        "run --token abc.hunter2 --password 'hunter2 x' y",
        "run --token [redacted] --password '[redacted]' y"
    )]
    #[case::option_in_a_list(r#"["--token","hunter2","y"]"#, r#"["--token","[redacted]","y"]"#)]
    #[case::key_in_base64("tls.key: LS0tLS1CRUdJTiBQUklWQVRF x", "tls.key: [redacted] x")]
    #[case::url_in_capitals("HTTPS://user:hunter2@h/p", "HTTPS://user:[redacted]@h/p")]
    #[case::token_in_a_url("https://hunter2@github.com/a", "https://[redacted]@github.com/a")]
    #[case::at_sign_in_a_url("https://user:p@hunter2@h/p", "https://user:[redacted]@h/p")]
    #[case::key_of_pgp(
        "x -----BEGIN PGP PRIVATE KEY BLOCK-----\\nhunter2\\n-----END PGP PRIVATE KEY BLOCK----- y",
        "x [redacted] y"
    )]
    fn a_secret_that_is_nested_or_quoted_is_replaced(#[case] line: &str, #[case] expected: &str) {
        assert_eq!(Redactor::default().line(line), expected);
    }

    #[test]
    fn multiline_collection_of_secrets_is_redacted() {
        let text = "a {\n  \"secrets\": {\n    \"x\": \"hun}ter2\",\n    \"y\": {\n      \"z\": \"hunter2\"\n    }\n  }, \"b\": 1\n}\n";
        let hidden = format!("{REDACTED}\n").repeat(4);
        let expected = format!("a {{\n  \"secrets\": {REDACTED}\n{hidden}{REDACTED}, \"b\": 1\n}}\n");
        assert_eq!(Redactor::text(text), expected);
    }

    /// After a limited number of lines, and at the first ordinary line, the log is printed again.
    #[test]
    fn unclosed_collection_does_not_redact_everything() {
        let text = format!("secrets: {{\n{}last", "  \"a\": \"b\",\n".repeat(2 * MAX_COLLECTION_LINES));
        assert!(Redactor::text(&text).ends_with("  \"a\": \"b\",\nlast"));
        // An ordinary line does not belong to the collection.
        assert!(Redactor::text("secrets: {\nI0102 next\nlast").ends_with("\nlast"));
    }

    /// A second key begins before the first one ends.
    #[test]
    fn nested_private_keys_are_redacted_completely() {
        let begin = "-----BEGIN PRIVATE KEY-----\n";
        let end = "-----END PRIVATE KEY-----\n";
        let text = format!("{begin}a\n{begin}b\n{end}hunter2\n{end}after\n");
        assert_eq!(Redactor::text(&text), format!("{}after\n", format!("{REDACTED}\n").repeat(7)));
    }

    #[test]
    fn pgp_private_key_is_redacted() {
        let text =
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nhunter2\n-----END PGP PRIVATE KEY BLOCK-----\nafter";
        assert_eq!(Redactor::text(text), format!("{}after", format!("{REDACTED}\n").repeat(3)));
    }

    /// The lines may be JSON or have a timestamp, and the short last line of the key is redacted as well.
    #[test]
    fn key_without_header_is_redacted_completely() {
        let line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        let wrapped = format!("{{\"log\":\"{line}\\n\",\"stream\":\"stderr\"}}");
        assert_eq!(Redactor::default().line(&wrapped), REDACTED);
        let text = format!("2026 {line}\n2026 aHVudGVyMg==\n2026 a word\n");
        assert_eq!(Redactor::text(&text), format!("{REDACTED}\n{REDACTED}\n2026 a word\n"));
    }

    #[rstest]
    #[case::hash("image sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")]
    #[case::plain("2026-01-02T03:04:05Z  INFO csi: published volume pvc-1 at /var/lib/kubelet/pods/x")]
    #[case::long_path("/var/lib/kubelet/pods/volumes/kubernetes/csi/directory/of/a/volume/x")]
    #[case::certificate("-----BEGIN CERTIFICATE-----")]
    #[case::mount("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue")]
    fn line_without_a_secret_is_kept(#[case] line: &str) {
        assert_eq!(Redactor::default().line(line), line);
    }

    #[test]
    fn multiline_private_key_is_redacted() {
        let text = "before\n2026 -----BEGIN PRIVATE KEY-----\n2026 MIIEvQ\n2026 short==\n2026 -----END PRIVATE KEY-----\nafter\n";
        let expected = format!("before\n{}after\n", format!("{REDACTED}\n").repeat(4));
        assert_eq!(Redactor::text(text), expected);
    }

    #[test]
    fn private_key_without_header_is_redacted() {
        let line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        assert_eq!(Redactor::text(&format!("{line}\n{line}\nx")), format!("{REDACTED}\n{REDACTED}\nx"));
    }

    /// After a limited number of lines the log is printed again.
    #[test]
    fn unterminated_key_does_not_redact_everything() {
        let text = format!("-----BEGIN RSA PRIVATE KEY-----\n{}last", "a line\n".repeat(2 * MAX_KEY_LINES));
        assert!(Redactor::text(&text).ends_with("a line\nlast"));
    }

    proptest! {
        #[test]
        fn token_is_redacted_at_any_position(before in "[ -~]{0,40}", after in "[ -~]{0,40}") {
            let line = format!("{before} {JWT} {after}");
            prop_assert!(!Redactor::default().line(&line).contains(JWT));
        }

        /// The secret has any content and may be nested in several levels of JSON strings.
        #[test]
        fn secret_string_is_redacted_despite_escapes(value in "[ -~]{1,40}", levels in 0..3) {
            let secret = format!("hunter2{value}hunter2");
            let mut line = serde_json::json!({ "before": 1, "password": secret, "zlast": "kept" }).to_string();
            for _ in 0..levels {
                line = serde_json::json!({ "msg": line }).to_string();
            }
            let redacted = Redactor::default().line(&line).into_owned();
            prop_assert!(!redacted.contains("hunter2") && redacted.contains("kept"), "{redacted}");
        }

        #[test]
        fn text_with_brackets_never_panics(text in "(secrets|token|[:={}\\[\\]()<>\"'\\\\\n,& äx]){0,60}") {
            Redactor::text(&text);
        }

        #[test]
        fn any_text_is_processed_without_panic(text in "\\PC{0,200}") {
            Redactor::text(&text);
        }
    }
}
