//! Pods with a user namespace of their own (`hostUsers: false`), and the RuntimeClass that they need.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use testvm_cluster::USER_NAMESPACES_HANDLER;

use super::environment::TestEnv;
use super::runtime_classes;

/// Returns the pod with a user namespace of its own.
pub(crate) fn with_user_namespace(mut pod: Pod) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    spec.host_users = Some(false);
    spec.runtime_class_name = Some(USER_NAMESPACES_HANDLER.into());
    pod
}

/// Creates the RuntimeClass of [`with_user_namespace`].
pub(crate) async fn create_runtime_class(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, USER_NAMESPACES_HANDLER, USER_NAMESPACES_HANDLER).await
}

pub(crate) async fn delete_runtime_class(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::delete(env, USER_NAMESPACES_HANDLER).await
}
