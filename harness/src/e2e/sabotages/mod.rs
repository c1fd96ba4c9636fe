//! The sabotages of all stories.

mod data_disk;
mod data_files;
mod driver;
mod leak;
mod objects;
mod table;

pub(super) use self::table::{SABOTAGES, parser};
