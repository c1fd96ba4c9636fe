//! Clones and snapshots: copies that share blocks with the original until one of the two is written. Volumes are cloned from
//! volumes and snapshots, and snapshots are taken of volumes.

mod copy;
mod directory;
mod image;
mod target;
