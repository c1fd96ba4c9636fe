//! The end-to-end tests of Kubernetes, of the release that the clusters run.
//!
//! The suite `External.Storage` among them tests any CSI driver by a definition of what the driver can do. [`Suite::build`]
//! builds the programs from the Go module, and [`Suite::image_archives`] the container images of the test pods, under the
//! names that the tests use. [`Suite::start`] runs specs on a cluster.

mod images;
mod suite;

pub use self::suite::{REPORT, Specs, Suite, Target};
