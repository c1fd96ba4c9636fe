//! The component claim-labels: its names, and its record that all claims have labels.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use testvm_cluster::waiting::{State, until_one};

/// The name of the policy, of its binding and of the ConfigMap with the record.
pub(crate) const NAME: &str = "loopfs-claim-labels";
/// The label with the name of a claim's node.
pub(crate) const LABEL: &str = "csi.loopfs.dev/node";
/// The key of the ConfigMap that the controller sets when all claims have labels.
pub(crate) const BINDING_UID: &str = "policy-binding-uid";

/// The controller records the labels one minute after it has found the policy.
const RECORD_TIMEOUT: Duration = Duration::from_secs(300);

/// Waits until the ConfigMap in the namespace of the driver has the record, or does not exist.
pub(crate) async fn until_recorded(client: &Client, namespace: &str, expected: bool) -> Result<()> {
    let config_maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    until_one(config_maps, NAME, RECORD_TIMEOUT, |config_map| {
        let recorded = config_map
            .is_some_and(|config_map| config_map.data.iter().flatten().any(|(key, _)| key == BINDING_UID));
        let reached = if expected { recorded } else { config_map.is_none() };
        State::ready_if(reached, format!("ConfigMap {NAME} is {config_map:?}"))
    })
    .await
    .map(drop)
}
