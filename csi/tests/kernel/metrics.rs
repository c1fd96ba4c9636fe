//! Tests that compare the served metrics with csi/monitoring/README.md, and with the state of the node.

use std::fs::File;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::volume_store::VolumeKind;
use service::documentation;
use tonic::Code;

use crate::fixture::{Fixture, MIB, id};
use crate::support::*;

fn scrape(address: SocketAddr) -> String {
    let (status, text) = http::get(address, "/metrics");
    assert_eq!(status, 200, "{text}");
    text
}

/// Scrapes until all lines are present. Scrapes within a second return the same metrics, and checks run once a second.
#[track_caller]
fn wait_for(address: SocketAddr, lines: &[&str]) -> String {
    let start = Instant::now();
    loop {
        let text = scrape(address);
        let missing: Vec<_> = lines.iter().filter(|line| !text.contains(&format!("\n{line}\n"))).collect();
        if missing.is_empty() {
            return text;
        }
        assert!(start.elapsed() < TIMEOUT, "{missing:?} are not in\n{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn metrics_match_node_and_readme() {
    let mut fixture = Fixture::without_driver();
    let address = fixture.directories.serve_metrics();
    fixture.start_driver();
    for volume in ["a", "b"] {
        fixture.volume(volume, VolumeKind::Block);
    }
    fixture.volume("c", VolumeKind::Filesystem);
    let (device, directory) = (fixture.target("device"), fixture.target("directory"));
    fixture.node().node_publish_volume(publish("a", &device, block())).unwrap();
    fixture.node().node_publish_volume(publish("c", &directory, mount(&[]))).unwrap();
    let absent = fixture.node().node_publish_volume(publish("absent", &fixture.target("absent"), block()));
    assert_refused(absent, Code::NotFound, &[]);
    let (status, reason) = http::get(address, "/readyz");
    assert!(
        status == 503 && reason.contains("the kubelet has not registered the driver"),
        "{status} {reason}"
    );
    fixture.directories.register();
    http::wait_for_status(address, "/readyz", 200);
    // The metrics have the verdict of the latest check.
    assert_eq!(http::get(address, "/readyz"), (200, "ok\n".to_owned()));

    // Besides these three volumes, the reservation record may contain space that earlier tests removed without the
    // store.
    let Bytes(reserved) = fixture.store.space().unwrap().reserved;
    assert!(reserved >= 3 * MIB, "{reserved}");
    let reserved = format!("loopfs_csi_store_promised_bytes {reserved}");
    let text = wait_for(
        address,
        &[
            "loopfs_csi_ready 1",
            "loopfs_csi_storage_open 1",
            r#"loopfs_csi_volumes{kind="Block"} 2"#,
            r#"loopfs_csi_volumes{kind="Filesystem"} 1"#,
            &reserved,
            "loopfs_csi_trash_entries 0",
            "loopfs_csi_attached_devices 1",
            "loopfs_csi_devices_without_direct_io 0",
            r#"loopfs_csi_rpcs_total{method="NodePublishVolume",code="OK"} 2"#,
            r#"loopfs_csi_rpcs_total{method="NodePublishVolume",code="NotFound"} 1"#,
            r#"loopfs_csi_rpc_duration_seconds_count{method="NodePublishVolume"} 3"#,
            r#"loopfs_csi_abnormal_volumes{reason="ProjectChanged"} 0"#,
        ],
    );
    documentation::assert_documented(&text, "loopfs_csi");
    let mut names = text.lines().filter(|line| line.starts_with("loopfs_csi_")).collect::<Vec<_>>();
    let count = names.len();
    names.sort_unstable();
    names.dedup_by_key(|line| line.rsplit_once(' ').unwrap().0.to_owned());
    assert_eq!(names.len(), count, "a metric appears twice:\n{text}");

    loopfs::project_quota::assign_project(
        File::open(&directory).unwrap(),
        loopfs::project_quota::ProjectId::new(77).unwrap(),
    )
    .unwrap();
    // An open image stays in the trash.
    let image = fixture.image("b");
    assert!(fixture.store.delete(&id("b")).unwrap());
    wait_for(
        address,
        &[
            r#"loopfs_csi_abnormal_volumes{reason="ProjectChanged"} 1"#,
            r#"loopfs_csi_volumes{kind="Block"} 1"#,
            "loopfs_csi_trash_entries 1",
        ],
    );
    drop(image);
    assert_eq!(http::get(address, "/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(http::get(address, "/readyz"), (200, "ok\n".to_owned()));
    for (volume, target) in [("a", &device), ("c", &directory)] {
        fixture.node().node_unpublish_volume(unpublish(volume, target)).unwrap();
    }
    wait_for(address, &["loopfs_csi_attached_devices 0"]);
    fixture.finish();
}
