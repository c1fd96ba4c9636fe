//! Unix sockets: listening on them, and connections of clients that send an authority which the HTTP/2 library refuses.

pub(crate) mod connection;
#[cfg(test)]
pub(crate) mod raw_client;
pub mod socket;
