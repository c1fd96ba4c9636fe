//! Generates the gRPC code from `proto/`, in Rust alone: no protoc to install.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/node_debug.proto"], ["proto"])?;
    // A kubeconfig has a token. Without Debug, logging one by accident does not compile.
    tonic_prost_build::configure()
        .skip_debug([".loopfs.nodedebug.v1.KubeconfigResponse"])
        .compile_fds(descriptors)?;
    Ok(())
}
