//! Finds the data source of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{claim, snapshot, source::DataSource};
use crate::{error::Error, node::context::Context, objects::data_source::CopiedRef};

/// Finds the volume or snapshot of the store that the claim is to be a copy of.
///
/// # Errors
/// If the data source cannot be copied on this node, or if a request to the API server fails.
pub(crate) async fn find(
    source: CopiedRef<'_>,
    claim: &PersistentVolumeClaim,
    ctx: &Context,
) -> Result<DataSource, Error> {
    match source {
        CopiedRef::Snapshot(name) => snapshot::find_snapshot(name, claim, ctx).await,
        CopiedRef::Claim(name) => claim::find_volume(name, claim, ctx).await,
    }
}
