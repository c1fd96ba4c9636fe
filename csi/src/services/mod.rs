//! The gRPC services. They read requests, run the operations on volumes and return responses.

mod controller;
mod health;
mod identity;
mod node;
mod registration;
mod responses;
mod rpc;
mod status;
mod volumes;

pub(crate) use controller::ControllerService;
pub(crate) use identity::IdentityService;
pub(crate) use node::NodeService;
pub(crate) use registration::Registrar;
pub(crate) use volumes::VolumesService;
