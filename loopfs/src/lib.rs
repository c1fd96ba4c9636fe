//! Loop devices, XFS project quotas and a volume store.
