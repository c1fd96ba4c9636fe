//! `loopfs node-identity`: the names by which Kubernetes knows this machine.
//!
//! A kubelet registers its node under a name, which must be a DNS subdomain (RFC 1123), and reports the machine id and the
//! name of the operating system in `status.nodeInfo`. The functions here read the same files as systemd does, also below
//! another root directory, such as the root of the host in a container. Absolute links, such as `/etc/os-release` of NixOS,
//! lead to files below that directory (openat2(2), Linux 5.6).

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use crate::output::{Output, object, printable};

/// Files of an identity are small. A larger one is a mistake or an attack, and is not read.
const LARGEST_FILE: u64 = 64 << 10;
const MACHINE_ID: &str = "etc/machine-id";
const OS_RELEASE: [&str; 2] = ["etc/os-release", "usr/lib/os-release"];
/// The host name of the UTS namespace of the process.
const HOSTNAME: &str = "proc/sys/kernel/hostname";
/// The host name that systemd sets at boot (hostname(5)).
const STATIC_HOSTNAME: &str = "etc/hostname";
/// os-release(5): the name if `PRETTY_NAME` is not set.
const UNNAMED_SYSTEM: &str = "Linux";
/// Names that machines without a name of their own have.
const UNNAMED_HOSTS: [&str; 3] = ["localhost", "localhost.localdomain", "(none)"];
/// The kubelet also writes the name into the label `kubernetes.io/hostname`. Kubernetes limits the value of a label to this
/// length and refuses the node if it is longer.
const LONGEST_NODE_NAME: usize = 63;

/// Print the node name, machine id and operating system in the form that Kubernetes accepts
///
/// The node name is the host name in lowercase. If the machine has none, or one that is no DNS subdomain of at most 63
/// characters, it is the machine id in hexadecimal. To give it to the kubelet:
///
///   kubelet --hostname-override="$(loopfs --json node-identity | jq --raw-output .node_name)"
///
/// If only the machine id or the operating system cannot be read, the command prints the reason on standard error, and null
/// in JSON. With --root, the host name is that of etc/hostname below the directory, and absolute links stay below it.
///
/// JSON: {"node_name", "machine_id" | null, "os_name" | null}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct NodeIdentity {
    /// The directory below which to read etc/hostname, etc/machine-id and etc/os-release
    #[arg(long, default_value = "/", value_name = "DIRECTORY")]
    root: PathBuf,
}

impl NodeIdentity {
    pub(crate) fn run(&self) -> Result<Output> {
        let name = node_name(&self.root)?;
        let id = or_report(machine_id(&self.root));
        let system = or_report(os_name(&self.root));
        let mut text = format!("node name   {name}\n");
        if let Some(id) = &id {
            text.push_str(&format!("machine id  {id}\n"));
        }
        if let Some(system) = &system {
            text.push_str(&format!("system      {system}\n"));
        }
        Ok(Output::new(text, &object! { node_name: name, machine_id: id, os_name: system })?)
    }
}

/// Returns a value that the node can be without, or prints why it cannot be read.
fn or_report(value: Result<String>) -> Option<String> {
    value.map_err(|error| eprintln!("loopfs: {}", printable(&format!("{error:#}")))).ok()
}

/// Reads `/etc/machine-id` below `root`: 32 lowercase hexadecimal digits (machine-id(5)). Kubernetes shows it as
/// `status.nodeInfo.machineID`.
fn machine_id(root: &Path) -> Result<String> {
    parse_machine_id(&read(root, MACHINE_ID)?).with_context(|| used(root, MACHINE_ID))
}

/// Checks an id that may have one newline at its end.
fn parse_machine_id(text: &str) -> Result<String> {
    let id = text.strip_suffix('\n').unwrap_or(text);
    const SET_UP: &str = "run `systemd-machine-id-setup`";
    let wrong = |cause: &str| anyhow!("read the machine id {id:.40?}: {cause}");
    // Images have this word before their first boot.
    if id.is_empty() || id == "uninitialized" {
        return Err(wrong(&format!("the machine has no id yet; {SET_UP}")));
    }
    if id.len() != 32 || !id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(wrong("it must be 32 lowercase hexadecimal digits (machine-id(5))"));
    }
    if id.bytes().all(|byte| byte == b'0') {
        return Err(wrong(&format!("an id of zeros identifies no machine; {SET_UP}")));
    }
    Ok(id.to_owned())
}

/// Returns `PRETTY_NAME` of `/etc/os-release` or else of `/usr/lib/os-release` below `root`, such as `Debian GNU/Linux 13
/// (trixie)`, and `Linux` if the file does not set it (os-release(5)). Kubernetes shows it as `status.nodeInfo.osImage`.
fn os_name(root: &Path) -> Result<String> {
    let [first, second] = OS_RELEASE;
    let (path, text) = match read(root, first) {
        Err(error) if error.downcast_ref() == Some(&Errno::ENOENT) => (second, read(root, second)?),
        read => (first, read?),
    };
    let name = os_release_value(&text, "PRETTY_NAME").with_context(|| used(root, path))?;
    Ok(name.filter(|name| !name.is_empty()).unwrap_or_else(|| UNNAMED_SYSTEM.to_owned()))
}

/// Returns the value of a variable of os-release(5), unquoted as by a shell. The last assignment counts. Returns `None` if
/// there is none.
fn os_release_value(text: &str, variable: &str) -> Result<Option<String>> {
    let mut assignments = text.lines().filter_map(|line| line.trim().split_once('='));
    let Some((_, value)) = assignments.rfind(|(name, _)| *name == variable) else {
        return Ok(None);
    };
    match shlex::split(value).as_deref() {
        Some([]) => Ok(None),
        Some([word]) if !word.chars().any(char::is_control) => Ok(Some(word.clone())),
        _ => bail!(
            "read os-release {variable}: {value:.80?} is not one word with balanced quotes and without control characters"
        ),
    }
}

/// Returns the name under which the kubelet registers a node if it is given none: the host name in lowercase, without white
/// space around it. If the machine has no host name, or one that is not a DNS subdomain of at most 63 characters, it returns
/// the machine id: its 32 hexadecimal digits are a valid name, and stay the same.
///
/// If `root` is the root directory of the process, the host name is that of the kernel. Otherwise it is that of
/// `/etc/hostname` below `root`, because the kernel returns the host name of the container in which the process runs.
fn node_name(root: &Path) -> Result<String> {
    host_name(root).and_then(|host| name_from_host(&host)).or_else(|error| match machine_id(root) {
        Ok(id) => Ok(id),
        Err(no_id) => bail!("name the node after its host: {error:#}, and instead of it {no_id:#}"),
    })
}

/// Returns the host name of the machine with this root directory.
fn host_name(root: &Path) -> Result<String> {
    if is_own_root(root)? {
        return read(root, HOSTNAME);
    }
    let text = read(root, STATIC_HOSTNAME)?;
    let mut lines = text.lines().map(str::trim);
    Ok(lines.find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default().to_owned())
}

/// Returns `true` if `root` is the root directory of the process. Its path does not show that: `/proc/1/root` reads as `/`
/// and leads to another directory in a container.
fn is_own_root(root: &Path) -> Result<bool> {
    let identity = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let given = identity(root).with_context(|| format!("read {}", root.display()))?;
    Ok(given == identity(Path::new("/")).context("read /")?)
}

/// Returns the node name that follows from a host name.
fn name_from_host(host: &str) -> Result<String> {
    let name = host.trim().to_lowercase();
    let wrong = |cause: &str| anyhow!("use the host name {:.80?}: {cause}", host.trim());
    if UNNAMED_HOSTS.contains(&name.as_str()) {
        return Err(wrong("the machine has no name of its own; set one with `hostnamectl hostname`"));
    }
    if name.len() > LONGEST_NODE_NAME {
        return Err(wrong(
            "the label `kubernetes.io/hostname` of a node has at most 63 characters; set a shorter name with `hostnamectl hostname`",
        ));
    }
    if !is_dns_subdomain(&name) {
        return Err(wrong(
            "a node name is a DNS subdomain of letters, digits, `-` and `.`, each part beginning and ending with a letter \
             or digit (RFC 1123)",
        ));
    }
    Ok(name)
}

/// Returns `true` if Kubernetes accepts `name` as the name of a node: a DNS subdomain (RFC 1123). Its length is checked elsewhere.
fn is_dns_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && label.bytes().all(allowed) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.split('.').all(label)
}

/// Reads a small text file below a root directory. Symbolic links, also absolute ones and `..`, do not lead out of it.
fn read(root: &Path, name: &str) -> Result<String> {
    let shown = || format!("read {}", root.join(name).display());
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory = open(root, flags, Mode::empty()).with_context(|| format!("read {}", root.display()))?;
    // O_NONBLOCK: the open of a FIFO would wait for a writer.
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT);
    let file = File::from(openat2(directory.as_fd(), name, how).with_context(shown)?);
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).with_context(shown)?;
    if bytes.len() as u64 > LARGEST_FILE {
        bail!("{}: the file has more than {LARGEST_FILE} bytes", shown());
    }
    let text = String::from_utf8(bytes).with_context(shown)?;
    if text.contains('\0') {
        bail!("{}: the file has a NUL byte", shown());
    }
    Ok(text)
}

/// Returns the context of an error about the content of a file.
fn used(root: &Path, name: &str) -> String {
    format!("use {}", root.join(name).display())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    /// A root directory with these files.
    fn root(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[rstest]
    #[case::with_newline("0123456789abcdef0123456789abcdef\n", true)]
    #[case::without_newline(ID, true)]
    #[case::upper_case("0123456789ABCDEF0123456789abcdef", false)]
    #[case::a_uuid("01234567-89ab-cdef-0123-456789abcdef", false)]
    #[case::short("0123456789abcdef0123456789abcde", false)]
    #[case::sign("+123456789abcdef0123456789abcdef", false)]
    #[case::zeros("00000000000000000000000000000000", false)]
    #[case::before_the_first_boot("uninitialized\n", false)]
    #[case::empty("", false)]
    #[case::second_line("0123456789abcdef0123456789abcdef\n\n", false)]
    fn machine_ids_are_parsed_or_rejected(#[case] text: &str, #[case] good: bool) {
        let root = root(&[(MACHINE_ID, text.as_bytes())]);
        match machine_id(root.path()) {
            Ok(id) => assert!(good && id == ID),
            Err(error) => assert!(!good && format!("{error:#}").contains(MACHINE_ID), "{error:#}"),
        }
    }

    /// A shell would remove the quotes in the same way.
    #[rstest]
    #[case::double("PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n", "Debian GNU/Linux 13 (trixie)")]
    #[case::single("PRETTY_NAME='a \"b\" \\c'", "a \"b\" \\c")]
    #[case::plain("NAME=x\nPRETTY_NAME=Alpine\nID=alpine", "Alpine")]
    #[case::escapes("PRETTY_NAME=\"\\$5 \\`x\\` \\\"q\\\" \\\\ \\n\"", "$5 `x` \"q\" \\ \\n")]
    #[case::mixed("PRETTY_NAME=a\"b c\"'d'\\ e", "ab cd e")]
    #[case::last_counts("PRETTY_NAME=a\nPRETTY_NAME=b", "b")]
    #[case::comment("# PRETTY_NAME=a\n#PRETTY_NAME=b\n", "Linux")]
    #[case::other_variable("X_PRETTY_NAME=a\n", "Linux")]
    #[case::empty("PRETTY_NAME=\"\"\n", "Linux")]
    #[case::carriage_return("PRETTY_NAME=\"a\"\r\nID=b\r\n", "a")]
    #[case::not_expanded("PRETTY_NAME=\"$HOME `id`\"", "$HOME `id`")]
    fn the_system_name_is_unquoted(#[case] text: &str, #[case] expected: &str) {
        let root = root(&[(OS_RELEASE[0], text.as_bytes())]);
        assert_eq!(os_name(root.path()).unwrap(), expected);
    }

    #[rstest]
    #[case::open_quote(b"PRETTY_NAME=\"a\n")]
    #[case::open_single_quote(b"PRETTY_NAME='a")]
    #[case::escape_at_the_end(b"PRETTY_NAME=a\\")]
    #[case::two_words(b"PRETTY_NAME=a b")]
    #[case::control_character(b"PRETTY_NAME=\"a\x1b[2J\"")]
    #[case::nul(b"PRETTY_NAME=a\0")]
    #[case::not_utf8(b"PRETTY_NAME=\xff")]
    fn a_damaged_os_release_is_named(#[case] content: &[u8]) {
        let root = root(&[(OS_RELEASE[0], content)]);
        let error = format!("{:#}", os_name(root.path()).unwrap_err());
        assert!(error.contains("etc/os-release"), "{error}");
    }

    #[test]
    fn the_first_os_release_wins() {
        let second = (OS_RELEASE[1], &b"PRETTY_NAME=second"[..]);
        assert_eq!(os_name(root(&[second]).path()).unwrap(), "second");
        assert_eq!(os_name(root(&[second, (OS_RELEASE[0], b"PRETTY_NAME=first")]).path()).unwrap(), "first");
        assert!(os_name(root(&[second, (OS_RELEASE[0], b"\xff")]).path()).is_err());
        assert_eq!(os_name(root(&[]).path()).unwrap_err().downcast_ref(), Some(&Errno::ENOENT));
    }

    #[test]
    fn a_large_file_is_not_used() {
        let large = vec![b'\n'; LARGEST_FILE as usize + 1];
        let root = root(&[(OS_RELEASE[0], &large), (MACHINE_ID, &large)]);
        assert!(os_name(root.path()).unwrap_err().to_string().contains("more than 65536 bytes"));
        assert!(machine_id(root.path()).unwrap_err().to_string().contains("more than 65536 bytes"));
    }

    /// Without a usable host name, the node is named after its machine id.
    #[rstest]
    #[case::as_it_is("node-1", "node-1")]
    #[case::newline("node-1\n", "node-1")]
    #[case::upper_case(" Node1.Example.COM ", "node1.example.com")]
    #[case::no_name("localhost\n", ID)]
    #[case::unset("(none)", ID)]
    #[case::empty("\n", ID)]
    #[case::underscore("node_1", ID)]
    #[case::hyphen_at_the_end("node-", ID)]
    #[case::two_dots("a..b", ID)]
    #[case::first_line("# comment\n\nnode-1\nnode-2\n", "node-1")]
    #[case::longest(&"a".repeat(63), &"a".repeat(63))]
    #[case::longest_subdomain(&format!("{}.example", "a".repeat(55)), &format!("{}.example", "a".repeat(55)))]
    #[case::too_long_for_the_label(&format!("{}.example", "a".repeat(56)), ID)]
    #[case::not_ascii("knöten", ID)]
    #[case::becomes_ascii_in_lower_case("\u{212a}ubelet", "kubelet")]
    fn node_name_prefers_the_host_name(#[case] host: &str, #[case] expected: &str) {
        let root = root(&[(STATIC_HOSTNAME, host.as_bytes()), (MACHINE_ID, ID.as_bytes())]);
        assert_eq!(node_name(root.path()).unwrap(), expected);
    }

    #[test]
    fn two_lines_are_no_host_name() {
        name_from_host("a\nb").unwrap_err();
    }

    /// The kernel has the host name of the running system, so it counts only for the root directory of that system.
    #[test]
    fn another_root_hides_the_kernels_name() {
        let other = root(&[(HOSTNAME, b"container"), (STATIC_HOSTNAME, b"host")]);
        assert_eq!(node_name(other.path()).unwrap(), "host");
        for own in ["/", "/proc/self/root", "/.."] {
            assert_eq!(
                host_name(Path::new(own)).unwrap(),
                fs::read_to_string("/proc/sys/kernel/hostname").unwrap()
            );
        }
    }

    #[test]
    fn absolute_links_stay_below_the_root() {
        let root = root(&[("etc/static/os-release", b"PRETTY_NAME=NixOS")]);
        symlink("/etc/static/os-release", root.path().join(OS_RELEASE[0])).unwrap();
        assert_eq!(os_name(root.path()).unwrap(), "NixOS");
        let outside = tempfile::NamedTempFile::new().unwrap();
        fs::write(outside.path(), ID).unwrap();
        symlink(outside.path(), root.path().join(MACHINE_ID)).unwrap();
        assert_eq!(machine_id(root.path()).unwrap_err().downcast_ref(), Some(&Errno::ENOENT));
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let root = root(&[("etc/hostname", b"node-1")]);
        nix::unistd::mkfifo(&root.path().join(MACHINE_ID), Mode::S_IRWXU).unwrap();
        let error = format!("{:#}", machine_id(root.path()).unwrap_err());
        assert!(error.contains("no id yet"), "{error}");
    }

    #[test]
    fn a_nameless_node_is_an_error() {
        let root = root(&[(STATIC_HOSTNAME, b"localhost")]);
        let error = node_name(root.path()).unwrap_err().to_string();
        assert!(error.contains("localhost") && error.contains(MACHINE_ID), "{error}");
    }

    proptest! {
        #[test]
        fn every_derived_node_name_is_valid(host in "\\PC{0,80}") {
            if let Ok(name) = name_from_host(&host) {
                prop_assert!(is_dns_subdomain(&name) && name.len() <= 63);
                prop_assert!(name_from_host(&name).unwrap() == name);
            }
        }

        #[test]
        fn a_quoted_value_is_read_back(value in "[^\\x00-\\x1f\\x7f-\\u{9f}]{0,40}") {
            let escaped: String = value
                .chars()
                .flat_map(|character| {
                    let escape = matches!(character, '"' | '\\' | '$' | '`').then_some('\\');
                    escape.into_iter().chain([character])
                })
                .collect();
            let found = os_release_value(&format!("A=\"{escaped}\""), "A").unwrap();
            // `lines` and `trim` treat a few more characters as white space, but none of them within quotes.
            prop_assert_eq!(found.unwrap(), value);
        }
    }
}
