//! What a program of the image says about itself: its architecture, its libraries, and the list of its dependencies.

use std::io::Read;

use anyhow::{Context, Result};
use flate2::read::ZlibDecoder;
use object::{Architecture, Object, ObjectSection};
use serde::Deserialize;

/// The section with the dependencies: JSON, compressed by zlib.
const DEPENDENCIES: &str = ".dep-v0";
/// The section with the path of the dynamic linker, which a static program does not have.
const INTERPRETER: &str = ".interp";

/// The properties of a program.
#[derive(Clone, Debug)]
pub(crate) struct ProgramInfo {
    /// The architecture by Rust's name, or an empty text for any other.
    pub(crate) machine: &'static str,
    pub(crate) is_static: bool,
    pub(crate) packages: Vec<Package>,
}

/// A crate of which the program has code.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Set for the crate of the program.
    #[serde(default)]
    pub(crate) root: bool,
}

#[derive(Deserialize)]
struct Dependencies {
    packages: Vec<Package>,
}

impl ProgramInfo {
    /// Reads the properties of a program.
    ///
    /// # Errors
    /// It is not an ELF file, or has no list of dependencies.
    pub(crate) fn read(program: &[u8]) -> Result<ProgramInfo> {
        let file = object::File::parse(program).context("parse the ELF file")?;
        let machine = match file.architecture() {
            Architecture::X86_64 => "x86_64",
            Architecture::Aarch64 => "aarch64",
            _ => "",
        };
        let section = file.section_by_name(DEPENDENCIES);
        let section = section.with_context(|| format!("the program has no section {DEPENDENCIES}"))?;
        let compressed = section.data().with_context(|| format!("read the section {DEPENDENCIES}"))?;
        Ok(ProgramInfo {
            machine,
            is_static: file.section_by_name(INTERPRETER).is_none(),
            packages: packages(compressed)?,
        })
    }

    /// Returns the crate of the program.
    pub(crate) fn root(&self) -> Option<&Package> {
        self.packages.iter().find(|package| package.root)
    }
}

fn packages(compressed: &[u8]) -> Result<Vec<Package>> {
    let mut text = String::new();
    ZlibDecoder::new(compressed).read_to_string(&mut text).context("decompress the list of dependencies")?;
    let list: Dependencies = serde_json::from_str(&text).context("parse the list of dependencies")?;
    Ok(list.packages)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::ZlibEncoder;

    use super::*;

    #[test]
    fn dependency_list_includes_the_program() {
        let text = r#"{"packages":[
            {"name":"csi","version":"0.1.0","source":"local","dependencies":[1],"root":true},
            {"name":"tokio","version":"1.0.0","source":"registry"}
        ]}"#;
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        let packages = packages(&encoder.finish().unwrap()).unwrap();
        let info = ProgramInfo { machine: "x86_64", is_static: true, packages };
        assert_eq!(info.root().map(|package| package.name.as_str()), Some("csi"));
        assert_eq!(info.packages.len(), 2);
    }

    #[test]
    fn program_without_dependency_list_is_refused() {
        // This test program has none.
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let error = ProgramInfo::read(&program).unwrap_err().to_string();
        assert!(error.contains(DEPENDENCIES), "{error}");
    }
}
