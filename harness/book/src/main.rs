//! Builds the book into `target/book`: `cargo run -p book`. An argument is the address of the sources, for example of a
//! repository on the web, into which links that leave the book shall lead. Without one, they lead into the checkout.

use std::path::Path;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = above.nth(2).context("the crate is in a directory of the workspace")?;
    let sources = std::env::args().nth(1);
    let sources = sources.as_deref().unwrap_or(book::SOURCES_IN_CHECKOUT);
    let destination = root.join("target/book");
    book::build(&root.join("docs"), &destination, sources)?;
    println!("{}", destination.join("index.html").display());
    Ok(())
}
