//! Tests of the driver on a socket, without its file system. They run on any machine. Tests that need the file system
//! are in `kernel`.

mod support;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;

use csi_wire::csi as wire;
use support::*;
use tempfile::TempDir;
use tonic::Code;

struct Fixture {
    driver: Driver,
    directories: Directories,
    scratch: TempDir,
}

/// Returns a driver whose data directory is a plain directory, as on a node whose disk is not mounted.
fn fixture() -> Fixture {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let directories = Directories::create(scratch.path(), &data);
    let driver = Driver::start(&directories);
    Fixture { driver, directories, scratch }
}

impl Fixture {
    fn target(&self, name: &str) -> PathBuf {
        self.directories.kubelet.join(name)
    }

    fn stop(self) {
        self.driver.stop();
        assert!(!self.directories.endpoint.exists() && !self.directories.registration_socket().exists());
        assert_eq!(
            fs::read_dir(&self.directories.data).unwrap().count(),
            0,
            "something was written below the mount point"
        );
        assert!(!self.scratch.path().join("data.filesystem-uuid").exists());
    }
}

#[test]
fn driver_reports_name_and_topology() {
    use wire::controller_service_capability::Type as Controller;
    use wire::node_service_capability::Type as Node;
    use wire::plugin_capability::Type as Plugin;

    let fixture = fixture();
    let info = fixture.driver.get_plugin_info(wire::GetPluginInfoRequest {}).unwrap();
    assert_eq!((info.name.as_str(), info.vendor_version.as_str()), (DRIVER, env!("CARGO_PKG_VERSION")));
    let info = fixture.driver.node_get_info(wire::NodeGetInfoRequest {}).unwrap();
    assert_eq!(info.node_id, NODE);
    assert_eq!(info.accessible_topology, Some(topology(NODE)));

    let plugin = fixture.driver.get_plugin_capabilities(Default::default()).unwrap().capabilities;
    let plugin = plugin.into_iter().map(|capability| match capability.r#type.unwrap() {
        Plugin::Service(found) => found.r#type().as_str_name(),
        Plugin::VolumeExpansion(found) => found.r#type().as_str_name(),
    });
    let controller = fixture.driver.controller_get_capabilities(Default::default()).unwrap().capabilities;
    let controller = controller.into_iter().map(|capability| match capability.r#type.unwrap() {
        Controller::Rpc(found) => found.r#type().as_str_name(),
    });
    let node = fixture.driver.node_get_capabilities(Default::default()).unwrap().capabilities;
    let node = node.into_iter().map(|capability| match capability.r#type.unwrap() {
        Node::Rpc(found) => found.r#type().as_str_name(),
    });
    // Those that csi-sanity does not check.
    for (reported, expected) in [
        (
            plugin.collect::<Vec<_>>(),
            &["VOLUME_ACCESSIBILITY_CONSTRAINTS", "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS", "ONLINE"][..],
        ),
        (
            controller.collect(),
            &["GET_VOLUME", "LIST_VOLUMES_PUBLISHED_NODES", "VOLUME_CONDITION", "SINGLE_NODE_MULTI_WRITER"],
        ),
        (node.collect(), &["VOLUME_CONDITION"]),
    ] {
        assert!(
            expected.iter().all(|name| reported.contains(name)),
            "{expected:?} are not all in {reported:?}"
        );
    }
    fixture.stop();
}

/// Calls that need the file system report that it is missing.
#[test]
fn driver_without_filesystem_does_not_register() {
    let fixture = fixture();
    let data = fixture.directories.data.to_str().unwrap().to_owned();
    let why = [data.as_str(), "nothing is mounted there", "prjquota"];
    assert_refused(fixture.driver.wait_for_probe(), Code::FailedPrecondition, &why);

    let target = fixture.target("target");
    let node = &fixture.driver;
    for refused in [
        node.node_stage_volume(stage("v", &target, block())).map(drop),
        node.node_publish_volume(publish("v", &target, mount(&[]))).map(drop),
        node.node_expand_volume(expand("v", &target, 1, 0)).map(drop),
        node.create_volume(create("v", 1, block())).map(drop),
        node.delete_volume(delete("v")).map(drop),
        node.validate_volume_capabilities(validate("v", block())).map(drop),
        node.list_volumes(list(0, "")).map(drop),
        node.create_snapshot(create_snapshot("s", "v")).map(drop),
        node.delete_snapshot(delete_snapshot("s")).map(drop),
        node.list_snapshots(list_snapshots(0, "", "", "")).map(drop),
        node.get_snapshot(get_snapshot("s")).map(drop),
        node.get_capacity(Default::default()).map(drop),
        node.controller_expand_volume(controller_expand("v", 1, 0)).map(drop),
        node.controller_get_volume(get("v")).map(drop),
        node.controller_list_volume_health(Default::default()).map(drop),
    ] {
        assert_refused(refused, Code::FailedPrecondition, &why);
    }
    // The volume has no device on this node.
    node.node_unstage_volume(unstage("v", &target)).unwrap();
    // The mount table is sufficient without the file system.
    assert_refused(node.node_get_volume_stats(stats("v", &target)), Code::NotFound, &["not published"]);
    let storage = node.node_get_storage_health(Default::default()).unwrap().backend_health;
    assert_eq!(storage.len(), 1);
    assert_eq!(storage[0].status(), wire::StorageHealthErrorType::StorageUnreachable);
    assert!(why.iter().all(|text| storage[0].message.contains(text)), "{}", storage[0].message);
    assert!(!target.exists());
    assert!(!fixture.directories.registration_socket().exists());
    fixture.stop();
}

#[test]
fn unimplemented_calls_name_their_capability() {
    let fixture = fixture();
    let node = &fixture.driver;
    for (refused, reason, capability) in [
        (
            node.controller_publish_volume(Default::default()).map(drop),
            "nothing to attach",
            "PUBLISH_UNPUBLISH_VOLUME",
        ),
        (
            node.controller_unpublish_volume(Default::default()).map(drop),
            "nothing to attach",
            "PUBLISH_UNPUBLISH_VOLUME",
        ),
        (
            node.controller_modify_volume(Default::default()).map(drop),
            "fixed at its creation",
            "MODIFY_VOLUME",
        ),
    ] {
        assert_refused(refused, Code::Unimplemented, &[reason, capability]);
    }
    fixture.stop();
}

#[test]
fn missing_filesystem_fails_readiness_not_liveness() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    // This record exists if a file system was mounted at the data directory before.
    fs::write(scratch.path().join("data.filesystem-uuid"), "").unwrap();
    let mut directories = Directories::create(scratch.path(), &data);
    let address = directories.serve_metrics();
    let probes = directories.serve_probes();
    let driver = Driver::start(&directories);
    driver.wait_for_probe().unwrap_err();
    // The wait may have ended with another call.
    driver.probe(wire::ProbeRequest {}).unwrap_err();
    for address in [probes, address] {
        http::wait_until_alive(address);
        wait_for_ok(|| match http::get(address, "/readyz") {
            (503, why) if why.contains("nothing is mounted there") && why.contains("prjquota") => Ok(()),
            response => Err(format!("/readyz still returns {response:?}")),
        });
    }
    assert_eq!(http::get(probes, "/metrics").0, 404);
    let (status, metrics) = http::get(address, "/metrics");
    assert_eq!(status, 200);
    let refused = r#"loopfs_csi_rpcs_total{method="Probe",code="FailedPrecondition"}"#;
    for line in [refused, "loopfs_csi_storage_open 0\n", "loopfs_csi_ready 0\n"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(!metrics.contains("loopfs_csi_store"), "unknown values must be omitted: {metrics}");
    assert_eq!(http::get(address, "/").0, 404);
    assert_eq!(
        http::request(address, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").0,
        405
    );
    // Once the last result is too old.
    let wait_for = |page: &str, expected: String| {
        wait_for_ok(|| match http::get(probes, page) {
            (503, why) if why.contains(&expected) => Ok(()),
            response => Err(format!("{page} still returns {response:?}")),
        });
    };
    let endpoint = directories.endpoint.display();
    let second = Driver::start(&Directories::create(scratch.path(), &data));
    // The kubelet calls the second driver. If it restarted the first one for that, they would end each other in turn.
    wait_for("/readyz", format!("another process replaced {endpoint}"));
    http::wait_until_alive(probes);
    second.stop();
    assert!(!directories.endpoint.exists());
    // The kubelet cannot call a driver whose socket was removed.
    wait_for("/healthz", format!("the driver does not respond on {endpoint}"));
    driver.stop();
}

/// Nothing was ever mounted at its data directory, so it counts as ready.
#[test]
fn node_without_storage_is_not_registered() {
    let scratch = tempfile::tempdir().unwrap();
    let mut directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    let address = directories.serve_metrics();
    let driver = Driver::start(&directories);
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &["make it the mount point"]);
    // A sidecar waits, and would end after an error.
    let probed = wait_for_ok(|| driver.probe(Default::default()));
    assert_eq!(probed, wire::ProbeResponse { ready: Some(false) });
    http::wait_for_status(address, "/readyz", 200);
    let (_, metrics) = http::get(address, "/metrics");
    assert!(metrics.contains("loopfs_csi_storage_open 0\n"), "{metrics}");
    assert!(metrics.contains("loopfs_csi_ready 1\n"), "{metrics}");
    assert!(!directories.registration_socket().exists());
    driver.stop();
}

/// The kubelet ends a pod with a volume only through a registered driver.
#[test]
fn driver_with_missing_disk_still_registers() {
    let scratch = tempfile::tempdir().unwrap();
    let directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    fs::write(scratch.path().join("data.filesystem-uuid"), "").unwrap();
    let driver = Driver::start(&directories);
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &["make it the mount point"]);
    directories.wait_for_registration_socket();
    let target = directories.kubelet.join("target");
    fs::create_dir(&target).unwrap();
    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    driver.node_unstage_volume(unstage("v", &directories.kubelet.join("staging"))).unwrap();
    assert!(!target.exists());
    driver.stop();
}

/// Only root can connect to the new socket.
#[test]
fn stale_sockets_are_replaced() {
    let scratch = tempfile::tempdir().unwrap();
    let directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    for stale in [&directories.endpoint, &directories.registration_socket()] {
        drop(std::os::unix::net::UnixListener::bind(stale).unwrap());
    }
    let driver = Driver::start(&directories);
    assert!(!directories.registration_socket().exists());
    let socket = fs::symlink_metadata(&directories.endpoint).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
    driver.stop();
    assert!(!directories.endpoint.exists());
}
