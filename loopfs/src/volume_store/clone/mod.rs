//! Copies that share blocks with the original until one of the two is written: volumes made from volumes and
//! snapshots, and snapshots taken of volumes.

mod copy;
mod directory;
mod image;
mod target;
