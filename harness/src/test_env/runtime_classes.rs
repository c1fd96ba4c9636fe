//! RuntimeClasses of stories. They have no namespace, so a story deletes those that it creates.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use testvm_cluster::{USER_NAMESPACES_HANDLER, objects};

use super::environment::TestEnv;

/// The RuntimeClass of pods with a user namespace of their own.
pub(crate) const OWN_USERS: &str = USER_NAMESPACES_HANDLER;

/// Creates a RuntimeClass that names a handler of the container runtime.
pub(crate) async fn create(env: &TestEnv<'_>, name: &str, handler: &str) -> Result<()> {
    let mut class = RuntimeClass { handler: handler.into(), ..RuntimeClass::default() };
    class.metadata.name = Some(name.into());
    objects::create(&api(env), &class).await.map(drop)
}

/// Returns the pod with a user namespace of its own (`hostUsers: false`), and the RuntimeClass [`OWN_USERS`].
pub(crate) fn with_user_namespace(mut pod: Pod) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    spec.host_users = Some(false);
    spec.runtime_class_name = Some(OWN_USERS.into());
    pod
}

pub(crate) async fn delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
    objects::delete(&api(env), name).await
}

fn api(env: &TestEnv<'_>) -> Api<RuntimeClass> {
    Api::all(env.client.clone())
}
