//! Pods with a user namespace of their own (`hostUsers: false`), and the RuntimeClass that they need.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use testvm_cluster::USER_NAMESPACES_HANDLER;
use testvm_cluster::api_error::api_error;

use super::environment::TestEnv;

/// Returns the pod with a user namespace of its own.
pub(crate) fn with_user_namespace(mut pod: Pod) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    spec.host_users = Some(false);
    spec.runtime_class_name = Some(USER_NAMESPACES_HANDLER.into());
    pod
}

/// Creates the RuntimeClass of [`with_user_namespace`].
pub(crate) async fn create_runtime_class(env: &TestEnv<'_>) -> Result<()> {
    let mut class = RuntimeClass { handler: USER_NAMESPACES_HANDLER.into(), ..RuntimeClass::default() };
    class.metadata.name = Some(USER_NAMESPACES_HANDLER.into());
    let classes: Api<RuntimeClass> = Api::all(env.client.clone());
    classes
        .create(&PostParams::default(), &class)
        .await
        .map_err(api_error)
        .context("create the RuntimeClass")
        .map(drop)
}

pub(crate) async fn delete_runtime_class(env: &TestEnv<'_>) -> Result<()> {
    let classes: Api<RuntimeClass> = Api::all(env.client.clone());
    let deleted = classes.delete(USER_NAMESPACES_HANDLER, &DeleteParams::default()).await;
    deleted.map_err(api_error).context("delete the RuntimeClass").map(drop)
}
