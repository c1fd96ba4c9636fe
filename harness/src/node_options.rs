//! The options of commands that start a cluster: its release of Kubernetes, and the kernel, kubelet and losetup of its nodes.

use std::ffi::OsString;

use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use testvm::images::kernel::Kernel;
use testvm::images::node::RootImage;
use testvm_cluster::{ContainerRuntime, KIND_MINOR, Kubelet, KubeletRoot, KubernetesMinor, NodeVariant};

use crate::project;

/// The release of Kubernetes of a cluster of the harness's own.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
pub(crate) struct KubernetesOptions {
    /// Run this minor release instead of the newest. vm-images/kubernetes pins the patch release of each, and vm-images/kind
    /// the only release of a cluster of kind.
    #[arg(long, value_name = "MINOR", value_parser = minor_parser())]
    kubernetes: Option<KubernetesMinor>,
}

impl KubernetesOptions {
    /// Returns the options that select a minor release.
    pub(crate) fn of_minor(minor: KubernetesMinor) -> KubernetesOptions {
        KubernetesOptions { kubernetes: Some(minor) }
    }

    /// Returns the selected release, or the newest.
    pub(crate) fn minor(&self) -> KubernetesMinor {
        self.kubernetes.unwrap_or_default()
    }

    /// Returns the selected release, or that of clusters of kind.
    pub(crate) fn minor_for_kind(&self) -> KubernetesMinor {
        self.kubernetes.unwrap_or(KIND_MINOR)
    }

    /// Returns the words of the command line that select the same release.
    pub(crate) fn words(&self) -> Vec<OsString> {
        self.kubernetes.iter().flat_map(|minor| ["--kubernetes".into(), minor.name().into()]).collect()
    }
}

fn minor_parser() -> impl TypedValueParser<Value = KubernetesMinor> {
    PossibleValuesParser::new(KubernetesMinor::ALL.map(KubernetesMinor::name))
        .try_map(|name| KubernetesMinor::named(&name).context("no such release"))
}

/// The nodes of a cluster of the harness's own.
#[derive(Clone, Debug, Default, Eq, PartialEq, clap::Args)]
#[command(next_help_heading = "Nodes")]
pub(crate) struct NodeOptions {
    /// Run this kubelet. `patched` is built from the same module with the changes of vm-images/kubernetes/overlay:
    /// no second loop device for a block volume, and no programs to mount and unmount volumes.
    #[arg(long, value_parser = one_of(KUBELETS), default_value = "stock", value_name = "BUILD")]
    kubelet: Kubelet,

    /// Give the nodes this losetup. `drop-in` is the tool of loopfs, by a link in the first directory of the PATH.
    #[arg(long, value_parser = one_of(LOSETUPS), value_name = "PROGRAM")]
    losetup: Option<Losetup>,

    /// Boot this root file system. `no-tools` lacks mount, umount, losetup and all other programs that a stock kubelet
    /// runs for volumes; it needs `--kubelet patched`.
    #[arg(long, value_parser = one_of(IMAGES), default_value = "default", value_name = "IMAGE")]
    node_image: RootImage,

    /// Put the kubelet's directory on this disk. `data-disk` is the disk of the volumes; the kubelet then measures
    /// emptyDirs of pods with a user namespace by project quotas.
    #[arg(long, value_parser = one_of(DISKS), default_value = "root-disk", value_name = "DISK")]
    kubelet_root: KubeletRoot,

    /// Boot this kernel of vm-images/kernels/kernels.toml. In the kernel lane of `test`, it runs instead of all kernels,
    /// and in the lanes sanity and e2e and the part node instead of the default.
    #[arg(long, value_name = "NAME", value_parser = kernel_name)]
    kernel: Option<String>,
}

/// Parses the name of a kernel, as the value of an option.
pub(crate) fn kernel_name(name: &str) -> Result<String> {
    let names = Kernel::names(&project::workspace()?)?;
    let is_known = names.iter().any(|known| known == name);
    anyhow::ensure!(is_known, "vm-images/kernels/kernels.toml has {}", names.join(", "));
    Ok(name.to_owned())
}

/// The losetup that a node finds first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Losetup {
    UtilLinux,
    DropIn,
}

/// The values of an option, each with its name on the command line.
type Values<T> = [(&'static str, T); 2];

const KUBELETS: Values<Kubelet> = [("stock", Kubelet::Stock), ("patched", Kubelet::Patched)];
const LOSETUPS: Values<Losetup> = [("util-linux", Losetup::UtilLinux), ("drop-in", Losetup::DropIn)];
const IMAGES: Values<RootImage> = [("default", RootImage::Default), ("no-tools", RootImage::NoTools)];
const DISKS: Values<KubeletRoot> =
    [("root-disk", KubeletRoot::RootDisk), ("data-disk", KubeletRoot::DataDisk)];

fn one_of<T: Copy + Send + Sync + 'static>(values: Values<T>) -> impl TypedValueParser<Value = T> {
    let parser = PossibleValuesParser::new(values.map(|(name, _)| name));
    parser.try_map(move |given| {
        let value = values.into_iter().find(|(name, _)| *name == given);
        value.map(|(_, value)| value).context("no such value")
    })
}

fn name<T: PartialEq>(values: Values<T>, value: T) -> Option<String> {
    values.into_iter().find(|(_, other)| *other == value).map(|(name, _)| name.to_owned())
}

impl NodeOptions {
    /// Returns the default nodes with the tool of loopfs as their first losetup.
    pub(crate) fn with_drop_in_losetup() -> NodeOptions {
        NodeOptions { losetup: Some(Losetup::DropIn), ..NodeOptions::default() }
    }

    /// Returns the default nodes with the patched kubelet.
    pub(crate) fn with_patched_kubelet() -> NodeOptions {
        NodeOptions { kubelet: Kubelet::Patched, ..NodeOptions::default() }
    }

    /// Puts the kubelet's directory on the data disk.
    #[must_use]
    pub(crate) fn with_kubelet_on_data_disk(self) -> NodeOptions {
        NodeOptions { kubelet_root: KubeletRoot::DataDisk, ..self }
    }

    /// Boots the kernel of this name, if there is one.
    #[must_use]
    pub(crate) fn with_kernel(self, kernel: Option<String>) -> NodeOptions {
        NodeOptions { kernel: kernel.or(self.kernel.clone()), ..self }
    }

    /// Boots the default kernel.
    #[must_use]
    pub(crate) fn with_default_kernel(self) -> NodeOptions {
        NodeOptions { kernel: None, ..self }
    }

    /// Refuses options that cannot work together.
    ///
    /// # Errors
    /// The message names both options and the remedy.
    pub(crate) fn check(&self) -> Result<()> {
        if self.node_image == RootImage::NoTools {
            anyhow::ensure!(
                self.kubelet == Kubelet::Patched,
                "--node-image no-tools with --kubelet stock: a stock kubelet runs mount, umount and losetup, which \
                 this image lacks; add --kubelet patched"
            );
            anyhow::ensure!(
                self.losetup.is_none(),
                "--node-image no-tools with --losetup: this image has no losetup; leave --losetup out"
            );
        }
        Ok(())
    }

    /// Returns the variant of the nodes, without the programs of loopfs.
    pub(crate) fn variant(&self) -> NodeVariant {
        NodeVariant {
            kubelet: self.kubelet,
            root: self.node_image,
            kubelet_root: self.kubelet_root,
            kernel: self.kernel.clone(),
            runtime: ContainerRuntime::default(),
        }
    }

    /// Returns the name of the selected kernel.
    pub(crate) fn kernel(&self) -> Option<&str> {
        self.kernel.as_deref()
    }

    /// Returns the losetup of the nodes. That of util-linux is in the default root file system.
    pub(crate) fn losetup(&self) -> Losetup {
        self.losetup.unwrap_or(Losetup::UtilLinux)
    }

    /// Returns `true` if the node has the programs that a stock kubelet starts for volumes.
    pub(crate) fn has_tools(&self) -> bool {
        self.node_image == RootImage::Default
    }

    /// Returns the kinds of nodes of the part node of the lane extended, each with a name that can be the name of a directory.
    pub(crate) fn combinations() -> [(&'static str, NodeOptions); 6] {
        let nodes = |kubelet, losetup| {
            let losetup = Some(losetup);
            NodeOptions { kubelet, losetup, ..NodeOptions::default() }
        };
        let without_tools =
            NodeOptions { node_image: RootImage::NoTools, ..NodeOptions::with_patched_kubelet() };
        [
            ("stock-util-linux", nodes(Kubelet::Stock, Losetup::UtilLinux)),
            ("stock-drop-in", nodes(Kubelet::Stock, Losetup::DropIn)),
            ("patched-util-linux", nodes(Kubelet::Patched, Losetup::UtilLinux)),
            ("patched-drop-in", nodes(Kubelet::Patched, Losetup::DropIn)),
            ("patched-no-tools", without_tools),
            ("kubelet-root-data-disk", NodeOptions::default().with_kubelet_on_data_disk()),
        ]
    }

    /// Returns the words of the command line that select the same nodes.
    pub(crate) fn words(&self) -> impl Iterator<Item = String> + use<> {
        let default = NodeOptions::default();
        let options = [
            ("--kubelet", name(KUBELETS, self.kubelet).filter(|_| self.kubelet != default.kubelet)),
            ("--losetup", self.losetup.and_then(|losetup| name(LOSETUPS, losetup))),
            ("--node-image", name(IMAGES, self.node_image).filter(|_| self.node_image != default.node_image)),
            (
                "--kubelet-root",
                name(DISKS, self.kubelet_root).filter(|_| self.kubelet_root != default.kubelet_root),
            ),
            ("--kernel", self.kernel.clone()),
        ];
        options.into_iter().filter_map(|(option, value)| Some([option.to_owned(), value?])).flatten()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        nodes: NodeOptions,
    }

    fn parse(words: &str) -> NodeOptions {
        Line::parse_from(std::iter::once("x").chain(words.split_whitespace())).nodes
    }

    /// Their words form the same command line again.
    #[rstest]
    #[case::default("")]
    #[case::patched("--kubelet patched")]
    #[case::both("--kubelet patched --losetup drop-in")]
    #[case::without_tools("--kubelet patched --node-image no-tools")]
    #[case::on_the_data_disk("--kubelet-root data-disk")]
    #[case::kernel("--kernel bookworm")]
    fn compatible_options_are_accepted(#[case] words: &str) {
        let options = parse(words);
        options.check().unwrap();
        assert_eq!(options.words().collect::<Vec<_>>().join(" "), words);
    }

    #[test]
    fn every_combination_can_work() {
        for (name, options) in NodeOptions::combinations() {
            options.check().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[rstest]
    #[case("--node-image no-tools", "add --kubelet patched")]
    #[case("--node-image no-tools --kubelet patched --losetup drop-in", "leave --losetup out")]
    #[case("--node-image no-tools --kubelet patched --losetup util-linux", "leave --losetup out")]
    fn incompatible_options_are_refused_with_remedy(#[case] words: &str, #[case] remedy: &str) {
        let error = parse(words).check().unwrap_err().to_string();
        assert!(error.contains(remedy) && !error.contains('\n'), "{error}");
    }
}
