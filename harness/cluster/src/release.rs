//! The releases of Kubernetes that clusters run.

/// A minor release of Kubernetes. A `go.mod` in the directory `kubernetes` of the definitions pins its patch release.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum KubernetesMinor {
    #[default]
    V1_37,
    V1_36,
    V1_35,
}

impl KubernetesMinor {
    /// All minor releases, from the newest to the oldest.
    pub const ALL: [KubernetesMinor; 3] =
        [KubernetesMinor::V1_37, KubernetesMinor::V1_36, KubernetesMinor::V1_35];

    /// Returns the minor release that is called `name`, such as `1.36`.
    #[must_use]
    pub fn named(name: &str) -> Option<KubernetesMinor> {
        KubernetesMinor::ALL.into_iter().find(|minor| minor.name() == name)
    }

    /// Returns the name of the minor release, such as `1.36`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            KubernetesMinor::V1_37 => "1.37",
            KubernetesMinor::V1_36 => "1.36",
            KubernetesMinor::V1_35 => "1.35",
        }
    }

    /// Returns the directory of its `go.mod` in the definitions.
    pub(crate) const fn directory(self) -> &'static str {
        match self {
            KubernetesMinor::V1_37 => "kubernetes/1.37",
            KubernetesMinor::V1_36 => "kubernetes/1.36",
            KubernetesMinor::V1_35 => "kubernetes/1.35",
        }
    }
}
