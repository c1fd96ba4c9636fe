//! `cargo harness`: see `cargo harness --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    harness::args::main()
}
