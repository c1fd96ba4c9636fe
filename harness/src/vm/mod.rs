//! Virtual machines.
