//! Writes the `/spec.json` of a machine that mounts a disk, starts a service, and runs until it is powered off, and prints the
//! messages that the guest sends while it boots.
//!
//! `testvm` writes this file into the initramfs. Other hosts of the guest can do it themselves: put the program `guest-init`
//! at `/init` and the specification at `/spec.json`, attach a virtio-blk disk with the serial number `root`, and read the
//! virtio port that `REPORT_PORT` names.
//!
//! ```console
//! $ cargo run --package testvm-guest --example boot_specification
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use testvm_guest::control::{Action, CONTROL_PORT, Request};
use testvm_guest::report::{Message, REPORT_PORT, Verdict};
use testvm_guest::spec::{
    BootSpec, Command, Condition, Mode, Mount, Network, NodeSpec, Ready, Restart, SPEC_PATH, Service, Source,
    Step,
};

fn main() -> Result<()> {
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).context("read the clock")?.as_secs();
    let spec = BootSpec { modules: Vec::new(), unix_time, mode: Mode::Node(node()) };
    println!("{SPEC_PATH} in the initramfs:\n{}\n", serde_json::to_string_pretty(&spec)?);

    println!("lines that the host reads from the port {REPORT_PORT}:");
    let messages = [
        Message::Started { kernel: "6.12".to_owned() },
        Message::Log { source: "driver".to_owned(), line: "listening".to_owned() },
        Message::NodeReady,
        Message::Verdict(Verdict::Passed),
    ];
    for message in messages {
        println!("{}", serde_json::to_string(&message)?);
    }

    println!("\na line that the host writes to the port {CONTROL_PORT}:");
    let argv = ["findmnt", "/data"].map(str::to_owned).to_vec();
    let action =
        Action::Exec { argv, env: BTreeMap::new(), input: String::new(), timeout: Duration::from_secs(10) };
    println!("{}", serde_json::to_string(&Request { id: 1, action })?);
    Ok(())
}

/// Returns a machine with the disk `data` at `/data` and a driver that serves it.
fn node() -> NodeSpec {
    let data = Mount {
        source: Source::Disk("data".to_owned()),
        target: "/data".to_owned(),
        fs_type: "xfs".to_owned(),
        options: "prjquota,nodev,nosuid".to_owned(),
    };
    // A step that fails ends the run.
    let prepare = Command {
        name: "prepare".to_owned(),
        argv: ["mkdir", "--parents", "/data/volumes"].map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        timeout: Duration::from_secs(10),
    };
    let socket = "/run/driver.sock";
    let driver = Service {
        name: "driver".to_owned(),
        argv: vec!["/usr/bin/driver".to_owned(), format!("--socket={socket}")],
        env: BTreeMap::new(),
        log_file: None,
        restart: Restart::Always,
        // The next step would begin when the driver accepts connections.
        ready: Some(Ready {
            when: Condition::UnixSocket(socket.to_owned()),
            within: Duration::from_secs(30),
        }),
    };
    NodeSpec {
        hostname: "node".to_owned(),
        root_disk: "root".to_owned(),
        mounts: vec![data],
        network: Some(Network::default()),
        files: Vec::new(),
        steps: vec![Step::Run(prepare), Step::Service(driver)],
    }
}
