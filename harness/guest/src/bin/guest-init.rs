//! PID 1 of the test machines: see `testvm_guest`.

fn main() {
    testvm_guest::main();
}
