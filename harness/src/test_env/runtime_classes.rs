//! RuntimeClasses of stories. They have no namespace, so a story deletes those that it creates.

use anyhow::Result;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use testvm_cluster::objects;

use super::environment::TestEnv;

/// Creates a RuntimeClass that names a handler of the container runtime.
pub(crate) async fn create(env: &TestEnv<'_>, name: &str, handler: &str) -> Result<()> {
    let mut class = RuntimeClass { handler: handler.into(), ..RuntimeClass::default() };
    class.metadata.name = Some(name.into());
    objects::create(&api(env), &class).await.map(drop)
}

pub(crate) async fn delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
    objects::delete(&api(env), name).await
}

fn api(env: &TestEnv<'_>) -> Api<RuntimeClass> {
    Api::all(env.client.clone())
}
