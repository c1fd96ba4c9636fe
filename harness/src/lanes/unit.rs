//! The unit lane: checks that any machine with cargo can run, in seconds and without root.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use testvm::process::{Finished, Program};
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::{packages, rust_build};

use super::checks::{self, must_succeed};
use super::libtest::Run;
use super::{dependencies, go_tests};

const SUITE: &str = "unit";

/// Crates that the library must not depend on, because it uses only the kernel.
const NOT_IN_LOOPFS: [&str; 7] = ["anyhow", "clap", "kube", "serde", "serde_json", "tokio", "tonic"];

const DEPENDENCIES: &str = "dependencies of loopfs";

/// Crates that PID 1 of the virtual machines must not depend on: with an async runtime, each of its static builds
/// would take minutes instead of seconds.
const NOT_IN_GUEST: [&str; 3] = ["kube", "testvm", "tokio"];

const GUEST_DEPENDENCIES: &str = "dependencies of testvm-guest";

/// The cargo commands that must succeed.
const CHECKS: [(&str, &[&str]); 5] = [
    ("format", &["fmt", "--all", "--check"]),
    // Includes the kernel tests and the benchmarks, which no other check here compiles.
    ("lints", &["clippy", "--workspace", "--all-targets", "--all-features", "--", "--deny", "warnings"]),
    (
        "documentation of loopfs",
        &["rustdoc", "--package", "loopfs", "--lib", "--all-features", "--", "--deny", "warnings"],
    ),
    (DEPENDENCIES, &["tree", "--package", "loopfs", "--edges", "normal,build"]),
    (GUEST_DEPENDENCIES, &["tree", "--package", "testvm-guest", "--edges", "normal,build"]),
];

/// The features of loopfs for its users. Each must build alone; the other checks compile them together.
const FEATURES: [&str; 5] = ["loop-device", "mount", "project-quota", "publish", "volume-store"];

/// A target that loopfs must compile for besides the architecture of this machine. Nothing is linked.
const OTHER_TARGET: &str = "aarch64-unknown-linux-gnu";
const OTHER_TARGET_CHECK: &[&str] =
    &["check", "--package", "loopfs", "--all-features", "--target", OTHER_TARGET];

const TESTS: [&str; 2] = ["test", "--workspace"];

const ALERT_RULES: &str = "alert rules";
/// Checks the alert rules, and evaluates them for the series of their tests. promtool reads a file for `rule_files`, which the command of
/// csi/monitoring/README.md writes.
const CHECK_RULES: &str = "\
    directory=$(mktemp -d)
    trap 'rm -r $directory' EXIT
    sed '1,/^spec:/d; s/^  //' csi/deploy/monitoring/prometheusrule.yaml > $directory/rules.yaml
    cp csi/monitoring/rules_test.yaml $directory
    cd $directory
    promtool check rules rules.yaml
    promtool test rules rules_test.yaml";
/// Why the alert rules are not checked on a machine without promtool.
const WITHOUT_PROMTOOL: &str =
    "promtool is not installed; as root: apt-get install --no-install-recommends prometheus";
/// The directory exists if systemd has booted this machine (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";

pub(super) async fn run(session: &Session) -> Result<Report> {
    let mut report = Report::new();
    for (name, args) in CHECKS {
        let (result, time) = checks::cargo(session, name, args).await;
        let result = result.and_then(must_succeed);
        let result = result.and_then(|finished| match name {
            DEPENDENCIES => no_upper_layers(&finished.stdout, "loopfs", &NOT_IN_LOOPFS),
            GUEST_DEPENDENCIES => no_upper_layers(&finished.stdout, "testvm-guest", &NOT_IN_GUEST),
            _ => Ok(()),
        });
        report.record(SUITE, name, time, &result);
    }

    for feature in FEATURES {
        let name = format!("lints of loopfs with the feature {feature}");
        let library = ["clippy", "--package", "loopfs", "--lib", "--no-default-features"];
        let args = [&library[..], &["--features", feature, "--", "--deny", "warnings"]].concat();
        let (result, time) = checks::cargo(session, &name, &args).await;
        report.record(SUITE, &name, time, &result.and_then(must_succeed));
    }

    let name = format!("loopfs for {OTHER_TARGET}");
    match rust_build::has_target(session, OTHER_TARGET).await {
        Ok(true) => {
            let (result, time) = checks::cargo(session, &name, OTHER_TARGET_CHECK).await;
            report.record(SUITE, &name, time, &result.and_then(must_succeed));
        }
        Ok(false) => {
            let reason =
                format!("rustc here has no standard library for it: rustup target add {OTHER_TARGET}");
            report.push(SUITE, &name, Outcome::Unavailable(reason), Duration::ZERO);
        }
        Err(error) => report.record::<()>(SUITE, &name, Duration::ZERO, &Err(error)),
    }

    dependencies::check(session, SUITE, &mut report).await;
    let compile = [&TESTS[..], &["--no-run"]].concat();
    let (compiled, time) = checks::cargo(session, "compile the tests", &compile).await;
    let tests = rust_build::program(session.workspace.root()).args(TESTS).arg("--no-fail-fast");
    let tested = async {
        compiled.and_then(must_succeed)?;
        checks::run(session, "tests", tests).await.0
    };
    match tested.await {
        Ok(finished) => {
            let ended = if finished.status.success() { Ok(()) } else { Err(finished.failure()) };
            Run::parse(&finished.stdout).report(&mut report, "unit tests", ended);
        }
        Err(error) => {
            report.push("unit tests", "run cargo test", Outcome::Failed(format!("{error:#}")), time);
        }
    }
    go(session, &mut report).await;
    alert_rules(session, &mut report).await;
    Ok(report)
}

/// Checks and tests the Go sources that become part of the kubelet. Go itself skips tests whose sources are unchanged.
async fn go(session: &Session, report: &mut Report) {
    const TESTS: &str = "Go tests";
    if !go_tests::is_installed() {
        report.push(SUITE, TESTS, Outcome::Unavailable(go_tests::WITHOUT_GO.to_owned()), Duration::ZERO);
        return;
    }
    let (result, time) =
        checks::run(session, "format of Go", go_tests::command(session, "gofmt").args(["-l", "."])).await;
    let result = result.and_then(must_succeed).and_then(|Finished { stdout, .. }| {
        anyhow::ensure!(stdout.is_empty(), "gofmt -w would change these files:\n{stdout}");
        Ok(())
    });
    report.record(SUITE, "format of Go", time, &result);
    let vet = ["vet", "-tags", go_tests::KERNEL_TESTS, "./..."];
    let vet = go_tests::command(session, "go").args(vet);
    checks::check(session, SUITE, report, "lints of Go", vet).await;
    let tests = go_tests::command(session, "go").args(["test", "-v", "./..."]);
    match checks::run(session, TESTS, tests).await.0 {
        Ok(finished) => {
            let ended = if finished.status.success() { Ok(()) } else { Err(finished.failure()) };
            go_tests::report(report, TESTS, &finished.stdout, ended, true);
        }
        Err(error) => report.record::<()>(SUITE, TESTS, Duration::ZERO, &Err(error)),
    }
}

async fn alert_rules(session: &Session, report: &mut Report) {
    if let Err(reason) = ensure_promtool(session).await {
        return report.push(SUITE, ALERT_RULES, Outcome::Unavailable(reason), Duration::ZERO);
    }
    let check = Program::new("sh").current_dir(session.workspace.root()).args(["-ec", CHECK_RULES]);
    checks::check(session, SUITE, report, ALERT_RULES, check).await;
}

/// Installs promtool if it is missing and this user may install it. The error says in one line what to install.
async fn ensure_promtool(session: &Session) -> Result<(), String> {
    if packages::is_installed(packages::PROMTOOL) {
        return Ok(());
    }
    // The package also has the server, which systemd would start. That is for the administrator to decide.
    if !nix::unistd::geteuid().is_root() || Path::new(SYSTEMD).exists() {
        return Err(WITHOUT_PROMTOOL.to_owned());
    }
    let installed = packages::ensure(session, &[packages::PROMTOOL]).await;
    installed.map_err(|error| {
        let cause = error.to_string();
        format!("{WITHOUT_PROMTOOL} ({})", cause.lines().next().unwrap_or_default())
    })
}

/// Checks that `tree`, the dependencies of `package`, has none of the crates `upper`. It has one crate per line:
/// `│   ├── name v1.2.3 (..)`.
fn no_upper_layers(tree: &str, package: &str, upper: &[&str]) -> Result<()> {
    anyhow::ensure!(tree.contains(&format!("{package} v")), "cargo tree printed no tree: {tree}");
    for line in tree.lines() {
        let name = line.trim_start_matches(|character: char| !character.is_ascii_alphanumeric());
        let name = name.split(' ').next().unwrap_or_default();
        anyhow::ensure!(
            !upper.contains(&name),
            "{package} depends on {name}, which belongs to a layer above it:\n{tree}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::NOT_IN_LOOPFS;

    fn no_upper_layers(tree: &str) -> anyhow::Result<()> {
        super::no_upper_layers(tree, "loopfs", &NOT_IN_LOOPFS)
    }

    #[test]
    fn deep_upper_layer_dependency_is_found() {
        let clean = "loopfs v0.1.0\n├── libc v0.2.1\n└── thiserror v2.0.0\n    └── serde_tokio_like v1.0.0\n";
        assert!(no_upper_layers(clean).is_ok());
        let deep = format!("{clean}        └── tokio v1.0.0\n");
        assert!(no_upper_layers(&deep).unwrap_err().to_string().starts_with("loopfs depends on tokio"));
        assert!(no_upper_layers("").is_err());
    }
}
