//! Unix sockets: listening on them, and connections with authorities that the HTTP/2 library accepts.

pub(crate) mod connection;
pub(crate) mod socket;
