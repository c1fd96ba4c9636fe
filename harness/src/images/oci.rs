//! OCI
