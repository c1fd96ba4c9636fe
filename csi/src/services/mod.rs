//! The gRPC services: one file for each of them, and below these what several RPCs share.

mod controller;
mod identity;
mod inventory;
mod node;
mod registration;
mod rpc;
mod snapshots;
mod unavailable;
mod unpublish;
mod volumes;

pub(crate) use controller::ControllerService;
pub(crate) use identity::IdentityService;
pub(crate) use node::NodeService;
pub(crate) use registration::Registrar;
pub(crate) use rpc::{VolumeOperations, Volumes};
pub(crate) use volumes::VolumesService;

#[cfg(test)]
mod fuzz;
