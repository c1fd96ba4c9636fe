//! Container images of programs, as OCI archives with one layer, no base image and nothing downloaded: of one platform for
//! nodes, and of several for a registry ([`index`]).
//!
//! <https://github.com/opencontainers/image-spec/blob/main/image-layout.md>. The same files produce the same
//! bytes, so a different image has a different digest.

pub mod index;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::cache::hex;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The beginning of the paths of blobs.
const BLOBS: &str = "blobs/sha256/";
/// The annotation with the name that containerd gives an imported image.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// A container image. Its files are owned by root and have no date.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// The complete references that pods name, such as `docker.io/library/driver:dev`. All are names of one image.
    pub references: Vec<String>,
    /// The program that the image runs, and its first arguments.
    pub entrypoint: Vec<String>,
    /// The arguments that a pod replaces by its own.
    pub command: Vec<String>,
    /// The content. No entry may be below a link.
    pub entries: Vec<Entry>,
}

/// An entry of the file system of an image. Paths are absolute.
#[derive(Clone, Debug)]
pub enum Entry {
    /// An executable file, and the file of the host that it is a copy of.
    Program { path: String, host: PathBuf },
    /// A symbolic link.
    Link { path: String, target: String },
    /// A directory. Directories above other entries need none.
    Directory { path: String, mode: u32 },
}

impl Entry {
    fn path(&self) -> &str {
        match self {
            Entry::Program { path, .. } | Entry::Link { path, .. } | Entry::Directory { path, .. } => path,
        }
    }
}

/// Writes an archive of an image with `files`: pairs of an absolute path in the image and a program of the
/// host. The image runs the first.
pub fn archive(target: &Path, reference: &str, files: &[(&str, &Path)]) -> Result<()> {
    let entries = files
        .iter()
        .map(|(path, host)| Entry::Program { path: (*path).to_owned(), host: (*host).to_owned() });
    let entrypoint = files.first().map(|(path, _)| (*path).to_owned());
    Image {
        references: vec![reference.to_owned()],
        entrypoint: entrypoint.into_iter().collect(),
        command: Vec::new(),
        entries: entries.collect(),
    }
    .write(target)
}

impl Image {
    /// Writes an archive of the image.
    ///
    /// # Errors
    /// The image has no reference or no entrypoint, a program cannot be read, or the archive cannot be written.
    pub fn write(&self, target: &Path) -> Result<()> {
        self.write_archive(target).with_context(|| format!("make the image {}", self.references.join(", ")))
    }

    fn write_archive(&self, target: &Path) -> Result<()> {
        anyhow::ensure!(!self.references.is_empty(), "the image has no reference");
        anyhow::ensure!(!self.entrypoint.is_empty(), "the image has no program to run");
        let layer = Blob::new(LAYER, layer(&self.entries)?);
        // The layer is uncompressed, so its digest is that of its content.
        let diff_id = layer.digest();
        let mut run = json!({"Entrypoint": self.entrypoint});
        if !self.command.is_empty() {
            run["Cmd"] = json!(self.command);
        }
        let blobs = platform_blobs(architecture()?, &run, layer, &diff_id, &BTreeMap::new())?;
        let [layer, config, manifest] = &blobs;
        let named = self.references.iter().map(|reference| {
            let mut named = manifest.descriptor();
            named["annotations"] = json!({CONTAINERD_NAME: reference});
            named
        });
        let index = json!({"schemaVersion": 2, "manifests": named.collect::<Vec<_>>()});
        // `docker load` reads this file, and not the index, unless Docker keeps its images in containerd.
        let docker_manifest =
            json!([{"Config": config.path(), "RepoTags": self.references, "Layers": [layer.path()]}]);
        write(target, &[("index.json", &index), ("manifest.json", &docker_manifest)], &blobs)
    }
}

/// Returns the blobs of an image for one platform: `layer`, the configuration with `run`, and the manifest.
fn platform_blobs(
    architecture: &str,
    run: &Value,
    layer: Blob,
    diff_id: &str,
    annotations: &BTreeMap<String, String>,
) -> Result<[Blob; 3]> {
    let config = Blob::json(
        CONFIG,
        &json!({
            "architecture": architecture,
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        }),
    )?;
    let manifest = Blob::json(
        MANIFEST,
        &json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(),
            "layers": [layer.descriptor()],
            "annotations": annotations,
        }),
    )?;
    Ok([layer, config, manifest])
}

/// Writes an archive with these files besides its blobs.
fn write(target: &Path, files: &[(&str, &Value)], blobs: &[Blob]) -> Result<()> {
    let file = File::create(target).with_context(|| format!("create {}", target.display()))?;
    let mut archive = Builder::new(file);
    let layout = json!({"imageLayoutVersion": "1.0.0"});
    for (path, content) in [("oci-layout", &layout)].iter().chain(files) {
        append(&mut archive, path, 0o644, &serde_json::to_vec(content)?)?;
    }
    for blob in blobs {
        append(&mut archive, &blob.path(), 0o644, &blob.content)?;
    }
    archive.into_inner()?.flush().with_context(|| format!("write {}", target.display()))
}

/// Checks that an archive has everything that its index names, with the digests and sizes there, and nothing else. An import may
/// otherwise fail late, or find out when a container starts.
pub fn verify(archive: &Path) -> Result<()> {
    read_verified(archive).map(drop)
}

/// Returns the files of an archive that [`verify`] accepts.
fn read_verified(archive: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let read = || -> Result<_> {
        let files = entries(File::open(archive)?)?;
        let layout = parse(files.get("oci-layout").context("it has no oci-layout")?)?;
        anyhow::ensure!(layout["imageLayoutVersion"] == "1.0.0", "its layout has another version: {layout}");
        let mut used = BTreeSet::new();
        let mut pending = vec![parse(files.get("index.json").context("it has no index.json")?)?];
        while let Some(parent) = pending.pop() {
            let parts = [descriptors(&parent["manifests"]), descriptors(&parent["layers"])].concat();
            for part in parts.iter().chain(parent.get("config")) {
                let content = blob(&files, part)?;
                used.insert(path(part)?);
                if [INDEX, MANIFEST].iter().any(|kind| part["mediaType"] == *kind) {
                    pending.push(parse(content)?);
                }
            }
        }
        let unused = files.keys().find(|path| path.starts_with(BLOBS) && !used.contains(*path));
        anyhow::ensure!(
            unused.is_none(),
            "no descriptor names the blob {}",
            unused.map_or("", String::as_str)
        );
        Ok(files)
    };
    read().with_context(|| format!("the image archive {} is cut off or damaged", archive.display()))
}

fn parse(content: &[u8]) -> Result<Value> {
    serde_json::from_slice(content).context("parse JSON")
}

fn descriptors(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the path of the blob of a descriptor.
fn path(descriptor: &Value) -> Result<String> {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    let digest = digest.with_context(|| format!("a descriptor has no SHA-256 digest: {descriptor}"))?;
    Ok(format!("{BLOBS}{digest}"))
}

/// Returns the content of a blob that has the digest and the size of its descriptor.
fn blob<'a>(files: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Result<&'a [u8]> {
    let path = path(descriptor)?;
    let content = files.get(&path).with_context(|| format!("{path} is missing"))?;
    anyhow::ensure!(path == format!("{BLOBS}{}", hex(&Sha256::digest(content))), "{path} has other content");
    anyhow::ensure!(descriptor["size"] == content.len(), "{path} has another size: {descriptor}");
    Ok(content)
}

/// Returns the files of a tar archive by their paths.
fn entries(archive: impl Read) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut entries = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).with_context(|| format!("read {path}"))?;
        entries.insert(path, content);
    }
    Ok(entries)
}

/// Returns the file system of the image.
fn layer(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut layer = Builder::new(Vec::new());
    for entry in entries {
        match entry {
            Entry::Program { path, host } => {
                let content = fs::read(host).with_context(|| format!("read {}", host.display()))?;
                append(&mut layer, relative(path)?, 0o755, &content)?;
            }
            Entry::Link { path, target } => {
                let mut header = header(EntryType::Symlink, 0o777, 0);
                let appended = layer.append_link(&mut header, relative(path)?, target);
                appended.with_context(|| format!("append {path}"))?;
            }
            Entry::Directory { path, mode } => {
                let mut header = header(EntryType::Directory, *mode, 0);
                let appended = layer.append_data(&mut header, relative(path)?, std::io::empty());
                appended.with_context(|| format!("append {path}"))?;
            }
        }
    }
    Ok(layer.into_inner()?)
}

fn relative(path: &str) -> Result<&str> {
    path.strip_prefix('/').with_context(|| format!("{path} is not an absolute path"))
}

fn append(archive: &mut Builder<impl Write>, path: &str, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = header(EntryType::Regular, mode, content.len() as u64);
    archive.append_data(&mut header, path, content).with_context(|| format!("append {path}"))
}

/// Returns the header of an entry that is owned by root and has no date.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

struct Blob {
    media_type: &'static str,
    hash: String,
    content: Vec<u8>,
}

impl Blob {
    fn new(media_type: &'static str, content: Vec<u8>) -> Blob {
        Blob { media_type, hash: hex(&Sha256::digest(&content)), content }
    }

    fn json(media_type: &'static str, value: &Value) -> Result<Blob> {
        Ok(Blob::new(media_type, serde_json::to_vec(value)?))
    }

    fn digest(&self) -> String {
        format!("sha256:{}", self.hash)
    }

    /// Returns the path in the archive.
    fn path(&self) -> String {
        format!("{BLOBS}{}", self.hash)
    }

    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest(), "size": self.content.len()})
    }
}

/// Returns the architecture by Go's name, as the specification requires.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => anyhow::bail!("no name is known for images of {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A truncated archive is refused too, and the error has its path.
    #[test]
    fn damaged_archive_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (program, target) = (dir.path().join("program"), dir.path().join("image.tar"));
        fs::write(&program, "content").unwrap();
        archive(&target, "example/image:dev", &[("/program", &program)]).unwrap();
        verify(&target).unwrap();
        let whole = fs::read(&target).unwrap();
        let refused = |bytes: &[u8]| {
            fs::write(&target, bytes).unwrap();
            let error = format!("{:#}", verify(&target).unwrap_err());
            assert!(
                error.starts_with(&format!("the image archive {} is cut off", target.display())),
                "{error}"
            );
        };
        // Two empty blocks follow the last file.
        let content = whole.len() - 1024;
        for length in (0..content).step_by(512).chain([content - 513, content - 700]) {
            refused(&whole[..length]);
        }
        let mut damaged = whole.clone();
        let at = whole.windows(7).position(|bytes| bytes == b"content").unwrap();
        damaged[at] ^= 1;
        refused(&damaged);
    }

    /// Its entries are a directory, a program and a link, and its command is set.
    #[test]
    fn image_has_all_names_and_entries() {
        let dir = tempfile::tempdir().unwrap();
        let (program, target) = (dir.path().join("program"), dir.path().join("image.tar"));
        fs::write(&program, "content").unwrap();
        let image = Image {
            references: vec!["example/image:1".into(), "example/image:2".into()],
            entrypoint: vec!["/bin/program".into()],
            command: vec!["pause".into()],
            entries: vec![
                Entry::Directory { path: "/tmp".into(), mode: 0o1777 },
                Entry::Program { path: "/bin/program".into(), host: program },
                Entry::Link { path: "/bin/ls".into(), target: "program".into() },
            ],
        };
        image.write(&target).unwrap();
        verify(&target).unwrap();
        let entries = entries(fs::read(&target).unwrap().as_slice()).unwrap();
        let index: Value = serde_json::from_slice(&entries["index.json"]).unwrap();
        let names = index["manifests"].as_array().unwrap().iter().map(|m| &m["annotations"][CONTAINERD_NAME]);
        assert_eq!(names.collect::<Vec<_>>(), ["example/image:1", "example/image:2"]);
        let docker: Value = serde_json::from_slice(&entries["manifest.json"]).unwrap();
        let config: Value = serde_json::from_slice(&entries[docker[0]["Config"].as_str().unwrap()]).unwrap();
        assert_eq!(config["config"], json!({"Entrypoint": ["/bin/program"], "Cmd": ["pause"]}));
        let layer = &entries[docker[0]["Layers"][0].as_str().unwrap()];
        let mut layer = tar::Archive::new(layer.as_slice());
        let shown = layer.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string()).unwrap_or_default();
            let header = entry.header();
            format!(
                "{:?} {:o} {} {link}",
                header.entry_type(),
                header.mode().unwrap(),
                entry.path().unwrap().display()
            )
        });
        let expected = ["Directory 1777 tmp ", "Regular 755 bin/program ", "Symlink 777 bin/ls program"];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }
}
