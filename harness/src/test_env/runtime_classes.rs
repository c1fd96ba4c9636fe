//! RuntimeClasses of stories. They have no namespace, so a story deletes those that it creates.

use anyhow::{Context, Result};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use testvm_cluster::api_error::api_error;

use super::environment::TestEnv;

/// Creates a RuntimeClass that names a handler of the container runtime.
pub(crate) async fn create(env: &TestEnv<'_>, name: &str, handler: &str) -> Result<()> {
    let mut class = RuntimeClass { handler: handler.into(), ..RuntimeClass::default() };
    class.metadata.name = Some(name.into());
    let created = api(env).create(&PostParams::default(), &class).await;
    created.map_err(api_error).with_context(|| format!("create RuntimeClass {name}")).map(drop)
}

pub(crate) async fn delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let deleted = api(env).delete(name, &DeleteParams::default()).await;
    deleted.map_err(api_error).with_context(|| format!("delete RuntimeClass {name}")).map(drop)
}

fn api(env: &TestEnv<'_>) -> Api<RuntimeClass> {
    Api::all(env.client.clone())
}
