//! The programs of a cluster, built from the pinned modules or provided by the user.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::go_build::{self, GoModule, Overlay, Version, VersionVariable};
use testvm::process::Program;
use testvm::session::Session;

use super::release::{KubernetesMinor, KubernetesSource};
use super::variant::{Kubelet, PATCHED_SUFFIX};

/// kind, and kubeadm of [`KIND_MINOR`].
pub(crate) const KIND: GoModule = GoModule { name: "kind", without_go: None, ..kubernetes(KIND_MINOR) };
/// The minor release of the clusters of kind: its node image is made for one release.
pub const KIND_MINOR: KubernetesMinor = KubernetesMinor::V1_36;

/// Returns the end-to-end tests of a release, and the programs that run them, if a `go.mod` pins them.
pub(crate) const fn conformance(minor: KubernetesMinor) -> Option<GoModule> {
    let name = match minor {
        KubernetesMinor::V1_37 => "conformance/1.37",
        KubernetesMinor::V1_36 => "conformance/1.36",
        KubernetesMinor::V1_35 => return None,
    };
    Some(GoModule { name, without_go: None, ..kubernetes(minor) })
}

/// Returns the programs of a release.
pub(crate) const fn kubernetes(minor: KubernetesMinor) -> GoModule {
    GoModule {
        version_variables: const { &kubernetes_variables(|v| v.to_string(), |_| "clean".into()) },
        without_go: WITHOUT_GO,
        ..GoModule::new(minor.directory(), "k8s.io/kubernetes")
    }
}

/// Returns the kubelet of a release with the changes of `kubernetes/overlay`. Its version says so.
const fn patched_kubelet(minor: KubernetesMinor) -> GoModule {
    GoModule {
        version_variables: const { &kubernetes_variables(|v| format!("{v}{PATCHED_SUFFIX}"), |_| "dirty".into()) },
        without_go: None,
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
    without_go: WITHOUT_GO,
    ..GoModule::new("etcd", "go.etcd.io/etcd/server/v3")
};

const WITHOUT_GO: Option<&str> = Some("--kubernetes-bin DIR uses programs you have instead");

/// The variable for the directory of the binaries, by the convention of controller-runtime's setup-envtest.
const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";

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
    /// Takes each program from the directory of `source` or from `KUBEBUILDER_ASSETS` if it is there, and builds the
    /// others. A patched kubelet is always built.
    pub(crate) async fn ensure(
        session: &Session,
        kubelet: Kubelet,
        source: &KubernetesSource,
    ) -> Result<Programs> {
        let given = match &source.directory {
            Some(directory) => Some(directory.clone()),
            None => std::env::var_os(ASSETS_VARIABLE).map(PathBuf::from),
        };
        let finder = Finder { session, given };
        let kubernetes = kubernetes(source.minor);
        let patched_kubelet = patched_kubelet(source.minor);
        Ok(Programs {
            etcd: finder.find(&ETCD, "etcd").await?,
            kube_apiserver: finder.find(&kubernetes, "kube-apiserver").await?,
            kube_controller_manager: finder.find(&kubernetes, "kube-controller-manager").await?,
            kube_scheduler: finder.find(&kubernetes, "kube-scheduler").await?,
            kube_proxy: finder.find(&kubernetes, "kube-proxy").await?,
            kubelet: match kubelet {
                Kubelet::Stock => finder.find(&kubernetes, "kubelet").await?,
                Kubelet::Patched => go_build::build(session, &patched_kubelet).await?.join("kubelet"),
            },
            kubectl: finder.find(&kubernetes, "kubectl").await?,
        })
    }
}

struct Finder<'a> {
    session: &'a Session,
    given: Option<PathBuf>,
}

impl Finder<'_> {
    async fn find(&self, module: &GoModule, program: &str) -> Result<PathBuf> {
        if let Some(dir) = &self.given {
            let path = dir.join(program);
            if path.is_file() {
                self.check_version(module, program, &path).await?;
                return Ok(path);
            }
        }
        // The first call for a module builds all its programs; later calls take them from the cache.
        Ok(go_build::build(self.session, module).await?.join(program))
    }

    /// Checks that a provided program has the same minor version as the ones that are built. Kubernetes does
    /// not support a kubelet that is newer than its API server, and clients of another minor version may not
    /// see every field.
    async fn check_version(&self, module: &GoModule, program: &str, path: &Path) -> Result<()> {
        // kubectl has no --version. It works with any server at most one minor version away.
        if matches!(program, "etcd" | "kubectl") {
            return Ok(());
        }
        let pinned = go_build::pinned_version(self.session, module)?;
        let answer = Program::new(path).arg("--version").run().await?.stdout;
        let found = Version::parse(&answer)
            .with_context(|| format!("{} --version answered {answer:?}", path.display()))?;
        anyhow::ensure!(
            (found.major, found.minor) == (pinned.major, pinned.minor),
            "{} is {found}, and the cluster runs {}.{}: give a directory of that minor (--kubernetes-bin or \
             {ASSETS_VARIABLE}), select the other minor (--kubernetes), or give no directory to have it built",
            path.display(),
            pinned.major,
            pinned.minor
        );
        Ok(())
    }
}
