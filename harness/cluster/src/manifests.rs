//! Kubernetes manifests, applied and deleted as `kubectl` does it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::{ApiCapabilities, ApiResource, Scope};
use kube::{Api, Client, ResourceExt, discovery};
use serde::Deserialize;
use testvm::process::Program;

use super::api_error::api_error;
use super::objects;

/// The field manager in the API server's record of applied objects.
const FIELD_MANAGER: &str = "testvm-cluster";

/// Every object of the manifests, in the order of their application.
#[derive(Clone, Debug)]
pub struct Manifests {
    objects: Vec<DynamicObject>,
}

impl Manifests {
    /// Reads every `*.yaml` in a directory, sorted by name.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or there is none.
    pub fn read(dir: &Path) -> Result<Manifests> {
        let entries = std::fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
        let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
        // kustomize's own file is not an object of the cluster.
        paths.retain(|path| path.file_name().is_none_or(|name| name != "kustomization.yaml"));
        paths.sort();
        anyhow::ensure!(!paths.is_empty(), "{} holds no manifests", dir.display());
        Manifests::read_files(&paths)
    }

    /// Reads these files.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or has no object.
    pub fn read_files(paths: &[PathBuf]) -> Result<Manifests> {
        let mut objects = Vec::new();
        for path in paths {
            let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            let parsed = parse(&text).with_context(|| format!("parse {}", path.display()))?;
            anyhow::ensure!(!parsed.is_empty(), "{} holds no manifests", path.display());
            objects.extend(parsed);
        }
        objects.sort_by_key(rank);
        Ok(Manifests { objects })
    }

    /// Parses the text of manifests, such as the output of a program that renders them.
    ///
    /// # Errors
    /// The text is no YAML, or a document is no object.
    pub fn from_text(text: &str) -> Result<Manifests> {
        let mut objects = parse(text)?;
        objects.sort_by_key(rank);
        Ok(Manifests { objects })
    }

    /// Renders a directory with a `kustomization.yaml`, as `kubectl apply --kustomize` does. `kubectl` is a path.
    ///
    /// # Errors
    /// kubectl fails, or its output cannot be parsed.
    pub async fn render(kubectl: &Path, directory: &Path) -> Result<Manifests> {
        let rendered = Program::new(kubectl).arg("kustomize").arg(directory).run().await?.stdout;
        Manifests::from_text(&rendered).with_context(|| format!("parse {}", directory.display()))
    }

    /// Returns all objects, in the order of their application.
    #[must_use]
    pub fn objects(&self) -> &[DynamicObject] {
        &self.objects
    }

    /// Returns the objects that `others` do not have.
    #[must_use]
    pub fn without(&self, others: &Manifests) -> Manifests {
        let id = |object: &DynamicObject| (object.types.clone(), object.name_any(), object.namespace());
        let others: Vec<_> = others.objects.iter().map(id).collect();
        let objects = self.objects.iter().filter(|object| !others.contains(&id(object)));
        Manifests { objects: objects.cloned().collect() }
    }

    /// Returns the only object of a kind, typed.
    ///
    /// # Errors
    /// The manifests have none of this kind, or more than one.
    pub fn only<K: serde::de::DeserializeOwned>(&self, kind: &str) -> Result<K> {
        let mut of_kind = self.objects.iter().filter(|object| is_kind(object, kind));
        let object = of_kind.next().with_context(|| format!("the manifests hold no {kind}"))?;
        anyhow::ensure!(of_kind.next().is_none(), "the manifests hold more than one {kind}");
        serde_json::from_value(serde_json::to_value(object)?).with_context(|| format!("read the {kind}"))
    }

    /// Applies every object, as `kubectl apply --server-side` does.
    ///
    /// # Errors
    /// The API server refuses an object, or does not know its kind.
    pub async fn apply(&self, client: &Client) -> Result<()> {
        for object in &self.objects {
            let (api, what) = api_of(client, object).await?;
            api.patch(&object.name_any(), &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(object))
                .await
                .map_err(api_error)
                .with_context(|| format!("apply {what}"))?;
        }
        Ok(())
    }

    /// Checks whether the API server would accept every object, without a change of the cluster. The namespaces of the objects and
    /// their custom resources must exist. An unknown field is an error.
    ///
    /// # Errors
    /// The API server refuses objects, or does not know their kinds. The message has one line for each.
    pub async fn dry_run(&self, client: &Client) -> Result<()> {
        let how = PatchParams::apply(FIELD_MANAGER).force().dry_run().validation_strict();
        let mut refused = Vec::new();
        for object in &self.objects {
            let (api, what) = api_of(client, object).await?;
            if let Err(error) = api.patch(&object.name_any(), &how, &Patch::Apply(object)).await {
                refused.push(format!("dry run of {what}: {:#}", api_error(error)));
            }
        }
        anyhow::ensure!(refused.is_empty(), "{}", refused.join("\n"));
        Ok(())
    }

    /// Returns the kinds and names of the objects that exist.
    ///
    /// # Errors
    /// The API server does not respond, or does not know a kind.
    pub async fn existing(&self, client: &Client) -> Result<Vec<String>> {
        let mut existing = Vec::new();
        for object in &self.objects {
            let (api, what) = api_of(client, object).await?;
            let found = api.get_opt(&object.name_any()).await.map_err(api_error);
            if found.with_context(|| format!("read {what}"))?.is_some() {
                existing.push(what);
            }
        }
        Ok(existing)
    }

    /// Deletes every object in reverse order. Missing objects are not an error.
    ///
    /// # Errors
    /// The API server refuses to delete an object, or does not know its kind.
    pub async fn delete(&self, client: &Client) -> Result<()> {
        for object in self.objects.iter().rev() {
            let (api, _) = api_of(client, object).await?;
            objects::delete_if_exists(&api, &object.name_any()).await?;
        }
        Ok(())
    }
}

fn parse(text: &str) -> Result<Vec<DynamicObject>> {
    documents(text)?.into_iter().map(|document| Ok(serde_json::from_value(document)?)).collect()
}

/// Returns the documents of a YAML text that are not empty: a file may begin or end with a separator.
///
/// # Errors
/// The text is not valid YAML.
pub fn documents(text: &str) -> Result<Vec<serde_json::Value>> {
    let mut documents = Vec::new();
    for document in serde_norway::Deserializer::from_str(text) {
        documents.push(serde_json::Value::deserialize(document)?);
    }
    documents.retain(|document| !document.is_null());
    Ok(documents)
}

async fn api_of(client: &Client, object: &DynamicObject) -> Result<(Api<DynamicObject>, String)> {
    let types = object.types.as_ref().context("an object of the manifests has no kind")?;
    let what = format!("{} {}", types.kind, object.name_any());
    let kind = GroupVersionKind::try_from(types).with_context(|| format!("{what}: its apiVersion"))?;
    let (resource, capabilities): (ApiResource, ApiCapabilities) = discovery::pinned_kind(client, &kind)
        .await
        .with_context(|| format!("{what}: this cluster does not know {}", types.api_version))?;
    let api = match (capabilities.scope, object.namespace()) {
        (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
        (Scope::Namespaced, Some(namespace)) => Api::namespaced_with(client.clone(), &namespace, &resource),
        (Scope::Namespaced, None) => anyhow::bail!("{what} is namespaced and names no namespace"),
    };
    Ok((api, what))
}

/// Returns the position in the order of `kubectl apply --kustomize`: objects that others depend on come
/// first.
fn rank(object: &DynamicObject) -> u8 {
    match object.types.as_ref().map(|types| types.kind.as_str()) {
        Some("Namespace") => 0,
        Some("DaemonSet" | "Deployment" | "StatefulSet" | "Pod") => 2,
        _ => 1,
    }
}

/// Returns `true` for objects of this kind, such as `DaemonSet`.
#[must_use]
pub fn is_kind(object: &DynamicObject, kind: &str) -> bool {
    object.types.as_ref().is_some_and(|types| types.kind == kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "---\nkind: CSIDriver\napiVersion: storage.k8s.io/v1\nmetadata:\n  name: a.example\n\
                       ---\nkind: ConfigMap\napiVersion: v1\nmetadata: {name: b, namespace: n}\n---\n";

    #[test]
    fn namespaces_come_first_and_pods_last() {
        let dir = tempfile::tempdir().unwrap();
        for (file, kind) in [("a.yaml", "DaemonSet"), ("b.yaml", "Namespace"), ("c.yaml", "ServiceAccount")] {
            let text = format!("{{apiVersion: v1, kind: {kind}, metadata: {{name: {kind}}}}}\n");
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        std::fs::write(dir.path().join("kustomization.yaml"), "resources: []\n").unwrap();
        let manifests = Manifests::read(dir.path()).unwrap();
        let names: Vec<_> = manifests.objects.iter().map(ResourceExt::name_any).collect();
        assert_eq!(names, ["Namespace", "ServiceAccount", "DaemonSet"]);
    }

    #[test]
    fn objects_of_other_manifests_are_excluded() {
        let all = Manifests { objects: parse(TWO).unwrap() };
        let first = Manifests { objects: all.objects[..1].to_vec() };
        let names: Vec<_> = all.without(&first).objects.iter().map(ResourceExt::name_any).collect();
        assert_eq!(names, ["b"]);
        assert!(all.without(&all).objects.is_empty());
    }

    /// If there is no such object, the error has the kind.
    #[test]
    fn only_object_of_kind_is_found() {
        let manifests = Manifests { objects: parse(TWO).unwrap() };
        let driver: k8s_openapi::api::storage::v1::CSIDriver = manifests.only("CSIDriver").unwrap();
        assert_eq!(driver.name_any(), "a.example");
        let error = manifests.only::<DynamicObject>("DaemonSet").unwrap_err().to_string();
        assert!(error.contains("no DaemonSet"), "{error}");
    }
}
