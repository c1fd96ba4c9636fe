//! The loopback ports and addresses of one cluster, leased so that no two clusters share one.
//!
//! Each running cluster holds one number by the name of a Unix socket, which the kernel releases when the process ends. The
//! number determines every port and address. No other process of the harness can therefore take an address
//! before its server starts, and a restarted component gets the same port.
//!
//! The name is abstract, so like ports it belongs to the network namespace: runs of other checkouts, users and caches see
//! it, too.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use anyhow::{Context, Result, bail};

/// The number of clusters that can run concurrently on one machine.
const NUMBERS: u8 = 32;
/// The first port. All ports are below the default range of ephemeral ports (32768 and up).
const FIRST_PORT: u16 = 21_000;
const PORTS_EACH: u16 = 8;
/// The kubelet's default port. All nodes use it, because each node has an address of its own.
const KUBELET_PORT: u16 = 10_250;
/// The name of the sockets, before the number.
const NAME: &str = "testvm-cluster";

/// A lease of a cluster's loopback ports and addresses; dropping it releases them.
pub(crate) struct LoopbackLease {
    number: u8,
    _name: UnixListener,
}

impl LoopbackLease {
    /// Leases the lowest number that no other cluster holds and whose ports are free.
    pub(crate) fn take() -> Result<LoopbackLease> {
        Self::take_one_of(NAME, Self::is_free)
    }

    fn take_one_of(name: &str, is_free: impl Fn(&LoopbackLease) -> bool) -> Result<LoopbackLease> {
        for number in 0..NUMBERS {
            let name = format!("{name}-{number}");
            let listener = match UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name)?) {
                Err(error) if error.kind() == ErrorKind::AddrInUse => continue,
                bound => bound.with_context(|| format!("bind the abstract socket {name}"))?,
            };
            let lease = LoopbackLease { number, _name: listener };
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
    pub(crate) fn api_server(&self) -> SocketAddrV4 {
        self.control_plane(0)
    }

    /// Returns the address of the controller manager's health and metrics endpoints.
    pub(crate) fn controller_manager(&self) -> SocketAddrV4 {
        self.control_plane(1)
    }

    /// Returns the address of the scheduler's health and metrics endpoints.
    pub(crate) fn scheduler(&self) -> SocketAddrV4 {
        self.control_plane(2)
    }

    /// Returns the address at which the API server reaches the kubelet of node `index`.
    pub(crate) fn kubelet(&self, index: u8) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::new(127, 88, self.number, index + 10), KUBELET_PORT)
    }

    fn control_plane(&self, offset: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::LOCALHOST, FIRST_PORT + u16::from(self.number) * PORTS_EACH + offset)
    }

    fn is_free(&self) -> bool {
        [self.api_server(), self.controller_manager(), self.scheduler(), self.kubelet(0)]
            .iter()
            .all(|address| TcpListener::bind(address).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leases a number of a test's own, without checking the ports, which all tests on the machine share.
    fn take(test: &str) -> LoopbackLease {
        LoopbackLease::take_one_of(&format!("{NAME}-{test}-{}", std::process::id()), |_| true).unwrap()
    }

    #[test]
    fn two_clusters_have_different_addresses() {
        let one = take("two");
        let two = take("two");
        assert_ne!(one.api_server(), two.api_server());
        assert_ne!(one.kubelet(0), two.kubelet(0));
        assert_ne!(one.kubelet(0), one.kubelet(1));
    }

    #[test]
    fn ended_cluster_frees_its_number() {
        let one = take("free");
        let address = one.api_server();
        drop(one);
        assert_eq!(take("free").api_server(), address);
    }

    #[test]
    fn number_with_used_port_is_skipped() {
        let one = LoopbackLease::take().unwrap();
        let address = one.api_server();
        let _listener = TcpListener::bind(address).unwrap();
        // Its name is free now, and its port is not.
        drop(one);
        assert_ne!(LoopbackLease::take().unwrap().api_server(), address);
    }
}
