//! The loopback ports and addresses of one cluster, leased so that no two clusters share one.
//!
//! Each running cluster holds one number by a file lock, which the kernel releases when the process ends. The
//! number determines every port and address. No other process of the harness can therefore take an address
//! before its server starts, and a restarted component gets the same port.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// The number of clusters that can run concurrently on one machine.
const NUMBERS: u8 = 32;
/// The first port. All ports are below the default range of ephemeral ports (32768 and up).
const FIRST_PORT: u16 = 21_000;
const PORTS_EACH: u16 = 8;
/// The kubelet's default port. All nodes use it, because each node has an address of its own.
const KUBELET_PORT: u16 = 10_250;
/// The number of nodes in one cluster. Node N listens on 127.88.<cluster>.<N + 10>.
const MAX_NODES: u8 = 200;

/// A lease of a cluster's loopback ports and addresses; dropping it releases them.
pub(crate) struct LoopbackLease {
    number: u8,
    _lock: Flock<File>,
}

impl LoopbackLease {
    /// Leases the lowest number that no other cluster holds and whose ports are free.
    pub(crate) fn take(lock_dir: &Path) -> Result<LoopbackLease> {
        Self::take_one_of(lock_dir, Self::is_free)
    }

    fn take_one_of(lock_dir: &Path, is_free: impl Fn(&LoopbackLease) -> bool) -> Result<LoopbackLease> {
        fs::create_dir_all(lock_dir).with_context(|| format!("create {}", lock_dir.display()))?;
        for number in 0..NUMBERS {
            let path = lock_dir.join(format!("cluster-{number}.lock"));
            let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
            let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((_, Errno::EWOULDBLOCK)) => continue,
                Err((_, errno)) => return Err(errno).with_context(|| format!("lock {}", path.display())),
            };
            let lease = LoopbackLease { number, _lock: lock };
            if is_free(&lease) {
                return Ok(lease);
            }
        }
        bail!(
            "none of the {NUMBERS} port blocks from {FIRST_PORT} up is free: \
             stop other clusters"
        )
    }

    /// Returns the API server's address. QEMU's user network reaches only 127.0.0.1 itself.
    pub(crate) fn api_server(&self) -> SocketAddr {
        self.control_plane(0)
    }

    /// Returns the address of the controller manager's health and metrics endpoints.
    pub(crate) fn controller_manager(&self) -> SocketAddr {
        self.control_plane(1)
    }

    /// Returns the address of the scheduler's health and metrics endpoints.
    pub(crate) fn scheduler(&self) -> SocketAddr {
        self.control_plane(2)
    }

    /// Returns the address at which the API server reaches the kubelet of node `index`.
    pub(crate) fn kubelet(&self, index: u8) -> Result<SocketAddr> {
        if index >= MAX_NODES {
            bail!("a cluster has at most {MAX_NODES} nodes");
        }
        Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 88, self.number, index + 10)), KUBELET_PORT))
    }

    fn control_plane(&self, offset: u16) -> SocketAddr {
        let port = FIRST_PORT + u16::from(self.number) * PORTS_EACH + offset;
        SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
    }

    fn is_free(&self) -> bool {
        let first_node = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 88, self.number, 10)), KUBELET_PORT);
        [self.api_server(), self.controller_manager(), self.scheduler(), first_node]
            .iter()
            .all(|address| TcpListener::bind(address).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leases a number without checking the ports, which all tests on the machine share.
    fn take(dir: &Path) -> LoopbackLease {
        LoopbackLease::take_one_of(dir, |_| true).unwrap()
    }

    #[test]
    fn two_clusters_have_different_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let one = take(dir.path());
        let two = take(dir.path());
        assert_ne!(one.api_server(), two.api_server());
        assert_ne!(one.kubelet(0).unwrap(), two.kubelet(0).unwrap());
        assert_ne!(one.kubelet(0).unwrap(), one.kubelet(1).unwrap());
    }

    #[test]
    fn a_number_is_free_after_its_cluster_ended() {
        let dir = tempfile::tempdir().unwrap();
        let one = take(dir.path());
        let address = one.api_server();
        drop(one);
        assert_eq!(take(dir.path()).api_server(), address);
    }

    #[test]
    fn a_number_whose_port_is_in_use_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let address = LoopbackLease::take(dir.path()).unwrap().api_server();
        let _listener = TcpListener::bind(address).unwrap();
        assert_ne!(LoopbackLease::take(dir.path()).unwrap().api_server(), address);
    }
}
