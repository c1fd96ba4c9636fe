//! The wire types, generated from `proto/`.
#![allow(clippy::allow_attributes_without_reason, reason = "generated code")]

tonic::include_proto!("loopfs.nodedebug.v1");
