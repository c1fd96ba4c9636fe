//! The contents of the node image: the programs of Kubernetes, and the images of its control plane.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cache::digest_file;
use testvm::go_build;
use testvm::images::debian_program::IPTABLES;
use testvm::images::kind::{Description, NodePrograms};
use testvm::process::Program;
use testvm::session::Session;

use crate::images::identity;
use crate::programs::{KIND, Programs};

/// The module of kind, which has the files of its base image.
const KIND_MODULE: &str = "sigs.k8s.io/kind";
/// The files of kind's module and of its base image that name images.
const CONTAINERD_CONFIG: &str = "images/base/files/etc/containerd/config.toml";

/// kind and its node image.
#[derive(Clone, Debug)]
pub(super) struct NodeImage {
    /// The program kind.
    pub(super) kind: PathBuf,
    /// The file system of the node image, for `docker import`.
    pub(super) tar: PathBuf,
    /// The name that Docker gives the image.
    pub(super) reference: String,
}

/// Returns kind and its node image, from the cache or built.
pub(super) async fn prepare(
    session: &Session,
    description: &Description,
    programs: &Programs,
    pause: &Path,
) -> Result<NodeImage> {
    let built = go_build::build(session, &KIND).await?;
    let sources = go_build::sources(session, &KIND, KIND_MODULE).await?;
    let version = go_build::pinned_version(session, &KIND)?.to_string();
    let kubeadm = built.join("kubeadm");
    let listed = Program::new(&kubeadm)
        .args(["config", "images", "list", "--kubernetes-version", &version])
        .run()
        .await
        .context("list the images that kubeadm needs")?
        .stdout;
    let config = sources.directory.join(CONTAINERD_CONFIG);
    let config = fs::read_to_string(&config).with_context(|| format!("read {}", config.display()))?;
    let program = |name: &str, path: &Path| vec![(format!("/usr/local/bin/{name}"), path.to_owned())];
    let mut kube_proxy = program("kube-proxy", &programs.kube_proxy);
    kube_proxy.extend(IPTABLES.files(session).await?);
    let images = [
        ("kube-apiserver", program("kube-apiserver", &programs.kube_apiserver)),
        ("kube-controller-manager", program("kube-controller-manager", &programs.kube_controller_manager)),
        ("kube-scheduler", program("kube-scheduler", &programs.kube_scheduler)),
        ("kube-proxy", kube_proxy),
        ("etcd", program("etcd", &programs.etcd)),
    ];
    let mut images = images
        .into_iter()
        .map(|(name, files)| Ok((reference(&listed, name)?.to_owned(), files)))
        .collect::<Result<Vec<_>>>()?;
    images.push((sandbox_image(&config)?.to_owned(), vec![("/pause".to_owned(), pause.to_owned())]));
    let large = [
        kubeadm.as_path(),
        &programs.etcd,
        &programs.kube_apiserver,
        &programs.kube_controller_manager,
        &programs.kube_scheduler,
        &programs.kube_proxy,
        &programs.kubelet,
        &programs.kubectl,
    ];
    let files = images.iter().flat_map(|(_, files)| files.iter().map(|(_, host)| host.as_path()));
    let identity = identities(&large, files)?;
    let programs = NodePrograms {
        kubelet: programs.kubelet.clone(),
        kubectl: programs.kubectl.clone(),
        kubeadm: kubeadm.clone(),
        identity,
        version: version.clone(),
        kind_sources: sources,
        images,
    };
    let tar = description.node(session, &programs).await?;
    Ok(NodeImage { kind: built.join("kind"), tar, reference: format!("kindest/node:{version}") })
}

/// Returns the only reference in the list of kubeadm with this name before its tag.
fn reference<'a>(listed: &'a str, name: &str) -> Result<&'a str> {
    let named = |line: &&str| {
        line.rsplit('/').next().and_then(|last| last.split_once(':')).is_some_and(|(image, _)| image == name)
    };
    listed.lines().find(named).with_context(|| format!("kubeadm lists no image {name} in {listed:?}"))
}

/// Returns the image of containers that hold the namespaces of pods.
fn sandbox_image(containerd_config: &str) -> Result<&str> {
    let values = containerd_config.lines().filter_map(|line| line.trim().strip_prefix("sandbox_image = "));
    let mut values = values.map(|value| value.trim_matches('"'));
    values.next().context("kind's configuration of containerd names no sandbox_image")
}

/// Returns a text that depends on the contents of the large programs and of all other files. Builds of a large program are
/// distinguished without reading it. The others are read: Cargo links some of them again, to the same bytes.
fn identities<'a>(large: &[&Path], files: impl Iterator<Item = &'a Path>) -> Result<String> {
    let others: BTreeSet<&Path> = files.filter(|file| !large.contains(file)).collect();
    let mut texts = large.iter().map(|path| identity(path)).collect::<Result<Vec<_>>>()?;
    for file in others {
        texts.push(digest_file(file)?);
    }
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_found_by_whole_name() {
        let listed = "registry.example/kube-proxy:v1\nregistry.example/coredns/coredns:v2\nregistry.example/etcd:3-0\n";
        assert_eq!(reference(listed, "etcd").unwrap(), "registry.example/etcd:3-0");
        assert_eq!(reference(listed, "coredns").unwrap(), "registry.example/coredns/coredns:v2");
        let error = reference(listed, "proxy").unwrap_err().to_string();
        assert!(error.contains("no image proxy"), "{error}");
    }

    #[test]
    fn identity_depends_on_all_file_contents() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let large = file("kubelet", "large");
        let library = file("library", "1.0");
        let text = || identities(&[&large], [large.as_path(), &library, &library].into_iter()).unwrap();
        let first = text();
        // The same bytes written again, as by Cargo.
        file("library", "1.0");
        assert_eq!(text(), first);
        file("library", "1.1");
        assert_ne!(text(), first);
        let second = text();
        file("kubelet", "larger");
        assert_ne!(text(), second);
    }

    #[test]
    fn sandbox_image_comes_from_configuration() {
        let config =
            "[plugins.\"cri\"]\n  # use fixed sandbox image\n  sandbox_image = \"example/pause:3\"\n";
        assert_eq!(sandbox_image(config).unwrap(), "example/pause:3");
        assert!(sandbox_image("version = 2\n").is_err());
    }
}
