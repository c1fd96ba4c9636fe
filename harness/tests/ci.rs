//! Checks what `.ci/run` does with the build directory that the checkouts share, with a small workspace.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const FILES: [(&str, &str); 8] = [
    ("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"library\", \"program\"]\n"),
    ("library/Cargo.toml", "[package]\nname = \"library\"\nversion = \"0.1.0\"\nedition = \"2024\"\n"),
    ("library/build.rs", "fn main() { println!(\"cargo::rerun-if-changed=proto\") }"),
    ("library/proto/a b.proto", ""),
    ("library/src/lib.rs", "pub const TEXT: &str = include_str!(\"../../docs/text.md\");"),
    ("docs/text.md", "one"),
    (
        "program/Cargo.toml",
        "[package]\nname = \"program\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[dependencies]\nlibrary = { path = \"../library\" }\n",
    ),
    ("program/src/main.rs", "fn main() { print!(\"{}\", library::TEXT) }"),
];

/// The packages, in the order in which cargo compiles them.
const ALL: [&str; 2] = ["library", "program"];
const NONE: [&str; 0] = [];

/// A build directory, and the sources that each run has in a new checkout.
struct Runs {
    directory: TempDir,
    files: BTreeMap<&'static str, &'static str>,
    count: usize,
}

impl Runs {
    /// Runs once.
    fn new() -> Runs {
        let mut runs = Runs { directory: tempfile::tempdir().unwrap(), files: FILES.into(), count: 0 };
        assert_eq!(runs.compile(), ALL);
        runs
    }

    fn build_dir(&self) -> PathBuf {
        self.directory.path().join("build")
    }

    fn checkout(&self) -> PathBuf {
        self.directory.path().join(format!("checkout {}", self.count))
    }

    fn copy(&self) -> PathBuf {
        self.directory.path().join("copy")
    }

    /// Compiles a new checkout, and returns the packages that cargo did not take from the build directory.
    fn compile(&mut self) -> Vec<String> {
        self.count += 1;
        for (path, content) in &self.files {
            let path = self.checkout().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        self.compile_again()
    }

    fn compile_again(&self) -> Vec<String> {
        run(script("copy-checkout").arg(self.copy()).current_dir(self.checkout()));
        let printed = run(&mut self.cargo(&["build", "--offline", "--workspace"])).stderr;
        let lines = String::from_utf8(printed).unwrap();
        let compiled = lines.lines().filter_map(|line| line.trim().strip_prefix("Compiling "));
        compiled.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    }

    fn printed_text(&self) -> String {
        let printed = run(&mut self.cargo(&["run", "--offline", "--quiet", "--package", "program"])).stdout;
        String::from_utf8(printed).unwrap()
    }

    fn cargo(&self, args: &[&str]) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .args(args)
            .current_dir(self.copy())
            .env("CARGO_BUILD_BUILD_DIR", self.build_dir())
            .env_remove("CARGO_TARGET_DIR")
            .env("CARGO_INCREMENTAL", "0");
        cargo
    }
}

fn script(name: &str) -> Command {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs this test");
    Command::new(Path::new(&package).parent().unwrap().join(".ci").join(name))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn another_checkout_uses_what_was_compiled() {
    let mut runs = Runs::new();
    fs::remove_dir_all(runs.checkout()).unwrap();
    assert_eq!(runs.compile(), NONE);
    assert!(runs.checkout().join("target/debug/program").exists());
}

/// Also if it is the content of an earlier run.
#[test]
fn a_changed_source_is_compiled() {
    let mut runs = Runs::new();
    for text in ["two", "one", "two"] {
        runs.files.insert("docs/text.md", text);
        assert_eq!(runs.compile(), ALL);
        assert_eq!(runs.printed_text(), text);
    }
}

#[test]
fn new_file_reruns_build_script() {
    let mut runs = Runs::new();
    runs.files.insert("library/proto/b.proto", "");
    assert_eq!(runs.compile(), ALL);
    runs.files.remove("library/proto/b.proto");
    assert_eq!(runs.compile(), ALL);
    assert_eq!(runs.compile(), NONE);
}

#[test]
fn large_build_directory_loses_the_least_recently_used_units() {
    let runs = Runs::new();
    let trim = |limit: &str| run(script("trim-build-dir").arg(runs.build_dir()).arg(limit));
    trim("1000");
    assert_eq!(runs.compile_again(), NONE);
    // Of an earlier toolchain.
    let profile = runs.build_dir().join("debug");
    let [unit, output] = [".fingerprint/old-0123", "deps/libold-0123.rlib"].map(|path| profile.join(path));
    fs::create_dir(&unit).unwrap();
    fs::write(unit.join("lib-old"), "").unwrap();
    fs::write(&output, vec![1; 64 << 20]).unwrap();
    run(Command::new("touch").args(["-a", "--date", "1 hour ago"]).arg(unit.join("lib-old")));
    trim("60");
    assert!(!unit.exists() && !output.exists());
    assert_eq!(runs.compile_again(), NONE);
    // Of no unit.
    fs::write(&output, vec![1; 64 << 20]).unwrap();
    trim("60");
    assert!(!runs.build_dir().exists());
    assert_eq!(runs.compile_again(), ALL);
}
