//! The unit lane: checks that need no root and no virtual machine.

use std::path::Path;

use anyhow::Result;
use testvm::process::Program;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::{packages, rust_build};

use super::checks::{self, SUITE};
use super::libtest::Run;
use super::seed::{self, Source};
use super::{dependencies, go_tests};

/// The cargo commands that must succeed.
const CHECKS: [(&str, &str); 3] = [
    ("format", "fmt --all --check"),
    // Includes the kernel tests and the benchmarks, which no other check here compiles.
    ("lints", "clippy --workspace --all-targets --all-features -- --deny warnings"),
    (
        "documentation of loopfs",
        "rustdoc --package loopfs --lib --all-features -- --deny warnings --deny missing_docs",
    ),
];

/// The features of loopfs for its users. Each must build alone; the other checks compile them together.
const FEATURES: [&str; 5] = ["loop-device", "mount", "project-quota", "publish", "volume-store"];

/// A target that loopfs must compile for besides the architecture of this machine. Nothing is linked.
const OTHER_TARGET: &str = "aarch64-unknown-linux-gnu";

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
    let seed = seed::choose(session, "unit", Source::Commit).await?;
    let mut report = Report::new();
    for (name, args) in CHECKS {
        checks::cargo(session, &mut report, name, args).await;
    }
    for feature in FEATURES {
        let name = format!("lints of loopfs with the feature {feature}");
        let args = format!(
            "clippy --package loopfs --lib --no-default-features --features {feature} -- --deny warnings"
        );
        checks::cargo(session, &mut report, &name, &args).await;
    }
    let name = format!("loopfs for {OTHER_TARGET}");
    match rust_build::has_target(session, OTHER_TARGET).await {
        Ok(true) => {
            let args = format!("check --package loopfs --all-features --target {OTHER_TARGET}");
            checks::cargo(session, &mut report, &name, &args).await;
        }
        Ok(false) => {
            let reason =
                format!("rustc here has no standard library for it: rustup target add {OTHER_TARGET}");
            report.push(SUITE, &name, Outcome::Unavailable(reason), None);
        }
        Err(error) => report.record::<()>(SUITE, &name, None, &Err(error)),
    }

    dependencies::check(session, &mut report).await;
    // Other lanes may compile while the tests run.
    if checks::cargo(session, &mut report, "compile the tests", "test --workspace --no-run").await {
        let tests = rust_build::program(session.workspace.root());
        let tests = tests.args(["test", "--workspace", "--no-fail-fast"]);
        match checks::run(session, "tests", seed::set(tests, seed)).await.0 {
            Ok(finished) => {
                Run::parse(&finished.stdout).report(&mut report, "unit tests", checks::ended(&finished), &[]);
            }
            Err(error) => report.record::<()>("unit tests", "run cargo test", None, &Err(error)),
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
        report.push(SUITE, TESTS, Outcome::Unavailable(go_tests::WITHOUT_GO.to_owned()), None);
        return;
    }
    let (result, time) =
        checks::run(session, "format of Go", go_tests::command(session, "gofmt").args(["-l", "."])).await;
    let result = result.and_then(|finished| {
        checks::ended(&finished).map_err(anyhow::Error::msg)?;
        anyhow::ensure!(
            finished.stdout.is_empty(),
            "gofmt -w would change these files:\n{}",
            finished.stdout
        );
        Ok(())
    });
    report.record(SUITE, "format of Go", time, &result);
    let vet = ["vet", "-tags", go_tests::KERNEL_TESTS, "./..."];
    let vet = go_tests::command(session, "go").args(vet);
    checks::check(session, report, "lints of Go", vet).await;
    let tests = go_tests::command(session, "go").args(["test", "-v", "./..."]);
    match checks::run(session, TESTS, tests).await.0 {
        Ok(finished) => {
            go_tests::parse(&finished.stdout).report(report, TESTS, checks::ended(&finished), &[]);
        }
        Err(error) => report.record::<()>(SUITE, TESTS, None, &Err(error)),
    }
}

async fn alert_rules(session: &Session, report: &mut Report) {
    if let Err(reason) = ensure_promtool(session).await {
        return report.push(SUITE, ALERT_RULES, Outcome::Unavailable(reason), None);
    }
    let check = Program::new("sh").current_dir(session.workspace.root()).args(["-ec", CHECK_RULES]);
    checks::check(session, report, ALERT_RULES, check).await;
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
