//! Project ids of the store: which are free, and when one is free again.
//!
//! An id is taken by giving it limits, before any directory carries it: every other program that
//! looks for a free id sees it from then on, and no directory is ever tagged without a limit. It
//! is free again when it has neither usage nor limits.

use std::ops::RangeInclusive;

use nix::errno::Errno;

use super::layout::Layout;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{Limits, ProjectId, ProjectQuota};
use crate::sys::random;

/// Chance decides where to look, so the cost does not grow with the ids in use; with a full range
/// it takes this many misses to notice.
const PROBES: usize = 1024;

/// Takes a free id by limiting it.
pub(super) fn reserve(
    layout: &Layout,
    quota: ProjectQuota<'_>,
    range: &RangeInclusive<ProjectId>,
    limits: Limits,
) -> Result<ProjectId> {
    let _lock = layout.lock_project_ids()?;
    for _ in 0..PROBES {
        let candidate = random_id(range)?;
        if quota.usage(candidate)?.is_none() {
            return match quota.set_limits(candidate, limits) {
                Ok(_) => Ok(candidate),
                Err(error) => {
                    quota.clear_limits(candidate)?;
                    Err(error)
                }
            };
        }
    }
    let detail = format!("{PROBES} ids from {} to {} were all in use", range.start(), range.end());
    Err(Error::new(ErrorKind::NoSpace, "reserve", "a project id", detail))
}

/// Frees an id that nothing carries any more. False while something still does: a deleted file
/// that is open, or a file that was moved out of its volume.
pub(super) fn release(quota: ProjectQuota<'_>, id: ProjectId) -> Result<bool> {
    quota.finish_frees(id)?;
    match quota.usage(id)? {
        None => Ok(true),
        Some(usage) if usage.is_empty() => {
            quota.clear_limits(id)?;
            Ok(true)
        }
        Some(_) => Ok(false),
    }
}

fn random_id(range: &RangeInclusive<ProjectId>) -> Result<ProjectId> {
    let (first, last) = (range.start().get(), range.end().get());
    let count = u64::from(last.saturating_sub(first)) + 1;
    let id = first + (random::number().context("choose", "a project id")? % count) as u32;
    // The ends of the range are valid ids, and so is all between them.
    ProjectId::new(id).ok_or_else(|| Error::sys("choose", "a project id", Errno::ERANGE))
}
