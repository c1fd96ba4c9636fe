//! Generates the gRPC code from `proto/`, in Rust alone: no protoc to install.

use std::collections::BTreeSet;
use std::path::PathBuf;

const SOURCES: [&str; 2] = ["proto/csi.proto", "proto/pluginregistration.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(SOURCES, ["proto"])?;
    // Messages that carry credentials get no Debug, so that logging one by accident does not compile.
    let secret = descriptors
        .file
        .iter()
        .flat_map(|file| file.message_type.iter().map(move |message| (file.package(), message)))
        .filter(|(_, message)| message.field.iter().any(|field| field.name() == "secrets"))
        .map(|(package, message)| format!(".{package}.{}", message.name()))
        .collect::<Vec<_>>();
    // What there is to be called, for who counts calls.
    let services =
        descriptors.file.iter().filter(|file| file.package() == "csi.v1").flat_map(|file| &file.service);
    let methods =
        services.flat_map(|service| &service.method).map(|method| method.name()).collect::<BTreeSet<_>>();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    std::fs::write(out.join("methods.rs"), format!("&{methods:?}").replace('{', "[").replace('}', "]"))?;
    tonic_prost_build::configure().skip_debug(secret).compile_fds(descriptors)?;
    Ok(())
}
