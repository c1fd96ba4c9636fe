//! The loopback ports and addresses of one cluster, leased so that two clusters never meet.
//!
//! Each running cluster holds one number by a file lock, which the kernel drops with the process. The
//! number fixes every port and address, so no address is chosen and then taken by another process before the
//! server behind it starts, and a component restarted later finds its port still its own.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Clusters one machine can run at a time.
const NUMBERS: u8 = 32;
/// Below the range outgoing connections take their ports from (32768 and up by default).
const FIRST_PORT: u16 = 21_000;
const PORTS_EACH: u16 = 8;
/// The kubelet's own port: every node has an address of its own, so all of them can use it.
const KUBELET_PORT: u16 = 10_250;
/// Nodes one cluster can have: node N answers at 127.88.<cluster>.<N + 10>.
const MAX_NODES: u8 = 200;

/// A cluster's hold on its loopback ports and addresses; gone when dropped.
pub(crate) struct LoopbackLease {
    number: u8,
    _lock: Flock<File>,
}

impl LoopbackLease {
    /// Takes the lowest number that no other cluster holds and whose ports are free.
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
             stop other clusters with `cargo harness down`"
        )
    }

    /// Where the API server listens. QEMU's user network reaches only 127.0.0.1 itself.
    pub(crate) fn api_server(&self) -> SocketAddr {
        self.control_plane(0)
    }

    /// Where the controller manager serves its health and metrics.
    pub(crate) fn controller_manager(&self) -> SocketAddr {
        self.control_plane(1)
    }

    /// Where the scheduler serves its health and metrics.
    pub(crate) fn scheduler(&self) -> SocketAddr {
        self.control_plane(2)
    }

    /// Where the API server finds the kubelet of node `index`.
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

    /// Without a look at the ports, of which there is one set for all tests of the machine.
    fn take(dir: &Path) -> LoopbackLease {
        LoopbackLease::take_one_of(dir, |_| true).unwrap()
    }

    #[test]
    fn two_clusters_share_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let one = take(dir.path());
        let two = take(dir.path());
        assert_ne!(one.api_server(), two.api_server());
        assert_ne!(one.kubelet(0).unwrap(), two.kubelet(0).unwrap());
        assert_ne!(one.kubelet(0).unwrap(), one.kubelet(1).unwrap());
    }

    #[test]
    fn a_number_is_free_again_when_its_cluster_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let one = take(dir.path());
        let address = one.api_server();
        drop(one);
        assert_eq!(take(dir.path()).api_server(), address);
    }

    #[test]
    fn a_port_somebody_else_listens_on_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let address = LoopbackLease::take(dir.path()).unwrap().api_server();
        let _listener = TcpListener::bind(address).unwrap();
        assert_ne!(LoopbackLease::take(dir.path()).unwrap().api_server(), address);
    }
}
