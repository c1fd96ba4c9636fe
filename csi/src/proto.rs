//! The wire types, generated from `proto/`.
#![allow(clippy::allow_attributes_without_reason, reason = "generated code")]

/// The Container Storage Interface.
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Names of the methods of all services.
pub(crate) const METHODS: &[&str] = include!(concat!(env!("OUT_DIR"), "/methods.rs"));

/// The kubelet's plugin registration.
pub mod registration {
    tonic::include_proto!("pluginregistration");
}
