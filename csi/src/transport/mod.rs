//! Unix sockets: listening on them, and connections that the HTTP/2 library accepts.

pub(crate) mod connection;
pub(crate) mod socket;
