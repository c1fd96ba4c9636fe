//! Builds the book into `target/book`: `cargo run -p book`.

use std::path::Path;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = above.nth(2).context("the crate is in a directory of the workspace")?;
    let destination = root.join("target/book");
    book::build(&root.join("docs"), &destination)?;
    println!("{}", destination.join("index.html").display());
    Ok(())
}
