//! Measures attaching, finding, detaching and removing loop devices, and allocating project ids, each beside the bare
//! system calls and beside the methods that other programs use. Run by `cargo harness bench loop`, which makes tables
//! and a plot of what this prints: one JSON object in a line, the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features bench --bench loop -- devices /var/tmp
//! # cargo bench -p loopfs --features bench --bench loop -- ids /mnt/xfs-with-prjquota
//! ```

mod devices;
mod ids;
mod machine;
mod population;
mod samples;
mod stop;

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
        ["devices", directory] => devices::run(Path::new(directory), size),
        ["ids", directory] => ids::run(Path::new(directory), size),
        _ => Err("give `devices DIRECTORY` or `ids DIRECTORY`, and --quick for a short run".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
