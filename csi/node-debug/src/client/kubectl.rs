//! `dbg kubectl`.
//!
//! The kubeconfig is a file in memory (memfd_create(2)) that only kubectl inherits. It has no name, so nothing has to be
//! removed, also if dbg or kubectl is killed.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::args::{Connection, KubectlArgs};
use super::connect::Client;
use crate::proto as wire;

pub(super) async fn run(connection: &Connection, args: KubectlArgs) -> anyhow::Result<ExitCode> {
    let KubectlArgs { account, lifetime, kubectl, arguments } = args;
    let mut client = Client::connect(connection).await?;
    let request = wire::KubeconfigRequest {
        service_account: account.unwrap_or_default(),
        lifetime_seconds: u64::try_from(lifetime.as_secs())?,
    };
    let response = client.service.kubeconfig(request).await;
    let response = response.map_err(|status| client.explain(status))?.into_inner();
    let kubeconfig = in_memory(&response.kubeconfig).context("hold the kubeconfig in memory")?;
    // kubectl opens it by this path, in its own process.
    let path = format!("/proc/self/fd/{}", kubeconfig.as_raw_fd());
    // kubectl replaces dbg, so signals and the exit code are those of kubectl.
    let error = Command::new(&kubectl).args(arguments).env("KUBECONFIG", path).exec();
    Err(anyhow!("run {}: {error}; install kubectl, or give its path with --kubectl", kubectl.display()))
}

/// Returns a file without a name, which child processes inherit.
fn in_memory(content: &str) -> std::io::Result<File> {
    // Without MFD_CLOEXEC.
    let mut file = File::from(memfd_create(c"kubeconfig", MFdFlags::empty())?);
    file.write_all(content.as_bytes())?;
    file.rewind()?;
    Ok(file)
}
