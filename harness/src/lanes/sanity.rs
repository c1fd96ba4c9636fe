//! The sanity lane: csi-sanity, the conformance suite of the Container Storage Interface, runs against the
//! driver's program on a real kernel, once with mounted volumes and once with block devices. In the second run, it calls the
//! Controller service on the control socket, as csi-snapshotter does. After each run, nothing may be left.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::go_build::{self, GoModule, VersionVariable};
use testvm::images::disk;
use testvm::packages;
use testvm::report::Report;
use testvm::session::Session;
use testvm::test_machine::{HARDENED, data_disk, xfs};
use testvm_guest::spec::{Condition, Mount, Service, TestBinary, TestsSpec};

use super::ginkgo::{self, ExpectedSkip};
use super::kernel::TEST;
use super::libtest::Run;
use super::machines::{Machines, program};
use crate::builds::{self, ProgramProfile};

pub(super) const CSI_TEST: GoModule = GoModule {
    version_variables: &[VersionVariable { variable: "main.VERSION", value: |v| v.to_string() }],
    ..GoModule::new("csi-test", "github.com/kubernetes-csi/csi-test/v5")
};

/// The specs that this driver can never support. All others must run.
const EXPECTED_SKIPS: &[ExpectedSkip<'_>] = &[
    skip("ControllerPublishVolume not supported", NOTHING_TO_ATTACH),
    skip("ControllerUnpublishVolume not supported", NOTHING_TO_ATTACH),
    skip("Controller Publish, UnpublishVolume not supported", NOTHING_TO_ATTACH),
    skip("Modify volume not supported", NOTHING_TO_MODIFY),
    skip("Modify Volume not supported", NOTHING_TO_MODIFY),
    skip("ControllerModifyVolume not supported", NOTHING_TO_MODIFY),
    // Version 5.6 cleans up after this skip with a client that it has not created.
    ExpectedSkip { clean_up_panics: true, ..skip("GroupControllerService not supported", NO_GROUPS) },
    skip(
        "Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages and accept \
         tokens when the last volume from a page is deleted",
        "its authors switched it off, because it depends on how a driver makes page tokens (csi-test issue 223)",
    ),
    skip(
        "CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility requirements",
        "this lane leaves it out, because it fails with every driver that tells where a snapshot is",
    ),
];

/// A spec that compares the returned topology with the requested one, including a size that protobuf caches
/// in the requested one when it is sent (csi-test 5.6). The kernel tests of csi check the topology of
/// snapshots.
const COMPARES_CACHES: &str = "should succeed when creating a snapshot with accessibility requirements";

const NOTHING_TO_ATTACH: &str = "a volume is on the disk of its node, so no controller attaches it";
const NOTHING_TO_MODIFY: &str = "but for its size, nothing of a volume can be changed once it is made";
const NO_GROUPS: &str =
    "Linux clones one file at a time: snapshots of several volumes would not be of one moment";

const fn skip(message: &'static str, reason: &'static str) -> ExpectedSkip<'static> {
    ExpectedSkip { message, reason, clean_up_panics: false }
}

const DRIVER: &str = "csi.loopfs.dev";
const DRIVER_PATH: &str = "/tests/loopfs-csi";
const SANITY_PATH: &str = "/tests/csi-sanity";
const LEFT_PATH: &str = "/tests/left";
/// The kernel test of csi that looks for leftovers.
const LEFT_TEST: &str = "left_behind::nothing";
const DATA: &str = "/var/lib/loopfs/data";
const KUBELET: &str = "/var/lib/kubelet";
const RUN: &str = "/run";
const CSI_SOCKET: &str = "csi.sock";
const CONTROL_SOCKET: &str = "control.sock";

/// The size of the disk, for a dozen volumes that specs use concurrently.
const DISK_MIB: u64 = 1024;
const VOLUME_BYTES: u64 = 8 << 20;
const EXPANDED_BYTES: u64 = 2 * VOLUME_BYTES;

/// The seed of the order of the specs, so that each run has the same order.
const SEED: u32 = 1;
/// The suite's own timeout. It expires before the suite is killed, so that the suite reports the spec in
/// progress.
const SUITE_TIMEOUT: Duration = Duration::from_secs(240);
const SUITE_KILL_TIMEOUT: Duration = Duration::from_secs(300);
const LEFT_TIMEOUT: Duration = Duration::from_secs(90);
const DRIVER_START_TIMEOUT: Duration = Duration::from_secs(60);

/// The access type of each run, as an argument of csi-sanity, and the socket on which it calls the Controller service.
const RUNS: [(&str, &str); 2] = [("mount", CSI_SOCKET), ("block", CONTROL_SOCKET)];

pub(super) async fn run(session: &Session, kernel: Option<&str>) -> Result<Report> {
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    let sanity = go_build::build(session, &CSI_TEST).await?.join("csi-sanity");
    let driver = builds::driver_programs(session, ProgramProfile::Test).await?.csi;
    let left = builds::guest_tests(session).await?.test("csi", TEST)?;
    let init = builds::guest_programs(session).await?.init;
    let machines = Machines::prepare(session, kernel, &init, "sanity").await?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let data = directory.path().join("data.xfs");
    disk::xfs(&data, DISK_MIB).await?;
    let files = vec![program(SANITY_PATH, sanity), program(DRIVER_PATH, driver), program(LEFT_PATH, left)];
    let machine = machines.machine("sanity", files, vec![data_disk("data", &data)], tests());
    let _processor = session.processor().await;
    let step = session.progress.step(format!("run csi-sanity on {}", machines.title()));
    let heard = machine.run(&step).await?;

    let read =
        |name: &str| std::fs::read_to_string(machines.logs.join(format!("{name}.log"))).unwrap_or_default();
    let mut report = Report::new();
    for (access_type, _) in RUNS {
        let (suite, name) = (format!("sanity: {access_type}"), sanity_name(access_type));
        let text = read(&TestBinary::reported_as(&name));
        ginkgo::report(&text, EXPECTED_SKIPS, heard.ended_well(&name).0, &mut report, &suite);
        let name = left_name(access_type);
        Run::parse(&read(&name)).report(&mut report, &suite, heard.ended_well(&name).0, &[]);
    }
    heard.verdict(&mut report, "sanity");
    report.end(step);
    Ok(report)
}

fn tests() -> TestsSpec {
    let kubelet = Mount::without_disk("tmpfs", KUBELET, HARDENED);
    TestsSpec {
        mounts: vec![xfs("data", DATA, &format!("prjquota,{HARDENED}")), kubelet],
        services: vec![driver()],
        env: BTreeMap::from([("LOOPFS_TEST_XFS".to_owned(), DATA.to_owned())]),
        binaries: RUNS
            .into_iter()
            .flat_map(|(access_type, controller)| [sanity(access_type, controller), left(access_type)])
            .collect(),
    }
}

fn driver() -> Service {
    let socket = format!("{RUN}/{CSI_SOCKET}");
    let argv = [
        DRIVER_PATH.to_owned(),
        format!("--driver-name={DRIVER}"),
        "--node-name=sanity".to_owned(),
        format!("--data-dir={DATA}"),
        format!("--kubelet-dir={KUBELET}"),
        format!("--endpoint=unix://{socket}"),
        format!("--control-endpoint=unix://{RUN}/{CONTROL_SOCKET}"),
        format!("--registration-dir={RUN}"),
        format!("--kubelet-csi-socket={socket}"),
        "--log-level=debug".to_owned(),
    ];
    Service {
        log_file: None,
        name: "loopfs-csi".to_owned(),
        argv: argv.to_vec(),
        env: BTreeMap::new(),
        restart: false,
        // The driver registers with a kubelet only after it can serve volumes.
        ready: Condition::UnixSocket(format!("{RUN}/{DRIVER}-reg.sock")),
        ready_within: DRIVER_START_TIMEOUT,
    }
}

fn sanity(access_type: &str, controller: &str) -> TestBinary {
    let report = format!("/tmp/{access_type}.json");
    let args = [
        format!("-csi.endpoint={RUN}/{CSI_SOCKET}"),
        format!("-csi.controllerendpoint={RUN}/{controller}"),
        format!("-csi.mountdir={KUBELET}/csi-mount"),
        format!("-csi.stagingdir={KUBELET}/csi-staging"),
        format!("-csi.testvolumeaccesstype={access_type}"),
        format!("-csi.testvolumesize={VOLUME_BYTES}"),
        format!("-csi.testvolumeexpandsize={EXPANDED_BYTES}"),
        format!("-ginkgo.seed={SEED}"),
        format!("-ginkgo.skip={COMPARES_CACHES}"),
        format!("-ginkgo.timeout={}s", SUITE_TIMEOUT.as_secs()),
        format!("-ginkgo.json-report={report}"),
        "-ginkgo.no-color".to_owned(),
        "-ginkgo.v".to_owned(),
    ];
    TestBinary {
        name: sanity_name(access_type),
        path: SANITY_PATH.to_owned(),
        args: args.to_vec(),
        report: Some(report),
        timeout: SUITE_KILL_TIMEOUT,
        ..TestBinary::default()
    }
}

/// Returns a test that no loop devices, mounts, project ids, entries of the store and open files are left.
fn left(access_type: &str) -> TestBinary {
    TestBinary {
        name: left_name(access_type),
        path: LEFT_PATH.to_owned(),
        args: vec!["--exact".to_owned(), LEFT_TEST.to_owned()],
        timeout: LEFT_TIMEOUT,
        ..TestBinary::default()
    }
}

fn sanity_name(access_type: &str) -> String {
    format!("csi-sanity-{access_type}")
}

fn left_name(access_type: &str) -> String {
    format!("left-{access_type}")
}
