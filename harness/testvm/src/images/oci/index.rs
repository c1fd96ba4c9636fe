//! An image for several platforms, as one OCI archive for a registry.
//!
//! The archive names one image index, and the index names one manifest per platform. A registry stores both under the digests
//! that they have here, so the digest of the index is known before the image is pushed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::Builder;

use super::{Blob, CONFIG, CONTAINERD_NAME, Entry, MANIFEST, append, blob, descriptors, entries, layer};
use crate::cache::hex;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const COMPRESSED_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// The annotation with the name of an image in its archive.
const NAME: &str = "org.opencontainers.image.ref.name";
const BLOBS: &str = "blobs/sha256/";

/// An image for several platforms. Its files are owned by root and have no date.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// The tag of the image in the archive, such as a version.
    pub tag: String,
    /// The complete reference under which containerd imports the image.
    pub reference: String,
    /// The program that the image runs, and its first arguments.
    pub entrypoint: Vec<String>,
    /// The labels of the image, which the index and the manifests have as annotations.
    pub labels: BTreeMap<String, String>,
    pub platforms: Vec<Platform>,
}

/// The files of an image on one architecture of Linux.
#[derive(Clone, Debug)]
pub struct Platform {
    /// The architecture by Go's name, such as `amd64`.
    pub architecture: String,
    /// The content, in any order.
    pub entries: Vec<Entry>,
}

/// The digests of an archive, by which a registry serves it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Digests {
    /// The digest of the index, with its algorithm.
    pub index: String,
    pub platforms: Vec<PlatformDigest>,
}

/// The manifest of one platform.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlatformDigest {
    pub architecture: String,
    /// The digest of the manifest, with its algorithm.
    pub digest: String,
    /// The number of bytes that a node downloads: the manifest, the configuration and the layers.
    pub size: u64,
}

/// What an archive contains.
#[derive(Clone, Debug)]
pub struct Contents {
    pub digests: Digests,
    pub platforms: Vec<PlatformContents>,
}

/// What an archive contains for one platform.
#[derive(Clone, Debug)]
pub struct PlatformContents {
    pub architecture: String,
    pub labels: BTreeMap<String, String>,
    pub entrypoint: Vec<String>,
    /// The content of each file, by its path without the first slash.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Index {
    /// Writes an archive of the image, and returns its digests. The same files and labels produce the same bytes.
    ///
    /// # Errors
    /// The image has no platform, two of the same architecture, or no program to run; a program cannot be read, or the
    /// archive cannot be written.
    pub fn write(&self, target: &Path) -> Result<Digests> {
        self.write_archive(target).with_context(|| format!("write the image archive {}", target.display()))
    }

    fn write_archive(&self, target: &Path) -> Result<Digests> {
        anyhow::ensure!(!self.platforms.is_empty(), "the image has no platform");
        anyhow::ensure!(!self.entrypoint.is_empty(), "the image has no program to run");
        let architectures: BTreeSet<&str> =
            self.platforms.iter().map(|platform| platform.architecture.as_str()).collect();
        anyhow::ensure!(
            architectures.len() == self.platforms.len(),
            "the image has two platforms of the same architecture"
        );
        let mut blobs = Vec::new();
        let mut manifests = Vec::new();
        let mut platforms = Vec::new();
        for platform in &self.platforms {
            let parts = self.platform(platform)?;
            let manifest = parts.last().context("a platform has a manifest")?;
            let mut descriptor = manifest.descriptor();
            descriptor["platform"] = json!({"architecture": platform.architecture, "os": "linux"});
            manifests.push(descriptor);
            platforms.push(PlatformDigest {
                architecture: platform.architecture.clone(),
                digest: manifest.digest(),
                size: parts.iter().map(|part| part.content.len() as u64).sum(),
            });
            blobs.extend(parts);
        }
        let index = Blob::json(
            INDEX,
            &json!({
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": manifests,
                "annotations": self.labels,
            }),
        )?;
        let mut named = index.descriptor();
        named["annotations"] = json!({NAME: self.tag, CONTAINERD_NAME: self.reference});
        let entry_point = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]});
        let digests = Digests { index: index.digest(), platforms };
        blobs.push(index);
        // Platforms may share a blob, and an archive must have each file once.
        blobs.sort_by(|one, other| one.hash.cmp(&other.hash));
        blobs.dedup_by(|one, other| one.hash == other.hash);

        let mut archive = Builder::new(File::create(target)?);
        let layout = json!({"imageLayoutVersion": "1.0.0"});
        append(&mut archive, "oci-layout", 0o644, &serde_json::to_vec(&layout)?)?;
        append(&mut archive, "index.json", 0o644, &serde_json::to_vec(&entry_point)?)?;
        for blob in &blobs {
            append(&mut archive, &blob.path(), 0o644, &blob.content)?;
        }
        archive.into_inner()?.flush()?;
        Ok(digests)
    }

    /// Returns the blobs of a platform: the layer, the configuration, and at the end the manifest.
    fn platform(&self, platform: &Platform) -> Result<[Blob; 3]> {
        let mut sorted = platform.entries.clone();
        sorted.sort_by(|one, other| one.path().cmp(other.path()));
        let content = layer(&sorted)?;
        let diff_id = format!("sha256:{}", hex(&Sha256::digest(&content)));
        // The header that the encoder writes by default has neither a date nor a name.
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&content)?;
        let layer = Blob::new(COMPRESSED_LAYER, encoder.finish()?);
        let config = Blob::json(
            CONFIG,
            &json!({
                "architecture": platform.architecture,
                "os": "linux",
                "config": {"Entrypoint": self.entrypoint, "Labels": self.labels},
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
                "annotations": self.labels,
            }),
        )?;
        Ok([layer, config, manifest])
    }
}

/// Reads an archive that [`Index::write`] wrote, and checks every digest and size in it.
///
/// # Errors
/// The archive cannot be read, is cut off or damaged, has a blob that no descriptor names, or does not name exactly one index.
pub fn read(archive: &Path) -> Result<Contents> {
    let file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
    let contents = entries(file).and_then(|files| read_files(&files));
    contents.with_context(|| format!("read the image archive {}", archive.display()))
}

fn read_files(files: &BTreeMap<String, Vec<u8>>) -> Result<Contents> {
    let layout = parse(files.get("oci-layout").context("it has no oci-layout")?)?;
    anyhow::ensure!(layout["imageLayoutVersion"] == "1.0.0", "its layout has another version: {layout}");
    let entry_point = parse(files.get("index.json").context("it has no index.json")?)?;
    let [named] = descriptors(&entry_point["manifests"]) else {
        anyhow::bail!("index.json does not name exactly one index: {entry_point}");
    };
    let mut used = BTreeSet::new();
    let index = parse(part(files, &mut used, named)?)?;
    let mut digests = Vec::new();
    let mut platforms = Vec::new();
    for descriptor in descriptors(&index["manifests"]) {
        let content = part(files, &mut used, descriptor)?;
        let manifest = parse(content)?;
        let config_content = part(files, &mut used, &manifest["config"])?;
        let config = parse(config_content)?;
        let mut size = content.len() + config_content.len();
        let mut platform_files = BTreeMap::new();
        let diff_ids = descriptors(&config["rootfs"]["diff_ids"]);
        let layers = descriptors(&manifest["layers"]);
        anyhow::ensure!(layers.len() == diff_ids.len(), "the configuration has other layers: {config}");
        for (descriptor, diff_id) in layers.iter().zip(diff_ids) {
            let compressed = part(files, &mut used, descriptor)?;
            size += compressed.len();
            let mut layer = Vec::new();
            GzDecoder::new(compressed).read_to_end(&mut layer).context("decompress a layer")?;
            let digest = format!("sha256:{}", hex(&Sha256::digest(&layer)));
            anyhow::ensure!(*diff_id == digest, "the layer {digest} has another diff_id: {diff_id}");
            platform_files.extend(entries(layer.as_slice())?);
        }
        let architecture = text(&config["architecture"]);
        anyhow::ensure!(
            descriptor["platform"]["architecture"] == architecture.as_str()
                && descriptor["platform"]["os"] == "linux"
                && config["os"] == "linux",
            "the index and the configuration name different platforms: {descriptor}, {config}"
        );
        digests.push(PlatformDigest {
            architecture: architecture.clone(),
            digest: text(&descriptor["digest"]),
            size: size as u64,
        });
        platforms.push(PlatformContents {
            architecture,
            labels: strings(&config["config"]["Labels"])?,
            entrypoint: strings(&config["config"]["Entrypoint"])?,
            files: platform_files,
        });
    }
    let unused = files.keys().filter(|path| path.starts_with(BLOBS)).find(|path| !used.contains(*path));
    anyhow::ensure!(unused.is_none(), "no descriptor names the blob {}", unused.map_or("", String::as_str));
    let digests = Digests { index: text(&named["digest"]), platforms: digests };
    Ok(Contents { digests, platforms })
}

/// Returns the blob of a descriptor, with the digest and the size there, and adds its path to `used`.
fn part<'a>(
    files: &'a BTreeMap<String, Vec<u8>>,
    used: &mut BTreeSet<String>,
    descriptor: &Value,
) -> Result<&'a [u8]> {
    let content = blob(files, descriptor)?;
    anyhow::ensure!(descriptor["size"] == content.len(), "a blob has another size: {descriptor}");
    used.insert(text(&descriptor["digest"]).replacen("sha256:", BLOBS, 1));
    Ok(content)
}

fn parse(content: &[u8]) -> Result<Value> {
    serde_json::from_slice(content).context("parse JSON")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn strings<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    serde_json::from_value(value.clone()).with_context(|| format!("read {value}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn index(directory: &Path) -> Index {
        let platform = |architecture: &str| {
            let program = directory.join(architecture);
            fs::write(&program, architecture).unwrap();
            let entry = |path: &str| Entry::Program { path: path.into(), host: program.clone() };
            Platform { architecture: architecture.into(), entries: vec![entry("/tool"), entry("/driver")] }
        };
        Index {
            tag: "1.2.3".into(),
            reference: "example/driver:1.2.3".into(),
            entrypoint: vec!["/driver".into()],
            labels: BTreeMap::from([("org.opencontainers.image.version".into(), "1.2.3".into())]),
            platforms: vec![platform("amd64"), platform("arm64")],
        }
    }

    fn archive() -> (tempfile::TempDir, PathBuf, Digests) {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("image.tar");
        let digests = index(directory.path()).write(&target).unwrap();
        (directory, target, digests)
    }

    #[test]
    fn written_archive_is_read_back() {
        let (_directory, target, digests) = archive();
        let contents = read(&target).unwrap();
        assert_eq!(contents.digests, digests);
        assert!(digests.platforms.iter().all(|platform| platform.size > 100), "{digests:?}");
        let architectures: Vec<&str> =
            contents.platforms.iter().map(|platform| platform.architecture.as_str()).collect();
        assert_eq!(architectures, ["amd64", "arm64"]);
        for platform in &contents.platforms {
            assert_eq!(platform.files.keys().collect::<Vec<_>>(), ["driver", "tool"]);
            assert_eq!(platform.files["driver"], platform.architecture.as_bytes());
            assert_eq!(platform.labels["org.opencontainers.image.version"], "1.2.3");
            assert_eq!(platform.entrypoint, ["/driver"]);
        }
    }

    #[test]
    fn entry_order_does_not_change_archive() {
        let (directory, target, digests) = archive();
        let mut reversed = index(directory.path());
        reversed.platforms.iter_mut().for_each(|platform| platform.entries.reverse());
        let other = directory.path().join("other.tar");
        assert_eq!(reversed.write(&other).unwrap(), digests);
        assert!(fs::read(&target).unwrap() == fs::read(&other).unwrap());
    }

    #[test]
    fn a_damaged_archive_is_refused() {
        let (_directory, target, digests) = archive();
        let whole = fs::read(&target).unwrap();
        let name = digests.platforms[0].digest.replacen("sha256:", BLOBS, 1);
        // The content of a file begins a block after its header.
        let header = whole.windows(name.len()).position(|bytes| bytes == name.as_bytes()).unwrap();
        let mut damaged = whole.clone();
        damaged[header + 512 + 20] ^= 1;
        fs::write(&target, damaged).unwrap();
        let error = format!("{:#}", read(&target).unwrap_err());
        assert!(error.contains("other content"), "{error}");
    }

    #[test]
    fn duplicate_architectures_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut twice = index(directory.path());
        twice.platforms[1].architecture = "amd64".into();
        let error = format!("{:#}", twice.write(&directory.path().join("image.tar")).unwrap_err());
        assert!(error.contains("two platforms"), "{error}");
    }
}
