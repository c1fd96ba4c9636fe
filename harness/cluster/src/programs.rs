//! The programs of a cluster, built from the pinned modules.

use std::path::PathBuf;

use anyhow::Result;
use testvm::go_build::{self, GoModule, Overlay, Version, VersionVariable};
use testvm::session::Session;

use super::release::KubernetesMinor;
use super::variant::{Kubelet, PATCHED_SUFFIX};

/// kind, and kubeadm of [`KIND_MINOR`].
pub(crate) const KIND: GoModule = GoModule { name: "kind", ..kubernetes(KIND_MINOR) };
/// The minor release of the clusters of kind: its node image is made for one release.
pub const KIND_MINOR: KubernetesMinor = KubernetesMinor::V1_36;

/// Returns the end-to-end tests of a release, and the programs that run them, if a `go.mod` pins them.
pub(crate) const fn conformance(minor: KubernetesMinor) -> Option<GoModule> {
    let name = match minor {
        KubernetesMinor::V1_37 => "conformance/1.37",
        KubernetesMinor::V1_36 => "conformance/1.36",
        KubernetesMinor::V1_35 => return None,
    };
    Some(GoModule { name, ..kubernetes(minor) })
}

/// Returns the programs of a release.
pub(crate) const fn kubernetes(minor: KubernetesMinor) -> GoModule {
    GoModule {
        version_variables: const { &kubernetes_variables(|v| v.to_string(), |_| "clean".into()) },
        ..GoModule::new(minor.directory(), "k8s.io/kubernetes")
    }
}

/// Returns the kubelet of a release with the changes of `kubernetes/overlay`. Its version says so.
const fn patched_kubelet(minor: KubernetesMinor) -> GoModule {
    GoModule {
        version_variables: const { &kubernetes_variables(|v| format!("{v}{PATCHED_SUFFIX}"), |_| "dirty".into()) },
        overlay: Some(Overlay {
            artifact: "kubelet-patched",
            rewriter: "../overlay",
            modules: &["k8s.io/kubernetes", "k8s.io/mount-utils"],
            packages: &["k8s.io/kubernetes/cmd/kubelet"],
        }),
        ..kubernetes(minor)
    }
}

/// Returns the variables in which the programs of Kubernetes have their version.
const fn kubernetes_variables(
    version: fn(&Version) -> String,
    tree_state: fn(&Version) -> String,
) -> [VersionVariable; 5] {
    [
        VersionVariable { variable: "k8s.io/component-base/version.gitVersion", value: version },
        VersionVariable {
            variable: "k8s.io/component-base/version.gitMajor",
            value: |v| v.major.to_string(),
        },
        VersionVariable {
            variable: "k8s.io/component-base/version.gitMinor",
            value: |v| v.minor.to_string(),
        },
        VersionVariable { variable: "k8s.io/component-base/version.gitTreeState", value: tree_state },
        VersionVariable { variable: "k8s.io/client-go/pkg/version.gitVersion", value: version },
    ]
}

const ETCD: GoModule = GoModule {
    // The main package has the name of its directory.
    renamed: &[("server", "etcd")],
    ..GoModule::new("etcd", "go.etcd.io/etcd/server/v3")
};

/// The path of each program.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) etcd: PathBuf,
    pub(crate) kube_apiserver: PathBuf,
    pub(crate) kube_controller_manager: PathBuf,
    pub(crate) kube_scheduler: PathBuf,
    pub(crate) kube_proxy: PathBuf,
    pub(crate) kubelet: PathBuf,
    pub(crate) kubectl: PathBuf,
}

impl Programs {
    /// Builds the programs, or takes them from the cache.
    pub(crate) async fn ensure(
        session: &Session,
        kubelet: Kubelet,
        minor: KubernetesMinor,
    ) -> Result<Programs> {
        let etcd = go_build::build(session, &ETCD).await?.join("etcd");
        let kubernetes = go_build::build(session, &kubernetes(minor)).await?;
        let kubelet = match kubelet {
            Kubelet::Stock => kubernetes.join("kubelet"),
            Kubelet::Patched => go_build::build(session, &patched_kubelet(minor)).await?.join("kubelet"),
        };
        Ok(Programs {
            etcd,
            kube_apiserver: kubernetes.join("kube-apiserver"),
            kube_controller_manager: kubernetes.join("kube-controller-manager"),
            kube_scheduler: kubernetes.join("kube-scheduler"),
            kube_proxy: kubernetes.join("kube-proxy"),
            kubelet,
            kubectl: kubernetes.join("kubectl"),
        })
    }
}
