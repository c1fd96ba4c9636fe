//! The values with which the chart is rendered, and those that it must refuse.

use serde_json::{Value, json};
use testvm_cluster::KubernetesMinor;

/// Values that the chart accepts.
pub(super) struct Accepted {
    pub(super) name: &'static str,
    pub(super) values: Value,
    /// Texts that the objects contain.
    pub(super) present: &'static [&'static str],
    /// Texts that the objects do not contain, such as a default that a value replaces.
    pub(super) absent: &'static [&'static str],
    /// The names of the DaemonSets.
    pub(super) daemon_sets: &'static [&'static str],
}

/// The DaemonSets without pools.
const ONE: &[&str] = &["loopfs"];

/// The texts of a driver with another name. The last ones are those of the component claim-labels, whose policy contains the name in the key
/// of the label.
static OTHER_NAME: [&str; 6] = [
    "params.provisioner == \\\"node.storage.example.org\\\"",
    "topology.node.storage.example.org/node",
    "/var/lib/kubelet/plugins/node.storage.example.org",
    "\"name\":\"CLAIM_LABELS\",\"value\":\"loopfs-claim-labels\"",
    "Object.metadata{labels: {\\\"node.storage.example.org/node\\\":",
    "\"claimlabels\"",
];
const CLAIM_LABELS: usize = 3;

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// The namespaces of all accepted values, beside `kube-system`.
pub(super) const NAMESPACES: [&str; 2] = ["loopfs-system", "node-storage"];

/// Returns `true` if a release of Kubernetes serves the MutatingAdmissionPolicy that the component claim-labels needs.
pub(super) fn serves_mutating_policies(kubernetes: KubernetesMinor) -> bool {
    kubernetes != KubernetesMinor::V1_35
}

/// Returns values for each option of the chart that a release of Kubernetes supports.
pub(super) fn accepted(kubernetes: KubernetesMinor) -> Vec<Accepted> {
    let claim_labels = serves_mutating_policies(kubernetes);
    let mut all = settings(claim_labels);
    all.extend(components());
    all.extend(pools(claim_labels));
    all
}

/// Returns the values that enable all components.
pub(super) fn all_components(claim_labels: bool) -> Value {
    json!({
        "components": {
            "nodeLoss": true, "builtinObjects": true, "snapshots": true, "claimLabels": claim_labels, "resourceQuota": true,
        },
        "monitoring": {"podMonitor": {"enabled": true}, "prometheusRule": {"enabled": true}, "networkPolicy": {"enabled": true}},
    })
}

/// Returns the values of a second driver beside one with the defaults.
pub(super) fn second_driver() -> Value {
    json!({
        "driverName": "second.example.org",
        "dataDir": "/var/lib/second/data",
        "storageClasses": {"loopfs": null, "second": {}},
    })
}

/// Returns the values of both maps. Those of `values` win.
pub(super) fn merged(values: &Value, others: &Value) -> Value {
    let fields = [others, values].into_iter().filter_map(Value::as_object).flatten();
    Value::Object(fields.map(|(name, value)| (name.clone(), value.clone())).collect())
}

fn accept(
    name: &'static str,
    values: Value,
    present: &'static [&'static str],
    absent: &'static [&'static str],
) -> Accepted {
    Accepted { name, values, present, absent, daemon_sets: ONE }
}

/// `claim_labels` is `true` if the release of Kubernetes supports the component claim-labels.
fn settings(claim_labels: bool) -> Vec<Accepted> {
    vec![
        accept(
            "another driver name, with all components",
            merged(&json!({"driverName": "node.storage.example.org"}), &all_components(claim_labels)),
            if claim_labels { &OTHER_NAME } else { &OTHER_NAME[..OTHER_NAME.len() - CLAIM_LABELS] },
            &["csi.loopfs.dev"],
        ),
        accept(
            "another namespace, with all components",
            merged(
                &json!({"namespace": {"name": "node-storage", "labels": {"example.org/team": "storage"}}}),
                &all_components(claim_labels),
            ),
            &["\"example.org/team\":\"storage\"", "\"pod-security.kubernetes.io/enforce\":\"privileged\""],
            &["loopfs-system"],
        ),
        accept(
            "an existing namespace",
            json!({"namespace": {"create": false}}),
            &["\"namespace\":\"loopfs-system\""],
            &["\"kind\":\"Namespace\""],
        ),
        accept(
            "another data directory",
            json!({"dataDir": "/srv/disks/loopfs"}),
            &["--data-dir=/srv/disks/loopfs", "\"path\":\"/srv/disks\"", "\"mountPath\":\"/srv/disks\""],
            &["/var/lib/loopfs"],
        ),
        accept(
            "another directory of the kubelet, and the data directory below the default of it",
            json!({"dataDir": "/var/lib/kubelet/loopfs/data", "kubeletDir": "/mnt/kubelet"}),
            &[
                "--kubelet-dir=/mnt/kubelet",
                "\"path\":\"/mnt/kubelet/plugins/csi.loopfs.dev\"",
                "\"path\":\"/var/lib/kubelet/loopfs\"",
            ],
            &["/var/lib/kubelet/p", "/var/lib/loopfs"],
        ),
        accept(
            "other images, by digest",
            json!({
                "images": {
                    "loopfs": {"repository": "registry.example.org:5000/loopfs", "tag": "", "digest": DIGEST},
                    "csiSnapshotter": {"repository": "registry.example.org/csi-snapshotter"},
                    "snapshotController": {"repository": "registry.example.org/snapshot-controller", "digest": DIGEST},
                    "pullPolicy": "Always",
                    "pullSecrets": ["registry"],
                },
                "components": {"snapshots": true, "snapshotController": true},
            }),
            &[
                "\"registry.example.org:5000/loopfs@sha256:0123",
                "\"registry.example.org/csi-snapshotter:v",
                "\"imagePullSecrets\":[{\"name\":\"registry\"}]",
            ],
            &["docker.io", "registry.k8s.io", "IfNotPresent"],
        ),
        accept(
            "other nodes, priority and resources",
            json!({
                "nodeSelector": {"example.org/disk": "true"},
                "tolerations": [{"key": "example.org/storage", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "example.org/arch", "operator": "In", "values": ["a"]}]},
                ]}}},
                "priorityClassName": "system-cluster-critical",
                "maxUnavailable": 2,
                "resources": {
                    "csi": {"limits": {"memory": "256Mi"}},
                    "provisioner": {"limits": {"memory": "257Mi"}},
                    "csiSnapshotter": {"limits": {"memory": "258Mi"}},
                },
                "components": {"snapshots": true},
            }),
            &[
                "\"example.org/disk\":\"true\"",
                "\"kubernetes.io/os\":\"linux\"",
                "\"maxUnavailable\":2",
                "\"limits\":{\"memory\":\"256Mi\"}",
                "\"limits\":{\"memory\":\"257Mi\"}",
                "\"limits\":{\"memory\":\"258Mi\"}",
            ],
            &["[{\"operator\":\"Exists\"}]", "system-node-critical"],
        ),
        accept(
            "options of the programs, and SELinux options",
            json!({
                "options": {"csi": ["--check-interval=300", "--search-projects"], "provisioner": ["--collect"]},
                "controller": {"options": ["--node-loss-at-most=50"]},
                "seLinuxOptions": {"type": "spc_t"},
                "components": {"snapshots": true},
            }),
            &[
                "\"--probe-address=:9811\",\"--check-interval=300\",\"--search-projects\"],\"command\":[\"/loopfs-csi\"]",
                "\"--probe-address=:9812\",\"--collect\"],\"command\":[\"/loopfs-provisioner\",\"node\"]",
                "\"--probe-address=:9812\",\"--node-loss-at-most=50\"],\"command\":[\"/loopfs-provisioner\",\"controller\"]",
                "\"seLinuxOptions\":{\"type\":\"spc_t\"}",
            ],
            // The container csi is privileged, and has a type of its own.
            &["\"privileged\":true,\"readOnlyRootFilesystem\":true,\"seLinuxOptions\""],
        ),
        accept(
            "one replica of the controller, on other nodes",
            json!({"controller": {
                "replicas": 1,
                "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
                "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
                "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
                "priorityClassName": "system-node-critical",
                "resources": {"limits": {"memory": "64Mi"}},
            }}),
            &[
                "\"replicas\":1",
                "\"node-role.kubernetes.io/control-plane\":\"\"",
                "\"effect\":\"NoSchedule\"",
                "\"podAffinity\"",
                "\"limits\":{\"memory\":\"64Mi\"}",
            ],
            &["podAntiAffinity", "system-cluster-critical"],
        ),
        accept(
            "other classes",
            json!({"storageClasses": {
                "loopfs": null,
                "thin": {"default": true, "parameters": {"provisioning": "thin", "bytesPerInode": "16384"}},
                "kept": {"reclaimPolicy": "Retain", "volumeBindingMode": "Immediate", "allowVolumeExpansion": false,
                    "mountOptions": ["nosuid", "nodev", "noexec"], "annotations": {"example.org/note": "x"},
                    "allowedTopologies": [{"matchLabelExpressions": [
                        {"key": "topology.csi.loopfs.dev/node", "values": ["node-a"]}]}]},
            }}),
            &[
                "\"storageclass.kubernetes.io/is-default-class\":\"true\"",
                "\"provisioning\":\"thin\"",
                "\"reclaimPolicy\":\"Retain\"",
                "\"noexec\"",
                "\"values\":[\"node-a\"]",
            ],
            &[],
        ),
        accept(
            "no class",
            json!({"storageClasses": {"loopfs": null}}),
            &["\"kind\":\"CSIDriver\""],
            &["\"provisioner\":\"csi.loopfs.dev\""],
        ),
    ]
}

fn components() -> Vec<Accepted> {
    vec![
        accept(
            "snapshots, with the controller",
            json!({"components": {"snapshots": true, "snapshotController": true}}),
            &["--enable-distributed-snapshotting", "--node-deployment", "\"kind\":\"VolumeSnapshotClass\""],
            &["CustomResourceDefinition"],
        ),
        accept(
            "a PodMonitor",
            json!({"monitoring": {"podMonitor": {"enabled": true, "labels": {"release": "prometheus"}, "interval": "1m"}}}),
            &["\"kind\":\"PodMonitor\"", "\"scrapeTimeout\":\"1m\"", "\"release\":\"prometheus\""],
            &["\"kind\":\"NetworkPolicy\"", "\"interval\":\"30s\""],
        ),
        accept(
            "the alert rules",
            json!({"monitoring": {"prometheusRule": {"enabled": true, "labels": {"release": "prometheus"}}}}),
            &["\"kind\":\"PrometheusRule\"", "{{ $labels.node }}", "\"release\":\"prometheus\""],
            &["\"kind\":\"PodMonitor\""],
        ),
        accept(
            "a NetworkPolicy for Prometheus",
            json!({"monitoring": {"networkPolicy": {"enabled": true, "from": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
            ]}}}),
            &[
                "\"kind\":\"NetworkPolicy\"",
                "\"port\":\"csi-metrics\"",
                "\"kubernetes.io/metadata.name\":\"monitoring\"",
            ],
            &["\"kind\":\"PodMonitor\"", "\"port\":\"csi-probes\",\"protocol\""],
        ),
    ]
}

fn pools(claim_labels: bool) -> Vec<Accepted> {
    vec![Accepted {
        name: "two pools of nodes, with all components",
        values: json!({
            "pools": {
                "fast": {
                    "nodeSelector": {"example.org/disk": "nvme"},
                    "resources": {"provisioner": {"limits": {"memory": "128Mi"}}},
                    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"example.org/noisy": "true"}}},
                    ]}},
                },
                "large": {
                    "nodeSelector": {"example.org/disk": "hdd"},
                    "dataDir": "/srv/hdd/loopfs",
                    "tolerations": [],
                    "priorityClassName": "system-cluster-critical",
                    "maxUnavailable": "25%",
                },
            },
            "components": {"nodeLoss": true, "snapshots": true, "claimLabels": claim_labels},
        }),
        present: &[
            "\"key\":\"app.kubernetes.io/component\",\"operator\":\"NotIn\",\"values\":[\"fast\"]",
            "\"key\":\"app.kubernetes.io/component\",\"operator\":\"NotIn\",\"values\":[\"large\"]",
            "\"example.org/noisy\":\"true\"",
            "\"maxUnavailable\":\"25%\"",
            // The pool that names no directory keeps that of the chart.
            "--data-dir=/var/lib/loopfs/data",
            "\"mountPath\":\"/var/lib/loopfs\"",
            "\"path\":\"/var/lib/loopfs\"",
            "--data-dir=/srv/hdd/loopfs",
            "\"mountPath\":\"/srv/hdd\"",
            "\"path\":\"/srv/hdd\"",
            "\"limits\":{\"memory\":\"128Mi\"}",
        ],
        absent: &[],
        daemon_sets: &["loopfs-fast", "loopfs-large"],
    }]
}

/// Values that the chart refuses, and the name of the value that the message must contain.
pub(super) fn refused() -> Vec<(Value, &'static str)> {
    vec![
        (json!({"drivername": "csi.example.org"}), "drivername"),
        (json!({"driverName": "CSI.example.org"}), "driverName"),
        (json!({"driverName": "null"}), "driverName"),
        (json!({"driverName": format!("csi.{}.org", "a".repeat(60))}), "driverName"),
        (json!({"kubeletDir": format!("/{}", "a".repeat(90))}), "kubeletDir"),
        (json!({"namespace": "storage"}), "namespace"),
        (json!({"namespace": {"name": "Storage"}}), "/namespace/name"),
        (json!({"namespace": {"name": "on"}}), "/namespace/name"),
        (json!({"namespace": {"create": "true"}}), "/namespace/create"),
        // Helm records the release there.
        (json!({"namespace": {"name": "kube-system"}}), "namespace.create"),
        (json!({"dataDir": "loopfs/data"}), "dataDir"),
        (json!({"dataDir": "/data"}), "dataDir"),
        (json!({"dataDir": "/data/../etc"}), "dataDir"),
        (json!({"dataDir": "/var/loopfs"}), "dataDir: the pods would mount /var of the host"),
        (json!({"dataDir": "/var/lib/loopfs"}), "dataDir: the pods would mount /var/lib of the host"),
        (json!({"dataDir": "/var/lib/kubelet/loopfs"}), "the pods would mount /var/lib/kubelet"),
        (json!({"dataDir": "/mnt/loopfs", "kubeletDir": "/mnt/kubelet"}), "the pods would mount /mnt"),
        (
            json!({"pools": {"fast": {"nodeSelector": {"a": "b"}, "dataDir": "/opt/fast"}}}),
            "pools.fast.dataDir: the pods would mount /opt",
        ),
        (json!({"kubeletDir": "/var/lib/my kubelet"}), "kubeletDir"),
        (json!({"images": {"loopfs": {"tag": 1.2}}}), "/images/loopfs/tag"),
        (json!({"images": {"loopfs": {"digest": "sha256:0123"}}}), "/images/loopfs/digest"),
        (json!({"images": {"loopfs": {"repository": "loopfs:dev"}}}), "/images/loopfs/repository"),
        (json!({"images": {"loopfs": {"tag": ""}}}), "neither a tag nor a digest"),
        (json!({"images": {"pullPolicy": "Sometimes"}}), "/images/pullPolicy"),
        (json!({"nodeSelector": {"disk": true}}), "/nodeSelector/disk"),
        (json!({"tolerations": [{"operator": "Any"}]}), "/tolerations/0/operator"),
        (json!({"priorityClassName": ""}), "priorityClassName"),
        (json!({"seLinuxOptions": {"type": ""}}), "/seLinuxOptions/type"),
        (json!({"options": {"csi": ["check-interval=300"]}}), "/options/csi/0"),
        (json!({"controller": {"replicas": -1}}), "/controller/replicas"),
        (json!({"maxUnavailable": 0}), "maxUnavailable"),
        (json!({"maxUnavailable": "110%"}), "maxUnavailable"),
        (json!({"resources": {"csi": {"limits": {"memory": "lots"}}}}), "/resources/csi/limits/memory"),
        (json!({"pools": {"fast": {}}}), "nodeSelector"),
        (json!({"pools": {"fast": {"nodeSelector": {"a": "b"}, "dataDir": "/data"}}}), "/pools/fast/dataDir"),
        (json!({"pools": {"fast": {"nodeSelector": {}}}}), "/pools/fast/nodeSelector"),
        (json!({"pools": {"Fast": {"nodeSelector": {"a": "b"}}}}), "Fast"),
        (json!({"storageClasses": {"a": {"reclaimPolicy": "Keep"}}}), "/storageClasses/a/reclaimPolicy"),
        (
            json!({"storageClasses": {"a": {"parameters": {"bytesPerInode": 4096}}}}),
            "/storageClasses/a/parameters/bytesPerInode",
        ),
        (json!({"components": {"nodeLoss": "yes"}}), "/components/nodeLoss"),
        (json!({"components": {"claimLabels": "yes"}}), "/components/claimLabels"),
        (json!({"monitoring": {"podMonitor": {"interval": 30}}}), "/monitoring/podMonitor/interval"),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the keys of the first level, and those of the second such as `namespace.name`.
    fn keys(values: &Value) -> BTreeSet<String> {
        let fields = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let below = |(key, value): (String, Value)| {
            let second: Vec<_> = fields(&value).keys().map(|name| format!("{key}.{name}")).collect();
            second.into_iter().chain([key])
        };
        fields(values).into_iter().flat_map(below).collect()
    }

    /// A value that no test sets may have no effect.
    #[test]
    fn each_chart_value_is_tested() {
        let values = serde_norway::from_str(include_str!("../../../../csi/chart/values.yaml")).unwrap();
        let accepted: BTreeSet<String> =
            accepted(KubernetesMinor::V1_36).iter().flat_map(|accepted| keys(&accepted.values)).collect();
        let missing: Vec<_> = keys(&values).difference(&accepted).cloned().collect();
        assert_eq!(missing, [""; 0]);
    }
}
