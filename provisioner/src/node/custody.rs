//! Takes custody of the volumes on this node's disk: see [`Custody`].

use crate::error::Error;
use crate::node::context::Context;
use crate::store::driver::Custody;

/// Returns the record of the node and the file system to which the volumes belong, after it was made durable. Asked for before each
/// deletion that follows from the absence of objects: they may have been deleted while the node or its disk was away.
///
/// # Errors
/// When the Node object does not exist, or when it or the record cannot be read or written.
pub(crate) async fn take(ctx: &Context) -> Result<Custody, Error> {
    let name = ctx.cluster.identity.node();
    let node = ctx.cluster.read_node(name).await?;
    let uid = node.and_then(|node| node.uid).ok_or_else(|| Error::NodeDeleted(name.to_owned()))?;
    Ok(ctx.storage.driver()?.take_custody(&uid).await?)
}

/// Takes custody once for each file system, so that a later deletion has a record to compare with.
pub(crate) async fn take_once(known_filesystem: &mut Option<String>, ctx: &Context) -> Result<(), Error> {
    let present = ctx.storage.filesystem_uuid()?;
    if known_filesystem.as_ref() != Some(&present) {
        *known_filesystem = Some(take(ctx).await?.filesystem_uuid);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::mock_api_server::{TestContext, own_node};

    #[tokio::test]
    async fn another_node_uid_takes_custody_again() {
        let test_context = TestContext::new(vec![own_node("first"), own_node("first"), own_node("second")]);
        let ctx = &test_context.ctx;
        let mut known = None;
        take_once(&mut known, ctx).await.unwrap();
        let id = test_context.volumes.add("pvc-9");
        take_once(&mut known, ctx).await.unwrap();
        assert!(!take(ctx).await.unwrap().keeps(&id));
        assert!(take(ctx).await.unwrap().keeps(&id));
        assert_eq!(test_context.finish().await, [""; 0]);
    }

    #[tokio::test]
    async fn node_without_object_has_no_custody() {
        let test_context = TestContext::new(vec![own_node("").refuse(404, "NotFound")]);
        let error = take(&test_context.ctx).await.unwrap_err().to_string();
        assert!(error.contains("restart the kubelet"), "{error}");
        assert_eq!(test_context.finish().await, [""; 0]);
    }
}
