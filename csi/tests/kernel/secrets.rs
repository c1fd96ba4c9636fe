//! Tests that secrets never appear in the log, at any log level.

use std::collections::HashMap;
use std::fs::File;

use csi_wire::csi as wire;

use crate::driver_process::Process;
use crate::fixture::Fixture;
use crate::support::*;

const SECRET: &str = "hunter2-6f1d3a";
const MIB: i64 = 1 << 20;

fn secrets() -> HashMap<String, String> {
    [(format!("key-{SECRET}"), SECRET.to_owned())].into()
}

/// Adds secrets to requests. The macro lists the messages that have such a field.
macro_rules! with_secrets {
    ($($message:ident),* $(,)?) => {
        const MESSAGES: &[&str] = &[$(stringify!($message)),*];

        trait WithSecrets {
            fn with_secrets(self) -> Self;
        }

        $(impl WithSecrets for wire::$message {
            fn with_secrets(mut self) -> Self {
                self.secrets = secrets();
                self
            }
        })*
    };
}

with_secrets! {
    CreateVolumeRequest,
    DeleteVolumeRequest,
    ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest,
    ValidateVolumeCapabilitiesRequest,
    ControllerListVolumeHealthRequest,
    ControllerGetVolumeHealthRequest,
    CreateSnapshotRequest,
    DeleteSnapshotRequest,
    GetSnapshotRequest,
    ListSnapshotsRequest,
    ControllerExpandVolumeRequest,
    ControllerModifyVolumeRequest,
    NodeStageVolumeRequest,
    NodePublishVolumeRequest,
    NodeGetStorageHealthRequest,
    NodeExpandVolumeRequest,
}

/// Returns the messages of the protocol that have a field for secrets.
fn messages_with_secrets() -> Vec<&'static str> {
    let mut found = Vec::new();
    let mut message = "";
    for line in include_str!("../../wire/proto/csi.proto").lines() {
        if let Some(name) = line.strip_prefix("message ") {
            message = name.split([' ', '{']).next().unwrap();
        } else if line.contains(" secrets = ") {
            found.push(message);
        }
    }
    found
}

#[test]
fn secrets_are_never_logged() {
    assert_eq!(messages_with_secrets(), MESSAGES, "the list of messages with secrets is out of date");
    let mut fixture = Fixture::without_driver();
    let log = fixture.scratch().join("log");
    fixture.directories.more = vec!["--log-level=trace".to_owned()];
    let process = Process::start_logging_to(&fixture.directories, File::create(&log).unwrap());
    let node = Client::connect(&fixture.directories.endpoint);
    node.wait_until_ready();
    let (target, staging) = (fixture.target("target"), fixture.target("staging"));

    node.create_volume(create("v", MIB, block()).with_secrets()).unwrap();
    node.node_stage_volume(stage("v", &staging, block()).with_secrets()).unwrap();
    node.node_publish_volume(publish("v", &target, block()).with_secrets()).unwrap();
    node.controller_expand_volume(controller_expand("v", 2 * MIB, 0).with_secrets()).unwrap();
    node.node_expand_volume(expand("v", &target, 2 * MIB, 0).with_secrets()).unwrap();
    node.validate_volume_capabilities(validate("v", block()).with_secrets()).unwrap();
    node.controller_list_volume_health(Default::default()).unwrap();
    node.controller_list_volume_health(wire::ControllerListVolumeHealthRequest::default().with_secrets())
        .unwrap();
    node.controller_get_volume_health(health("v").with_secrets()).unwrap();
    node.node_get_storage_health(wire::NodeGetStorageHealthRequest::default().with_secrets()).unwrap();
    // These calls are refused, and their errors must not quote the request either.
    node.node_publish_volume(publish("absent", &target, mount(&["bad"])).with_secrets()).unwrap_err();
    node.node_stage_volume(stage("../v", &staging, None).with_secrets()).unwrap_err();
    node.create_volume(create("v", 0, mount(&[])).with_secrets()).unwrap_err();
    node.controller_modify_volume(wire::ControllerModifyVolumeRequest::default().with_secrets()).unwrap_err();
    node.controller_publish_volume(wire::ControllerPublishVolumeRequest::default().with_secrets())
        .unwrap_err();
    node.controller_unpublish_volume(wire::ControllerUnpublishVolumeRequest::default().with_secrets())
        .unwrap_err();
    // The results of these calls do not matter.
    drop(node.create_snapshot(wire::CreateSnapshotRequest::default().with_secrets()));
    drop(node.delete_snapshot(wire::DeleteSnapshotRequest::default().with_secrets()));
    drop(node.get_snapshot(wire::GetSnapshotRequest::default().with_secrets()));
    drop(node.list_snapshots(wire::ListSnapshotsRequest::default().with_secrets()));

    node.node_unpublish_volume(unpublish("v", &target)).unwrap();
    node.node_unstage_volume(unstage("v", &staging)).unwrap();
    node.delete_volume(delete("v").with_secrets()).unwrap();
    process.stop(node);
    let logged = String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
    for expected in ["TRACE", "NodePublishVolume", "volume=v", "request="] {
        assert!(logged.contains(expected), "{expected} is not in the log");
    }
    let line = logged.lines().find(|line| line.contains(SECRET));
    assert_eq!(line, None, "a secret is in the log");
    fixture.finish();
}
