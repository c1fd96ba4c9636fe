//! Addresses of HTTP listeners.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use anyhow::Context;
use tokio::net::TcpListener;

/// The address of an HTTP listener: `ADDRESS:PORT`, or `:PORT` for all addresses of the pod or node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpAddress {
    /// One address.
    At(SocketAddr),
    /// All IPv6 and IPv4 addresses. Only IPv4 addresses on a node without IPv6.
    All(u16),
}

impl FromStr for HttpAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = text.strip_prefix(':').map(str::parse);
        match (all, text.parse()) {
            (Some(Ok(port)), _) => Ok(Self::All(port)),
            (_, Ok(address)) => Ok(Self::At(address)),
            _ => Err("must be ADDRESS:PORT or :PORT, such as 127.0.0.1:9809, [::1]:9809 or :9809".to_owned()),
        }
    }
}

impl HttpAddress {
    /// Listens on the address, which the user gave with `flag`.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, EACCES: see bind(2).
    pub async fn listen(self, flag: &str) -> anyhow::Result<TcpListener> {
        let (first, second) = match self {
            Self::At(address) => (address, None),
            Self::All(port) => {
                let at = |ip: IpAddr| SocketAddr::new(ip, port);
                (at(Ipv6Addr::UNSPECIFIED.into()), Some(at(Ipv4Addr::UNSPECIFIED.into())))
            }
        };
        let listener = match (TcpListener::bind(first).await, second) {
            (Ok(listener), _) => Ok(listener),
            // The node has no IPv6.
            (Err(_), Some(second)) => TcpListener::bind(second).await,
            (Err(error), None) => Err(error),
        };
        listener.with_context(|| format!("listen on port {} ({flag})", first.port()))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokio::net::TcpStream;

    use super::*;

    #[rstest]
    #[case::all(":9809", Some(HttpAddress::All(9809)))]
    #[case::one("127.0.0.1:9809", Some(HttpAddress::At(([127, 0, 0, 1], 9809).into())))]
    #[case::one_of_ipv6("[::1]:9809", Some(HttpAddress::At((Ipv6Addr::LOCALHOST, 9809).into())))]
    #[case::no_port("127.0.0.1", None)]
    #[case::no_address("9809", None)]
    #[case::a_name("localhost:9809", None)]
    #[case::not_a_port(":98090", None)]
    fn addresses_are_parsed(#[case] text: &str, #[case] address: Option<HttpAddress>) {
        assert_eq!(text.parse().ok(), address);
    }

    #[tokio::test]
    async fn a_listener_of_all_addresses_accepts_connections() {
        let listener = HttpAddress::All(0).listen("--metrics-address").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    }
}
