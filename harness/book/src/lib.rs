//! Builds the book in `docs` with mdBook, and checks it: mdBook prints no warning, and each page is in SUMMARY.md.
//!
//! `docs/decisions/0062-the-book.md` gives the reasons.

mod build;
mod links;
pub mod markdown;

pub use build::build;
