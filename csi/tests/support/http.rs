//! A minimal HTTP client for the endpoints of the driver.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::{TIMEOUT, wait_for_ok};

/// Returns the status and the body of a response.
pub(crate) fn get(address: SocketAddr, path: &str) -> (u16, String) {
    request(address, &format!("GET {path} HTTP/1.1\r\nHost: driver\r\n\r\n"))
}

/// Waits until the response has this status: a verdict is up to two seconds old.
pub(crate) fn wait_for_status(address: SocketAddr, path: &str, expected: u16) {
    wait_for_ok(|| match get(address, path) {
        (status, _) if status == expected => Ok(()),
        (status, body) => Err(format!("{path} still returns {status}: {body}")),
    });
}

/// Waits until the driver counts as alive. Before that, only a late response may count against it.
pub(crate) fn wait_until_alive(address: SocketAddr) {
    wait_for_ok(|| match get(address, "/healthz") {
        (200, _) => Ok(()),
        (503, why) if why.contains("has not responded on") => Err(why),
        response => panic!("/healthz returns {response:?}"),
    });
}

pub(crate) fn request(address: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Returns an address without a listener. The guest of the kernel lane has no network, and its loopback interface is
/// down at first.
pub(crate) fn free_address() -> SocketAddr {
    const FLAGS: &str = "/sys/class/net/lo/flags";
    const UP: u32 = 1;
    let text = std::fs::read_to_string(FLAGS).unwrap();
    let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap();
    if flags & UP == 0 {
        std::fs::write(FLAGS, format!("{:#x}", flags | UP)).unwrap();
    }
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
