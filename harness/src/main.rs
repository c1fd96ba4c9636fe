//! Laid down by the workspace; see ARCHITECTURE.md.
fn main() {}
