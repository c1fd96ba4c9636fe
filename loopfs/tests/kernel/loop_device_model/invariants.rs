//! The properties that hold after every round, whatever the order of its calls was, and that the reference model does not check.

use std::collections::BTreeSet;

use super::calls::{Attachment, Call, Reply, Request};
use super::event::Event;
use super::reference::{Device, State};
use super::{RANGE, observed};
use crate::failure::Failure;

/// Checks all of them. `before` is the state before the round.
pub(super) fn check(before: &State, events: &[Event], after: &[Attachment]) -> Result<(), String> {
    for event in events {
        if let Event::Replied { call, reply, .. } = event {
            access_mode(call, reply)?;
            requested_properties(before, call, reply)?;
            identity(before, call, reply)?;
            idle_indices(before, call, reply)?;
            found_devices(before, call, reply, after)?;
        }
    }
    Ok(())
}

pub(super) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

/// Returns the request of a call that attached a file, and the device that it returned.
fn attached<'a>(call: &'a Call, reply: &'a Reply) -> Option<(usize, &'a Request, &'a Attachment)> {
    match (call, reply) {
        (
            Call::Attach { file, request, .. } | Call::EnsureAttached { file, request, .. },
            Reply::Device { attachment, .. },
        ) => Some((*file, request, attachment)),
        _ => None,
    }
}

fn access_mode(call: &Call, reply: &Reply) -> Result<(), String> {
    let Reply::Device { attachment, writable } = reply else { return Ok(()) };
    ensure(*writable != attachment.mapping.read_only, || {
        format!("the access mode of a descriptor is not the requested one: {call:?} returned {reply:?}")
    })
}

fn requested_properties(before: &State, call: &Call, reply: &Reply) -> Result<(), String> {
    let Some((file, request, attachment)) = attached(call, reply) else { return Ok(()) };
    let is_right = request.is_met_by(attachment.mapping, attachment.direct_io)
        && attachment.inode == before.files[file].inode;
    ensure(is_right, || format!("a device has not the requested properties: {call:?} returned {reply:?}"))
}

/// A descriptor stays with its attachment.
fn identity(before: &State, call: &Call, reply: &Reply) -> Result<(), String> {
    let (Call::Status { handle }, Reply::Device { attachment, .. }) = (call, reply) else { return Ok(()) };
    let expected = before.of_handle(*handle).map(|at| &before.devices[at].attachment);
    ensure(expected.is_some_and(|expected| expected.is_same(attachment)), || {
        format!(
            "a descriptor belongs to another attachment: {call:?} returned {reply:?} instead of {expected:?}"
        )
    })
}

/// A pool that returns no index has none: every index of the range is bound. It returns each index once.
fn idle_indices(before: &State, call: &Call, reply: &Reply) -> Result<(), String> {
    match reply {
        Reply::UsedUp(indices) => {
            let distinct: BTreeSet<u32> = indices.iter().copied().collect();
            ensure(distinct.len() == indices.len(), || {
                format!("the pool has returned an idle index twice: {call:?} returned {indices:?}")
            })?;
            let forgotten: Vec<u32> =
                RANGE.filter(|index| !observed::is_bound(*index) && !distinct.contains(index)).collect();
            ensure(forgotten.is_empty(), || {
                format!(
                    "the pool has forgotten the idle indices {forgotten:?}: {call:?} returned {indices:?}"
                )
            })
        }
        Reply::Failed { kind: Failure::NoSpace, .. } => Err(format!(
            "the pool has forgotten idle indices: {call:?} returned {reply:?}; before: {before:?}"
        )),
        _ => Ok(()),
    }
}

/// A search or listing returns every device that is bound throughout the round, and no device that was unbound before.
fn found_devices(before: &State, call: &Call, reply: &Reply, after: &[Attachment]) -> Result<(), String> {
    let Reply::Devices(found) = reply else { return Ok(()) };
    let of_call = |device: &Device| match call {
        Call::Find { file } => device.file == *file && !before.is_hidden(device),
        _ => true,
    };
    let stays = |device: &&Device| after.iter().any(|found| found.is_same(&device.attachment));
    let has = |device: &Device| found.iter().any(|found| found.is_same(&device.attachment));
    for device in before.devices.iter().filter(stays).filter(|device| of_call(device)) {
        ensure(has(device), || format!("{call:?} did not find {device:?}: {found:?}"))?;
    }
    let newest = before.devices.iter().map(|device| device.attachment.sequence).max().unwrap_or(0);
    let inodes: BTreeSet<u64> = before.files.iter().map(|file| file.inode).collect();
    let is_stale = |attachment: &&Attachment| {
        let known = before.devices.iter().any(|device| device.attachment.is_same(attachment));
        inodes.contains(&attachment.inode) && attachment.sequence < newest && !known
    };
    match found.iter().find(is_stale) {
        Some(stale) => Err(format!("{call:?} found {stale:?}, which was not attached")),
        None => Ok(()),
    }
}
