//! PID 1 of the test machines: see `harness::guest`.

fn main() {
    harness::guest::main();
}
