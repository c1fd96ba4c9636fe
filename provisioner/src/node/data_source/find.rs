//! Finds the data source of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{
    claim, snapshot,
    source::{DataSource, DataSourceRef, reference},
};
use crate::{error::Error, node::context::Context};

/// Finds the volume or snapshot that the claim names as its data source.
///
/// # Errors
/// When the data source cannot be copied on this node, or a request to the API server fails.
pub(crate) async fn find(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Option<DataSource>, Error> {
    match reference(claim)? {
        None => Ok(None),
        Some(DataSourceRef::Snapshot(name)) => snapshot::find(claim, name, ctx).await.map(Some),
        Some(DataSourceRef::Claim(name)) => claim::find(claim, name, ctx).await.map(Some),
    }
}
