//! Measures copies that share blocks: clones and snapshots of images of several sizes, and clones of directory trees
//! beside a copy that reads and writes. Run by `cargo harness bench clone`, which makes tables and a plot of what this
//! prints: one JSON object in a line, the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features bench --bench clone -- images /mnt/xfs-with-prjquota
//! # cargo bench -p loopfs --features bench --bench clone -- trees /mnt/xfs
//! ```

mod images;
#[path = "../loop/machine.rs"]
mod machine;
#[path = "../loop/samples.rs"]
mod samples;
#[path = "../loop/stop.rs"]
mod stop;
mod trees;

use std::path::Path;
use std::process::ExitCode;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// How long a run is.
#[derive(Clone, Copy, Debug)]
enum Size {
    Full,
    Quick,
}

fn main() -> ExitCode {
    // Cargo itself adds the first of these.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let size = if args.iter().any(|arg| arg == "--quick") { Size::Quick } else { Size::Full };
    let words: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    stop::on_signals();
    let result = match words[..] {
        ["images", directory] => images::run(Path::new(directory), size),
        ["trees", directory] => trees::run(Path::new(directory), size),
        _ => Err("give `images DIRECTORY` or `trees DIRECTORY`, and --quick for a short run".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
