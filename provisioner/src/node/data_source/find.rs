//! Finds the data source of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{
    claim, snapshot,
    source::{Named, Origin, named},
};
use crate::{error::Error, node::context::Context};

/// Finds what the claim is to be filled with.
///
/// # Errors
/// When that cannot be copied here, or the API server does not tell.
pub(crate) async fn find(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Option<Origin>, Error> {
    match named(claim)? {
        None => Ok(None),
        Some(Named::Snapshot(name)) => snapshot::find(claim, name, ctx).await.map(Some),
        Some(Named::Claim(name)) => claim::find(claim, name, ctx).await.map(Some),
    }
}
