//! Generates the gRPC code from `proto/`, in Rust alone: no protoc to install.

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
    tonic_prost_build::configure().skip_debug(secret).compile_fds(descriptors)?;
    Ok(())
}
