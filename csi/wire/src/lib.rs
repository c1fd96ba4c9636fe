//! What `loopfs-csi` and its clients say to each other: the messages, generated from `proto/`, and the names in them.

pub mod reason;
pub mod reserved;
mod settings;

pub use settings::{Settings, SettingsError};

/// The Container Storage Interface.
pub mod csi {
    #![allow(clippy::allow_attributes_without_reason, reason = "generated code")]
    tonic::include_proto!("csi.v1");
}

/// The requests of the provisioner to the driver of its node.
pub mod volumes {
    #![allow(clippy::allow_attributes_without_reason, reason = "generated code")]
    tonic::include_proto!("loopfs.v1");
}

/// The kubelet's plugin registration.
pub mod registration {
    #![allow(clippy::allow_attributes_without_reason, reason = "generated code")]
    tonic::include_proto!("pluginregistration");
}

/// Names of the methods of all services but the registration.
pub const METHODS: &[&str] = include!(concat!(env!("OUT_DIR"), "/methods.rs"));
