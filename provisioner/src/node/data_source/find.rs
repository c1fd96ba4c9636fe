//! Finds the data source of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{
    claim, snapshot,
    source::{DataSource, DataSourceRef, reference},
};
use crate::{error::Error, node::context::Context};

/// Finds what the claim is to be filled with.
///
/// # Errors
/// When that cannot be copied here, or the API server does not tell.
pub(crate) async fn find(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Option<DataSource>, Error> {
    match reference(claim)? {
        None => Ok(None),
        Some(DataSourceRef::Snapshot(name)) => snapshot::find(claim, name, ctx).await.map(Some),
        Some(DataSourceRef::Claim(name)) => claim::find(claim, name, ctx).await.map(Some),
    }
}
