//! Static builds of the workspace's own programs.
