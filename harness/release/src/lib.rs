//! Writes the files of a release from a commit: the image for a registry, Debian packages, the manifests, the Helm chart, checksums and
//! notes. Nothing is published.
//!
//! The clusters of the harness use another archive of the same programs: for this machine only, and built with cargo's ordinary
//! directories, so that a change is compiled in seconds. [`DRIVER`] and [`driver_files`] are common to both.

mod check;
mod deb;
mod image;
mod notes;
mod programs;
mod release;
mod sources;

pub use self::check::check_image;
pub use self::deb::{DebArgs, deb, pack_for_this_machine};
pub use self::image::{ImageArgs, image};
pub use self::programs::{DRIVER, driver_files};
pub use self::release::{ReleaseArgs, release};
