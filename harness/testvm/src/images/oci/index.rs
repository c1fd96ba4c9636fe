//! An image for several platforms, as one OCI archive for a registry.
//!
//! The archive names one image index, and the index names one manifest per platform. A registry stores both under the digests
//! that they have here, so the digest of the index is known before the image is pushed.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    Blob, CONTAINERD_NAME, Entry, INDEX, blob, descriptors, entries, layer, parse, platform_blobs,
    read_verified, write,
};
use crate::cache::hex;

const COMPRESSED_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// The annotation with the name of an image in its archive.
const NAME: &str = "org.opencontainers.image.ref.name";

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

/// What an archive contains.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Contents {
    /// The digest of the index, with its algorithm, by which a registry serves the image.
    pub digest: String,
    pub platforms: Vec<PlatformContents>,
}

/// What an archive contains for one platform.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PlatformContents {
    pub architecture: String,
    /// The digest of the manifest, with its algorithm.
    pub digest: String,
    /// The number of bytes that a node downloads: the manifest, the configuration and the layers.
    pub size: u64,
    pub labels: BTreeMap<String, String>,
    pub entrypoint: Vec<String>,
    /// The content of each file, by its path without the first slash.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Index {
    /// Writes an archive of the image, and reads it back. The same files and labels produce the same bytes.
    pub fn write(&self, target: &Path) -> Result<Contents> {
        self.write_archive(target)
            .with_context(|| format!("write the image archive {}", target.display()))?;
        read(target)
    }

    fn write_archive(&self, target: &Path) -> Result<()> {
        let mut blobs = Vec::new();
        let mut manifests = Vec::new();
        for platform in &self.platforms {
            let parts = self.platform(platform)?;
            let mut descriptor = parts[2].descriptor();
            descriptor["platform"] = json!({"architecture": platform.architecture, "os": "linux"});
            manifests.push(descriptor);
            blobs.extend(parts);
        }
        let index = json!({
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": manifests,
            "annotations": self.labels,
        });
        let index = Blob::json(INDEX, &index)?;
        let mut named = index.descriptor();
        named["annotations"] = json!({NAME: self.tag, CONTAINERD_NAME: self.reference});
        let entry_point = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]});
        blobs.push(index);
        // Platforms may share a blob, and an archive must have each file once.
        blobs.sort_by(|one, other| one.hash.cmp(&other.hash));
        blobs.dedup_by(|one, other| one.hash == other.hash);
        write(target, &[("index.json", &entry_point)], &blobs)
    }

    fn platform(&self, platform: &Platform) -> Result<[Blob; 3]> {
        let mut sorted = platform.entries.clone();
        sorted.sort_by(|one, other| one.path().cmp(other.path()));
        let content = layer(&sorted)?;
        let diff_id = digest(&content);
        // The header that the encoder writes by default has neither a date nor a name.
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&content)?;
        let layer = Blob::new(COMPRESSED_LAYER, encoder.finish()?);
        let run = json!({"Entrypoint": self.entrypoint, "Labels": self.labels});
        platform_blobs(&platform.architecture, &run, layer, &diff_id, &self.labels)
    }
}

/// Reads an archive that [`Index::write`] wrote, and checks every digest and size in it.
///
/// # Errors
/// The archive cannot be read, is cut off or damaged, has a blob that no descriptor names, or does not name exactly one index.
pub fn read(archive: &Path) -> Result<Contents> {
    let files = read_verified(archive)?;
    contents(&files).with_context(|| format!("read the image archive {}", archive.display()))
}

fn contents(files: &BTreeMap<String, Vec<u8>>) -> Result<Contents> {
    let entry_point = parse(&files["index.json"])?;
    let [named] = descriptors(&entry_point["manifests"]) else {
        anyhow::bail!("index.json does not name exactly one index: {entry_point}");
    };
    let index = parse(blob(files, named)?)?;
    let platforms = descriptors(&index["manifests"]).iter().map(|descriptor| platform(files, descriptor));
    Ok(Contents { digest: text(&named["digest"]), platforms: platforms.collect::<Result<_>>()? })
}

fn platform(files: &BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Result<PlatformContents> {
    let content = blob(files, descriptor)?;
    let manifest = parse(content)?;
    let config_content = blob(files, &manifest["config"])?;
    let config = parse(config_content)?;
    let mut size = content.len() + config_content.len();
    let mut platform_files = BTreeMap::new();
    let diff_ids = descriptors(&config["rootfs"]["diff_ids"]);
    let layers = descriptors(&manifest["layers"]);
    anyhow::ensure!(layers.len() == diff_ids.len(), "the configuration has other layers: {config}");
    for (descriptor, diff_id) in layers.iter().zip(diff_ids) {
        let compressed = blob(files, descriptor)?;
        size += compressed.len();
        let mut layer = Vec::new();
        GzDecoder::new(compressed).read_to_end(&mut layer).context("decompress a layer")?;
        let digest = digest(&layer);
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
    Ok(PlatformContents {
        architecture,
        digest: text(&descriptor["digest"]),
        size: size as u64,
        labels: strings(&config["config"]["Labels"])?,
        entrypoint: strings(&config["config"]["Entrypoint"])?,
        files: platform_files,
    })
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(content)))
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

    /// The order of the entries does not change the archive.
    #[test]
    fn written_archive_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let (target, other) = (directory.path().join("image.tar"), directory.path().join("other.tar"));
        let contents = index(directory.path()).write(&target).unwrap();
        assert_eq!(
            contents.platforms.iter().map(|p| &p.architecture).collect::<Vec<_>>(),
            ["amd64", "arm64"]
        );
        for platform in &contents.platforms {
            assert!(platform.size > 100, "{platform:?}");
            assert_eq!(platform.files.keys().collect::<Vec<_>>(), ["driver", "tool"]);
            assert_eq!(platform.files["driver"], platform.architecture.as_bytes());
            assert_eq!(platform.labels["org.opencontainers.image.version"], "1.2.3");
            assert_eq!(platform.entrypoint, ["/driver"]);
        }
        let mut reversed = index(directory.path());
        reversed.platforms.iter_mut().for_each(|platform| platform.entries.reverse());
        assert_eq!(reversed.write(&other).unwrap(), contents);
        assert!(fs::read(&target).unwrap() == fs::read(&other).unwrap());
    }
}
