//! Replaces secrets in texts that leave the node.
//!
//! A value has no form that all programs share: it may have quotes, brackets, escapes or several words. Everything that follows the name of
//! a secret on its line is therefore replaced, and what stays is what precedes it.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Match, Regex};

/// What stands in place of a secret.
const REDACTED: &str = "[redacted]";

/// The lines of a private key after which its end is no longer expected. A key of 16,384 bits has 200.
const MAX_KEY_LINES: usize = 400;

/// The lines of a collection of secrets after which its end is no longer expected.
const MAX_COLLECTION_LINES: usize = 200;

/// Between a name and its value.
const SEPARATOR: &str = r#"["'`\\\])]*\s*(?::=|=>|[:=])\s*"#;

/// The expressions by which secrets are found.
struct Forms {
    /// Colours and other control sequences of a terminal, which could stand between a name and its value.
    control_sequence: Regex,
    /// The first or last line of a private key.
    key_marker: Regex,
    /// A line of a PEM file, possibly within a string. A program may print something before it.
    base64_word: Regex,
    /// Secrets that have a form of their own. The groups `before` and `after` are none.
    tokens: Vec<Regex>,
    /// Names whose values are secrets, with the separators.
    names: Vec<Regex>,
}

static FORMS: LazyLock<Forms> = LazyLock::new(|| Forms::new().expect("the expressions are valid"));

impl Forms {
    fn new() -> Result<Self, regex::Error> {
        let tokens = [
            // A PEM file in base64, as in kubeconfigs and Secrets. Certificates have this form as well.
            r"LS0tLS1CRUdJTi[A-Za-z0-9+/=_-]+",
            // A JSON Web Token: base64url of {" is eyJ.
            r"eyJ[A-Za-z0-9_=-]{6,}\.[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]*)*",
            r#"(?i)(?<before>\b(?:(?:bearer|basic)\s+)+(?:\\*["'`])?)[A-Za-z0-9._~+/=-]{6,}"#,
            // User and password of a URL, or a token in place of both.
            r#"(?i)(?<before>\b[a-z][a-z0-9+.-]*://(?:[^\s/:@"'`]*:)?)[^\s/"'`]+(?<after>@)"#,
            r"\bAKIA[A-Z0-9]{16}\b",
        ];
        let names = [
            format!(r"\bauthorization{SEPARATOR}"),
            r#"\bauthorization\\*["'`]\)?\s*,\s*"#.to_owned(),
            format!(r"cookies?{SEPARATOR}"),
            // The text form of protobuf has no colon before a bracket.
            r#"secrets?["'`\\]*\s*[{<]"#.to_owned(),
            // Environment variables, as the kubelet, JSON and protobuf print them.
            format!(
                r#"\bname["'`\\]*\s*[:=]\s*["'`\\]*[\w.-]*(?:pass|pwd|secret|token|key|cred|auth)[\w.-]*["'`\\]*,?\s*["'`\\]*value{SEPARATOR}"#
            ),
            format!(
                r"(?:pass(?:word|wd|phrase)|pwd|secret|token|credential|dockerconfigjson|dockercfg|(?:api|access|private|session|client|account|encryption)[_.-]?key|\b(?:auth|pass))(?:s|[_.-]?(?:key|data|value|string))?{SEPARATOR}"
            ),
            // The same as options of a command, in a line or in a list.
            r#"--[\w-]*(?:token|password|passphrase|secret)(?:\\*["'`]\s*,?|\s)\s*"#.to_owned(),
        ];
        Ok(Self {
            control_sequence: Regex::new(r"(?:\x1b\[|\u{9b})[0-?]*[ -/]*[@-~]|\x1b[()].")?,
            key_marker: Regex::new(r"-----(BEGIN|END) [A-Z0-9 ]*PRIVATE KEY")?,
            base64_word: Regex::new(r#"(?:^|[\s"'`])(?<word>[A-Za-z0-9+/=]{60,80})(?:$|[\s"'`\\])"#)?,
            tokens: tokens.into_iter().map(Regex::new).collect::<Result<_, _>>()?,
            names: names
                .into_iter()
                .map(|name| Regex::new(&format!("(?i){name}")))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Replaces secrets in the lines of one text, which it gets in their order: a private key has several lines.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Private keys that have begun and not ended. Several programs may write to one log.
    open_keys: usize,
    /// Lines of a private key that may still follow.
    key_lines: usize,
    /// The line before was one of a key whose beginning is unknown.
    is_in_base64: bool,
    collection: Option<Collection>,
}

/// A collection of secrets that continues on the next line.
#[derive(Debug)]
struct Collection {
    /// The indentation of its name.
    indentation: usize,
    /// The line before ends in an opening bracket or a comma.
    ends_open: bool,
    /// Lines that may still follow.
    lines: usize,
}

impl Redactor {
    /// Returns the text without secrets.
    pub(super) fn text(text: &str) -> String {
        let mut redactor = Self::default();
        text.split_inclusive('\n')
            .map(|line| {
                let content = line.trim_end_matches(['\r', '\n']);
                redactor.line(content).into_owned() + &line[content.len()..]
            })
            .collect()
    }

    /// Returns the line without secrets and without control sequences of a terminal.
    fn line<'a>(&mut self, line: &'a str) -> Cow<'a, str> {
        let line = FORMS.control_sequence.replace_all(line, "");
        let is_hidden = self.is_of_key(&line) | self.is_of_collection(&line);
        let names = FORMS.names.iter().filter_map(|name| name.find(&line));
        let name = names.min_by_key(|name| name.end());
        // What is hidden may have the name of another secret.
        if self.collection.is_none() {
            self.collection = name.and_then(|name| Collection::begun(&line, name));
        }
        if is_hidden {
            return Cow::Borrowed(REDACTED);
        }
        let Some(name) = name else { return replace_tokens(&line).into() };
        // A token in which the name is would show its beginning.
        if let Some(start) = start_of_token_across(&line, name.start()) {
            return Cow::Owned(replace_tokens(&line[..start]) + REDACTED);
        }
        let value = if line[name.end()..].trim_end().is_empty() { "" } else { REDACTED };
        Cow::Owned(replace_tokens(&line[..name.start()]) + name.as_str() + value)
    }

    fn is_of_key(&mut self, line: &str) -> bool {
        let mut has_marker = false;
        for marker in FORMS.key_marker.captures_iter(line) {
            has_marker = true;
            if &marker[1] == "BEGIN" {
                self.open_keys += 1;
                self.key_lines = MAX_KEY_LINES;
            } else {
                self.open_keys = self.open_keys.saturating_sub(1);
            }
        }
        if has_marker {
            return true;
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

    fn is_of_collection(&mut self, line: &str) -> bool {
        let Some(collection) = &mut self.collection else { return false };
        if line.trim().is_empty() {
            return true;
        }
        // The items of a list in YAML may have the indentation of its name.
        let is_item = indentation(line) == collection.indentation && line.trim_start().starts_with("- ");
        let is_deeper = is_item || indentation(line) > collection.indentation;
        let is_closing = line.trim_start().starts_with(['}', ']', ')', '>']);
        let is_part = is_deeper || is_closing || collection.ends_open;
        collection.ends_open = ends_open(line);
        collection.lines -= 1;
        let is_end = is_closing && !is_deeper && !collection.ends_open;
        if !is_part || is_end || collection.lines == 0 {
            self.collection = None;
        }
        is_part
    }
}

impl Collection {
    /// Returns the collection that may continue after this line.
    fn begun(line: &str, name: Match<'_>) -> Option<Self> {
        let named = &line[name.start()..];
        // Whether the collection ends on this line is unknown: a string may have closing brackets.
        let is_open = named.contains(['{', '[', '(', '<']);
        // Without a value, or with an indicator of a block, YAML has it on the next lines.
        let value = line[name.end()..].trim_end();
        let is_indicator = |rest: &str| rest.chars().all(|character| "+-0123456789".contains(character));
        let is_block = value.is_empty() || value.strip_prefix(['|', '>']).is_some_and(is_indicator);
        (is_open || is_block).then(|| Self {
            indentation: indentation(line),
            ends_open: ends_open(named),
            lines: MAX_COLLECTION_LINES,
        })
    }
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn ends_open(line: &str) -> bool {
    line.trim_end().ends_with(['{', '[', '(', '<', ','])
}

fn replace_tokens(text: &str) -> String {
    let replace =
        |text: String, token: &Regex| token.replace_all(&text, "${before}[redacted]${after}").into();
    FORMS.tokens.iter().fold(text.to_owned(), replace)
}

/// Returns where the secret of a token begins that begins before the position and ends after it.
fn start_of_token_across(line: &str, position: usize) -> Option<usize> {
    let found = FORMS.tokens.iter().flat_map(|token| token.captures_iter(line));
    let secrets = found.map(|found| {
        let start = found.name("before").map_or(found.get_match().start(), |before| before.end());
        start..found.get_match().end()
    });
    secrets.filter(|secret| secret.start < position && position < secret.end).map(|secret| secret.start).min()
}

/// Returns `true` if a word of the line is as long as a line of a PEM file and looks like one.
fn has_base64_line(line: &str) -> bool {
    FORMS.base64_word.captures_iter(line).any(|found| {
        let word = found["word"].as_bytes();
        let has = |kind: fn(&u8) -> bool| word.iter().any(kind);
        // A hash in hexadecimal digits is no secret, and reports need it.
        let is_hash = word.iter().all(u8::is_ascii_hexdigit);
        !is_hash && has(u8::is_ascii_uppercase) && has(u8::is_ascii_lowercase) && has(u8::is_ascii_digit)
    })
}

fn last_word(line: &str) -> &str {
    line.trim_end().rsplit([' ', '\t']).next().unwrap_or_default()
}

/// Returns `true` for what may be the last line of a PEM file, which is shorter.
fn is_end_of_base64(word: &str) -> bool {
    let has_length = word.len().is_multiple_of(4) && (word.len() >= 16 || word.ends_with('='));
    has_length && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const JWT: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJlLXNpZ25hdHVyZQ";

    #[rstest]
    #[case::jwt(&format!("token is {JWT}, ok"), "token is [redacted], ok")]
    #[case::bearer("got Bearer abcdef-0123456789.x from 10.0.0.1", "got Bearer [redacted] from 10.0.0.1")]
    #[case::repeated_scheme("got Bearer Bearer hunter2-hunter2 ok", "got Bearer Bearer [redacted] ok")]
    #[case::bearer_in_quotes(r#"with Bearer "hunter2", ok"#, r#"with Bearer "[redacted]", ok"#)]
    #[case::url("https://user:hunter2@host/path", "https://user:[redacted]@host/path")]
    #[case::url_in_capitals("HTTPS://user:hunter2@h/p", "HTTPS://user:[redacted]@h/p")]
    #[case::token_in_a_url("https://hunter2@github.com/a", "https://[redacted]@github.com/a")]
    #[case::at_sign_in_a_url("https://user:p@hunter2@h/p", "https://user:[redacted]@h/p")]
    #[case::key_in_base64("tls.key: LS0tLS1CRUdJTiBQUklWQVRF x", "tls.key: [redacted] x")]
    #[case::access_key("id AKIAHUNTER2HUNTER2HU x", "id [redacted] x")]
    #[case::key_on_one_line(
        r"key=-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\n done",
        "[redacted]"
    )]
    #[case::name_after_basic(
        "using basic authorization: dXNlcjpwYXNz",
        "using basic authorization: [redacted]"
    )]
    #[case::name_after_bearer("bearer authorization=Token hunter2", "bearer authorization=[redacted]")]
    #[case::cookie_after_basic("basic Cookie: x", "basic Cookie: [redacted]")]
    #[case::password_after_basic("basic password: x", "basic password: [redacted]")]
    #[case::name_in_a_url("redis://cache:6379,password=p@ss", "redis://cache:[redacted]")]
    #[case::name_in_a_query("postgres://h:5432?password=p@ss", "postgres://h:[redacted]")]
    #[case::name_in_a_password("https://user:mypassword=x@h/p", "https://user:[redacted]")]
    #[case::token_before_a_name("Bearer hunter2 token=x", "Bearer [redacted] token=[redacted]")]
    fn secret_with_own_form_is_replaced(#[case] line: &str, #[case] expected: &str) {
        assert_eq!(Redactor::default().line(line), expected);
    }

    /// What precedes the value stays.
    #[rstest]
    #[case::header("> Authorization: ", "Basic dXNlcjpwYXNz")]
    #[case::header_of_go("map[Authorization:", "[Bearer s3cret-s3cret] Accept:[*/*]]")]
    #[case::header_in_json(
        r#"{"authorization":"#,
        r#""Digest response=\"hunter2\", uri=\"hunter2\"","a":1}"#
    )]
    #[case::header_with_quotes("Authorization: ", r#"Token token="hunter2", x="hunter2""#)]
    #[case::header_of_rust(r#"("authorization", "#, r#""Token hunter2"), ("a", "b")"#)]
    #[case::cookies("Cookie: ", "a=hunter2; session=hunter2")]
    #[case::csi_of_go(
        r#"GRPC request: {"volume_id":"v","node_stage_secrets":"#,
        r#"{"user":"u","key":"hunt}er2"},"x":1}"#
    )]
    #[case::csi_of_protobuf(r#"volume_id:"v" secrets:"#, r#"{key:"user" value:"hunter2"} secrets:<key:"a">"#)]
    #[case::csi_without_colon(r#"volume_id:"v" secrets {"#, r#"key:"user" value:"hunter2"}"#)]
    #[case::csi_of_a_go_map("Secrets:", "map[user:a]hunter2 key:x] Volume:v")]
    #[case::csi_of_go_syntax("Secrets:", r#"map[string]string{"userKey":"hunter2", "b":"hun\"}ter2"}"#)]
    #[case::escaped_json(r#"msg="{\"secrets\":"#, r#"{\"a\":\"hunter2\"},\"b\":1}""#)]
    #[case::twice_nested(r#"a="b=\"{\\\"token\\\":"#, r#"\\\"hunter2\\\",\\\"c\\\":1}\"""#)]
    #[case::escaped_quote(r#"{"password":"#, r#""hun\"ter2","a":1}"#)]
    #[case::password("mount -o username=u,password=", "hunter2,rw")]
    #[case::quoted_password("password: ", r#""hunter2 hunter3", next"#)]
    #[case::key_of_kubeconfig("    client-key-data: ", "aHVudGVyMg==")]
    #[case::variable_of_the_kubelet("EnvVar{Name:DB_PASSWORD,Value:", "hunter2, hunter2,ValueFrom:nil,}")]
    #[case::variable_in_json(r#"{"name":"DB_PASSWORD","value":"#, r#""hunter2"},"#)]
    #[case::variable_of_protobuf(r#"env:{name:"API_TOKEN" value:"#, r#""hunter2"}"#)]
    #[case::variable_of_a_shell("MINIO_SECRET_KEY=", "hunter2 x")]
    #[case::secret_key("secretKey: ", "hunter2")]
    #[case::list("tokens:", "[hunter2 hunter2] x")]
    #[case::short_name("pwd=", "hunter2 x")]
    #[case::registry(r#"{"auth":"#, r#""aHVudGVyMg==","a":1}"#)]
    #[case::registry_in_base64(".dockerconfigjson: ", "eyJodW50ZXIyIjoxfQ==")]
    #[case::arrow("password => ", "hunter2 x")]
    #[case::assignment("password := ", r#""hunter2" x"#)]
    #[case::option_of_rust("token: ", r#"Some("hunter2"), a: 1"#)]
    #[case::index(r#"headers["x-auth-token"]="#, r#""hunter2""#)]
    #[case::option("run --token ", "abc.hunter2 --password 'hunter2 x' y")]
    #[case::option_in_a_list(r#"["--token","#, r#""hunter2","y"]"#)]
    fn value_of_secret_name_is_replaced(#[case] before: &str, #[case] value: &str) {
        let redacted = format!("{before}{REDACTED}");
        assert_eq!(Redactor::default().line(&format!("{before}{value}")), redacted);
    }

    #[test]
    fn colours_do_not_hide_secrets() {
        let line = "\x1b[3mtoken\x1b(B\x1b[0m\x1b[2m=\x1b[0mhunter2 \x1b[1;31mred\x1b[0m";
        assert_eq!(Redactor::default().line(line), "token=[redacted]");
    }

    #[rstest]
    #[case::json(
        "a {\n  \"secrets\": {\n",
        "    \"x\": \"hun}ter2\",\n    \"y\": {\n      \"z\": \"hunter2\"\n    }\n  }, \"b\": 1\n",
        "}\n"
    )]
    #[case::json_without_indentation(
        "a\n\"secrets\": {\n",
        "\"x\": \"hunter2\",\n\"y\": [\n\"hunter2\"\n],\n\"z\": 1\n}\n",
        "b\n"
    )]
    #[case::entry_on_first_line("\"secrets\": {\"x\": \"hunter2\",\n", "  \"y\": \"hunter2\"}\n", "b\n")]
    #[case::bracket_in_a_string("\"secrets\": {\"x\": \"a}b\",\n", "\"y\": \"hunter2\"}\n", "b\n")]
    #[case::protobuf("secrets {\n", "  key: \"a\"\n  value: \"hunter2\"\n}\n", "b\n")]
    #[case::blank_line("secrets {\n", "  key: \"a\"\n\n  value: \"hunter2\"\n}\n", "b\n")]
    #[case::beside_a_private_key(
        "\n\"secrets\": {\"tls\": \"-----BEGIN PRIVATE KEY-----\\n...-----END PRIVATE KEY-----\",\n",
        "  \"user\": \"hunter2\"}\n",
        "b\n"
    )]
    #[case::bracket_in_the_only_string("  secrets { key: \"a}b\"\n", "    value: \"hunter2\" }\n", "b\n")]
    #[case::yaml_items("passwords:\n", "- hunter2\n- hunter3\n", "a: b\n")]
    #[case::yaml_indentation("password: |2+\n", "    hunter2\n", "a: b\n")]
    #[case::yaml("  password: |-\n", "    hunter2\n    hunter3\n", "  a: b\n")]
    #[case::yaml_collection("secrets:\n", "  a: hunter2\n", "b: c\n")]
    #[case::cut_map("secrets:{\"a\":\"b\",\"userKey\":\"hunter2\n", "", "I0102 next\n")]
    fn multiline_secrets_are_redacted(#[case] begin: &str, #[case] hidden: &str, #[case] after: &str) {
        let redacted = Redactor::text(&format!("{begin}{hidden}{after}"));
        assert!(!redacted.contains("hunter"), "{redacted}");
        let end = format!("\n{}{after}", format!("{REDACTED}\n").repeat(hidden.lines().count()));
        assert!(redacted.ends_with(&end), "{redacted}");
    }

    /// After a limited number of lines, and at the first ordinary line, the log is printed again.
    #[test]
    fn unclosed_collection_does_not_redact_everything() {
        let text = format!("secrets: {{\n{}last", "  \"a\": \"b\",\n".repeat(2 * MAX_COLLECTION_LINES));
        assert!(Redactor::text(&text).ends_with("  \"a\": \"b\",\nlast"));
        // An ordinary line does not belong to the collection.
        assert!(Redactor::text("secrets: {\nI0102 next\nlast").ends_with("\nlast"));
    }

    /// In the case `nested`, a second key begins before the first one ends.
    #[rstest]
    #[case::with_time(
        "2026 -----BEGIN PRIVATE KEY-----\n2026 MIIEvQ\n2026 short==\n2026 -----END PRIVATE KEY-----\n"
    )]
    #[case::of_pgp("-----BEGIN PGP PRIVATE KEY BLOCK-----\nhunter2\n-----END PGP PRIVATE KEY BLOCK-----\n")]
    #[case::nested(
        "-----BEGIN PRIVATE KEY-----\na\n-----BEGIN PRIVATE KEY-----\nb\n-----END PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    )]
    fn private_key_is_redacted_completely(#[case] key: &str) {
        let hidden = format!("{REDACTED}\n").repeat(key.lines().count());
        assert_eq!(Redactor::text(&format!("before\n{key}after\n")), format!("before\n{hidden}after\n"));
    }

    /// The lines may be JSON or have a timestamp, and the short last line of the key is redacted as well.
    #[test]
    fn key_without_header_is_redacted_completely() {
        let line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        let wrapped = format!("{{\"log\":\"{line}\\n\",\"stream\":\"stderr\"}}");
        assert_eq!(Redactor::default().line(&wrapped), REDACTED);
        let text = format!("2026 {line}\n{line}\n2026 aHVudGVyMg==\n2026 a word\n");
        assert_eq!(Redactor::text(&text), format!("{}2026 a word\n", format!("{REDACTED}\n").repeat(3)));
    }

    #[test]
    fn lines_may_end_in_crlf() {
        let line = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj";
        for (begin, end) in [("", ""), ("-----BEGIN PRIVATE KEY-----\r\n", "-----END PRIVATE KEY-----\r\n")] {
            let key = format!("{begin}{line}\r\naHVudGVyMg==\r\n{end}");
            let hidden = format!("{REDACTED}\r\n").repeat(key.lines().count());
            assert_eq!(Redactor::text(&format!("a\r\n{key}b\r\n")), format!("a\r\n{hidden}b\r\n"));
        }
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
            let mut line = serde_json::json!({ "before": "kept", "password": secret }).to_string();
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
