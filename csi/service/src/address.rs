//! Addresses of HTTP listeners.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use anyhow::Context;
use tokio::net::TcpListener;

/// The address of an HTTP listener: `ADDRESS:PORT`, or `:PORT` for all addresses of the pod or node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpAddress {
    One(SocketAddr),
    /// A port of all IPv6 and IPv4 addresses. On a node without IPv6, of all IPv4 addresses.
    AllOnPort(u16),
}

impl FromStr for HttpAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port_only = text.strip_prefix(':').map(str::parse);
        match (port_only, text.parse()) {
            (Some(Ok(port)), _) => Ok(Self::AllOnPort(port)),
            (_, Ok(address)) => Ok(Self::One(address)),
            _ => Err("must be ADDRESS:PORT or :PORT, such as 127.0.0.1:9809, [::1]:9809 or :9809".to_owned()),
        }
    }
}

impl HttpAddress {
    /// Listens on the address. `flag` is the command line argument that has it, for the error message.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, EACCES: see bind(2).
    pub async fn listen(self, flag: &str) -> anyhow::Result<TcpListener> {
        let (listener, port) = match self {
            Self::One(address) => (TcpListener::bind(address).await, address.port()),
            Self::AllOnPort(port) => (listen_on_all(port).await, port),
        };
        listener.with_context(|| format!("listen on port {port} ({flag})"))
    }
}

async fn listen_on_all(port: u16) -> std::io::Result<TcpListener> {
    // The unspecified address of IPv6 includes that of IPv4.
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => Ok(listener),
        // The node may have no IPv6. After any other error, such as EADDRINUSE, the second attempt fails as well.
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokio::net::TcpStream;

    use super::*;

    #[rstest]
    #[case::all(":9809", Some(HttpAddress::AllOnPort(9809)))]
    #[case::one("127.0.0.1:9809", Some(HttpAddress::One(([127, 0, 0, 1], 9809).into())))]
    #[case::one_of_ipv6("[::1]:9809", Some(HttpAddress::One((Ipv6Addr::LOCALHOST, 9809).into())))]
    #[case::no_port("127.0.0.1", None)]
    #[case::no_address("9809", None)]
    #[case::a_name("localhost:9809", None)]
    #[case::not_a_port(":98090", None)]
    fn address_needs_port_and_no_name(#[case] text: &str, #[case] address: Option<HttpAddress>) {
        assert_eq!(text.parse().ok(), address);
    }

    #[tokio::test]
    async fn wildcard_listener_accepts_ipv4() {
        let listener = HttpAddress::AllOnPort(0).listen("--metrics-address").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    }
}
