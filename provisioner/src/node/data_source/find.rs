//! Finds the data source of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{
    claim, snapshot,
    source::{DataSource, DataSourceRef, parse_reference},
};
use crate::{error::Error, node::context::Context};

/// Finds the volume or snapshot of the store that the claim is to be a copy of. Returns `None` for a claim without a data
/// source.
///
/// # Errors
/// If the data source cannot be copied on this node, or if a request to the API server fails.
pub(crate) async fn find(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Option<DataSource>, Error> {
    match parse_reference(claim)? {
        None => Ok(None),
        Some(DataSourceRef::Snapshot(name)) => snapshot::find_snapshot(name, claim, ctx).await.map(Some),
        Some(DataSourceRef::Claim(name)) => claim::find_volume(name, claim, ctx).await.map(Some),
    }
}
