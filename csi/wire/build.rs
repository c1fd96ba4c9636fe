//! Generates the gRPC code from `proto/`, in Rust alone: no protoc to install.

use std::collections::BTreeSet;
use std::path::PathBuf;

const CSI: &str = "proto/csi.proto";
const SOURCES: [&str; 3] = [CSI, "proto/loopfs.proto", "proto/pluginregistration.proto"];
/// The packages whose calls are counted.
const COUNTED: [&str; 2] = ["csi.v1", "loopfs.v1"];

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
    let counted = descriptors.file.iter().filter(|file| COUNTED.contains(&file.package()));
    let services = counted.flat_map(|file| &file.service);
    let methods =
        services.flat_map(|service| &service.method).map(|method| method.name()).collect::<BTreeSet<_>>();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    std::fs::write(out.join("methods.rs"), format!("&{methods:?}").replace('{', "[").replace('}', "]"))?;
    for source in SOURCES {
        tonic_prost_build::configure()
            // A driver need not implement each call of CSI, but each of the other services.
            .generate_default_stubs(source == CSI)
            .skip_debug(&secret)
            .compile_fds(protox::compile([source], ["proto"])?)?;
    }
    Ok(())
}
