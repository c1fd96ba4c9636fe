//! The kernels for virtual machines, as listed in `kernels/kernels.toml` of the definitions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::debian::{EXTRACT, Selection};
use super::debian_versions::unpacked;
use crate::cache::Recipe;
use crate::kernel_log::ExpectedLines;
use crate::process::Program;
use crate::session::{Session, Workspace};

/// The catalogue, in the definitions.
const CATALOGUE: &str = "kernels/kernels.toml";
/// The list of the lines about faults that kernels may log.
const EXPECTED_LINES: &str = "kernels/kernel-log.toml";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    default: String,
    kernel: Vec<Row>,
    modules: BTreeMap<String, Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    suite: String,
    package: String,
}

/// A kernel and its modules, ready to boot.
#[derive(Clone, Debug)]
pub struct Kernel {
    name: String,
    release: String,
    directory: PathBuf,
    sets: BTreeMap<String, Vec<String>>,
    expected_lines: ExpectedLines,
}

/// A decompressed module, as the kernel loads it.
#[derive(Clone, Debug)]
pub struct Module {
    pub name: String,
    pub content: Vec<u8>,
}

impl Kernel {
    /// Returns the names in the catalogue, in its order.
    pub fn names(workspace: &Workspace) -> Result<Vec<String>> {
        let catalogue: Catalogue = workspace.definition(CATALOGUE)?;
        Ok(catalogue.kernel.into_iter().map(|row| row.name).collect())
    }

    /// Returns the name of the kernel that is booted by default.
    pub fn default_name(session: &Session) -> Result<String> {
        let catalogue: Catalogue = session.workspace.definition(CATALOGUE)?;
        Ok(catalogue.default)
    }

    /// Returns the kernel of this name in the catalogue, or the default kernel.
    ///
    /// # Errors
    /// The catalogue does not list it, its package cannot be fetched, or the list of expected lines is not valid.
    pub async fn prepare(session: &Session, name: Option<&str>) -> Result<Kernel> {
        let catalogue: Catalogue = session.workspace.definition(CATALOGUE)?;
        let name = name.unwrap_or(&catalogue.default);
        let known = || catalogue.kernel.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ");
        let row = catalogue
            .kernel
            .iter()
            .find(|row| row.name == name)
            .with_context(|| format!("no kernel is called {name} in {CATALOGUE}; there is: {}", known()))?
            .clone();
        let packages = [row.package.clone()];
        let selection = Selection::new(&row.suite, EXTRACT, &packages);
        let what = format!("kernel {}", row.name);
        let check = async |directory: &Path| release(directory).map(drop);
        let directory = unpacked(session, &what, &selection, Recipe::new("kernel", 2), place, check).await?;
        let expected_lines = ExpectedLines::read(&session.workspace.definitions().join(EXPECTED_LINES))?;
        let release = release(&directory)?;
        Ok(Kernel { name: row.name, release, directory, sets: catalogue.modules, expected_lines })
    }

    /// Returns the name in the catalogue.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the release, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns the path of the kernel's image.
    pub fn vmlinuz(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Returns the lines about faults that this kernel may log.
    pub fn expected_lines(&self) -> &ExpectedLines {
        &self.expected_lines
    }

    /// Returns the directory for `/usr/lib/modules`. Its name is the release.
    pub fn modules_directory(&self) -> PathBuf {
        self.directory.join("modules").join(&self.release)
    }

    /// Returns the artifact in the cache, for recipes that depend on it.
    pub fn artifact(&self) -> &Path {
        &self.directory
    }

    /// Returns the modules of these sets of the catalogue, each after its dependencies. It omits modules that
    /// are built in or that this version does not have.
    ///
    /// # Errors
    /// A set is not in the catalogue, or a module cannot be read.
    pub async fn modules(&self, sets: &[&str]) -> Result<Vec<Module>> {
        let files = module_files(&self.modules_directory())?;
        let mut order = Order { files: &files, seen: BTreeSet::new(), modules: Vec::new() };
        for set in sets {
            let names = self.sets.get(*set).with_context(|| format!("no set of modules is called {set}"))?;
            for name in names {
                order.add(&canonical(name)).await?;
            }
        }
        Ok(order.modules)
    }

    #[cfg(test)]
    pub(crate) fn at(directory: &Path) -> Kernel {
        Kernel {
            name: "test".to_owned(),
            release: String::new(),
            directory: directory.to_owned(),
            sets: BTreeMap::new(),
            expected_lines: ExpectedLines::default(),
        }
    }
}

/// Returns the path at which a file of a kernel package is kept, or `None` if it is not needed.
fn place(path: &Path) -> Option<PathBuf> {
    let path = path.strip_prefix("usr").unwrap_or(path);
    if let Ok(kernel) = path.strip_prefix("boot") {
        return kernel.to_string_lossy().starts_with("vmlinuz-").then(|| "vmlinuz".into());
    }
    let module = path.strip_prefix("lib/modules").ok()?;
    // Newer packages have the kernel there, and their installation copies it to /boot.
    Some(if module.ends_with("vmlinuz") { "vmlinuz".into() } else { Path::new("modules").join(module) })
}

fn release(directory: &Path) -> Result<String> {
    let modules = directory.join("modules");
    let mut releases = fs::read_dir(&modules)
        .with_context(|| format!("read {}", modules.display()))?
        .collect::<Result<Vec<_>, _>>()?;
    anyhow::ensure!(
        releases.len() == 1 && directory.join("vmlinuz").is_file(),
        "{} should hold one kernel and its modules, and holds {releases:?}",
        directory.display()
    );
    Ok(releases.remove(0).file_name().to_string_lossy().into_owned())
}

/// Returns every module file below a directory, by the canonical name of the module.
fn module_files(directory: &Path) -> Result<HashMap<String, PathBuf>> {
    let mut files = HashMap::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(directory) = pending.pop() {
        let entries = fs::read_dir(&directory).with_context(|| format!("read {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
            } else if let Some((name, _)) =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.split_once(".ko"))
            {
                files.insert(canonical(name), path);
            }
        }
    }
    Ok(files)
}

/// Collects modules so that each follows its dependencies.
struct Order<'a> {
    files: &'a HashMap<String, PathBuf>,
    seen: BTreeSet<String>,
    modules: Vec<Module>,
}

impl Order<'_> {
    async fn add(&mut self, name: &str) -> Result<()> {
        let Some(path) = self.files.get(name) else { return Ok(()) };
        if !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        let content = decompressed(path).await?;
        for needed in depends(&content) {
            Box::pin(self.add(&needed)).await?;
        }
        self.modules.push(Module { name: name.to_owned(), content });
        Ok(())
    }
}

async fn decompressed(path: &Path) -> Result<Vec<u8>> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => {
            let target = tempfile::NamedTempFile::new().context("make a file")?;
            // The output goes to a file because it is not text.
            let xz =
                Program::new("sh").args(["-c", "exec xz --decompress --stdout -- \"$1\" > \"$2\"", "sh"]);
            let xz = xz.arg(path).arg(target.path()).run().await;
            xz.with_context(|| format!("decompress {}", path.display()))?;
            Ok(fs::read(target.path())?)
        }
        Some("ko") => fs::read(path).with_context(|| format!("read {}", path.display())),
        _ => anyhow::bail!("{}: unknown compression", path.display()),
    }
}

/// Returns the dependencies of a module: `depends=` of its modinfo, a list of NUL-terminated strings.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = &module[start + KEY.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    let names = String::from_utf8_lossy(&value[..end]);
    names.split(',').filter(|name| !name.is_empty()).map(canonical).collect()
}

/// Returns the canonical name: file names may have dashes where the kernel has underscores.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        let module = b"ELF\0license=GPL\0depends=crc32c-generic,libcrc32c\0name=xfs\0";
        assert_eq!(depends(module), ["crc32c_generic", "libcrc32c"]);
        assert!(depends(b"\0depends=\0").is_empty());
    }

    /// Each module is listed once.
    #[tokio::test]
    async fn modules_follow_their_dependencies() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        fs::create_dir(&modules).unwrap();
        for (name, depends) in [("xfs", "libcrc32c"), ("libcrc32c", ""), ("br-net", "libcrc32c")] {
            fs::write(modules.join(format!("{name}.ko")), format!("\0depends={depends}\0")).unwrap();
        }
        let sets = [("all".to_owned(), vec!["xfs".into(), "built_in".into(), "br_net".into()])];
        let kernel = Kernel { sets: sets.into(), ..Kernel::at(dir.path()) };
        let names: Vec<String> =
            kernel.modules(&["all"]).await.unwrap().into_iter().map(|module| module.name).collect();
        assert_eq!(names, ["libcrc32c", "xfs", "br_net"]);
        assert!(kernel.modules(&["none"]).await.is_err());
    }
}
