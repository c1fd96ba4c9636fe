//! The sequential reference model: which devices there may be after one event, such as a call of the library and its reply.

use std::collections::BTreeSet;

use super::calls::{Attachment, Call, Handle, Index, Reply, Request};
use super::event::{Event, User};
use crate::failure::Failure;

/// A device that is bound to one of the files.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) file: usize,
    pub(super) attachment: Attachment,
    /// Another program has bound it.
    pub(super) foreign: bool,
    pub(super) users: BTreeSet<User>,
    /// `false` if a call was interrupted that may or may not have changed it, or if the kernel may have refused the change.
    pub(super) discard_is_known: bool,
    /// A call that detached it before its last user closed it reported it as detached. It is gone by the end of the round.
    pub(super) reported_detached: bool,
}

impl Device {
    pub(super) fn is_writable(&self) -> bool {
        !self.attachment.mapping.read_only
    }

    /// Returns `true` if some kernels let no program cancel the detach of the device, because it is mounted.
    fn is_unchangeable(&self) -> bool {
        self.attachment.auto_clear && self.users.iter().any(|user| matches!(user, User::Mount(_)))
    }
}

/// The devices of the files, as one order of the events allows them.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) devices: Vec<Device>,
    pub(super) files: Vec<FileFacts>,
}

/// A file, as far as its devices depend on it.
#[derive(Clone, Debug)]
pub(super) struct FileFacts {
    pub(super) inode: u64,
    pub(super) size: u64,
    /// The library has attached the file read-only, and no longer looks for read-only devices of other programs.
    pub(super) has_been_read_only: bool,
}

/// The index of a device that a killed worker may have bound, and that was gone before it was seen.
const UNSEEN: u32 = u32::MAX;

impl State {
    /// Returns the device with an access that the library finds: its own, or else any of those of other programs.
    fn found(&self, file: usize, read_only: bool) -> Vec<usize> {
        let of_access = |(at, device): (usize, &Device)| {
            (device.file == file && device.is_writable() != read_only).then_some((at, device.foreign))
        };
        let all: Vec<_> = self.devices.iter().enumerate().filter_map(of_access).collect();
        let own = all.iter().find(|(_, foreign)| !foreign);
        let chosen = own.map_or(all.as_slice(), std::slice::from_ref);
        chosen.iter().map(|(at, _)| *at).collect()
    }

    /// Returns `true` if the library may overlook a device: a read-only one of another program.
    fn may_be_overlooked(&self, device: &Device) -> bool {
        device.foreign && !device.is_writable()
    }

    /// Returns `true` if [`find`](loopfs::loop_device::LoopControl::find) need not return a device: one that may be overlooked, or
    /// a writable one of another program beside another writable one.
    pub(super) fn is_hidden(&self, device: &Device) -> bool {
        let writable = self.devices.iter().filter(|other| other.file == device.file && other.is_writable());
        device.foreign && (!device.is_writable() || writable.count() > 1)
    }

    pub(super) fn of_handle(&self, handle: Handle) -> Option<usize> {
        self.devices.iter().position(|device| device.users.contains(&User::Handle(handle)))
    }

    /// Returns the states that the event may lead to. If other calls run concurrently, they may have a device open for a moment.
    pub(super) fn next(&self, event: &Event, observed: &[Attachment], concurrent: bool) -> Vec<Self> {
        match event {
            Event::Replied { call, reply, .. } => self.replied(call, reply, concurrent),
            Event::Interrupted { call, .. } => self.interrupted(call, observed),
            Event::Died { worker } => {
                let is_of = |user: &User| matches!(user, User::Handle(handle) if handle.worker == *worker);
                vec![self.without_users(is_of)]
            }
            Event::Left { user } => vec![self.without_users(|other| other == user)],
            Event::Bound { file, attachment } => {
                self.with_new(*file, attachment.clone(), true, None).into_iter().collect()
            }
            Event::Unbound { index } => {
                let at = self.devices.iter().position(|device| device.attachment.index == *index);
                at.map(|at| self.changed(at, |device| device.attachment.auto_clear = true))
                    .into_iter()
                    .collect()
            }
        }
    }

    fn replied(&self, call: &Call, reply: &Reply, concurrent: bool) -> Vec<Self> {
        match (call, reply) {
            (Call::Attach { file, request, keep }, Reply::Device { attachment, .. }) => {
                self.attached(*file, request, attachment, *keep)
            }
            (Call::EnsureAttached { file, request, keep }, Reply::Device { attachment, .. }) => {
                let (found, size) = (self.found(*file, request.mapping.read_only), self.files[*file].size);
                let is_it = |at: &usize| {
                    let existing = &self.devices[*at].attachment;
                    existing.is_same(attachment) || existing.index == UNSEEN
                };
                match found.into_iter().find(is_it) {
                    Some(at) => vec![self.changed(at, |device| {
                        let Attachment { index, sequence, .. } = *attachment;
                        (device.attachment.index, device.attachment.sequence) = (index, sequence);
                        device.ensure(request, size);
                        device.users.extend(keep.map(User::Handle));
                    })],
                    None => self.attached(*file, request, attachment, *keep),
                }
            }
            (
                Call::Attach { file, request, .. } | Call::EnsureAttached { file, request, .. },
                Reply::Failed { kind, .. },
            ) => {
                let repeats = matches!(call, Call::EnsureAttached { .. });
                let differs = |at: &usize| {
                    let Attachment { mapping, direct_io, auto_clear, .. } = self.devices[*at].attachment;
                    !repeats || !request.is_met_by(mapping, direct_io) || auto_clear != request.auto_clear
                };
                let found = self.found(*file, request.mapping.read_only);
                let allowed = match kind {
                    Failure::AlreadyExists => found.iter().any(differs),
                    Failure::Busy => {
                        self.uses_index_of(request)
                            || found.iter().any(|at| self.devices[*at].is_unchangeable())
                    }
                    // The invariants check this.
                    Failure::NoSpace => found.is_empty(),
                    _ => false,
                };
                self.unchanged_if(allowed)
            }
            (Call::DetachAll { file }, Reply::Detached | Reply::Deferred) => {
                let as_replied =
                    |(state, detached): (Self, Vec<u32>)| state.with_detach(&detached, reply, concurrent);
                self.all_detached(*file).into_iter().filter_map(as_replied).collect()
            }
            (Call::Detach { handle, .. }, Reply::Detached | Reply::Deferred) => {
                let Some(at) = self.of_handle(*handle) else { return Vec::new() };
                let state = self.changed(at, |device| {
                    device.users.remove(&User::Handle(*handle));
                    device.attachment.auto_clear = true;
                });
                let index = state.devices[at].attachment.index;
                state.with_detach(&[index], reply, concurrent).into_iter().collect()
            }
            (Call::CancelDetach { handle }, Reply::Done) => {
                self.with_handle(*handle, |device| device.attachment.auto_clear = false)
            }
            (Call::CancelDetach { handle }, Reply::Failed { kind: Failure::Busy, .. }) => {
                let at = self.of_handle(*handle);
                self.unchanged_if(at.is_some_and(|at| self.devices[at].is_unchangeable()))
            }
            (Call::RefreshCapacity { handle, file }, Reply::Size(size)) => {
                let facts = self.files[*file].size;
                let states = self.with_handle(*handle, |device| {
                    device.attachment.size = device.attachment.mapping.size(facts);
                });
                let is_right = |state: &Self| {
                    state.of_handle(*handle).is_some_and(|at| state.devices[at].attachment.size == *size)
                };
                states.into_iter().filter(is_right).collect()
            }
            (Call::Close { handle }, Reply::Done) => {
                vec![self.without_users(|user| *user == User::Handle(*handle))]
            }
            // The invariants check these.
            (Call::Find { .. } | Call::List, Reply::Devices(_))
            | (Call::Status { .. }, Reply::Device { .. })
            | (Call::RemoveIdle { .. }, Reply::Removed(_))
            | (Call::UseUpRange, Reply::UsedUp(_)) => vec![self.clone()],
            _ => Vec::new(),
        }
    }

    /// Returns what a killed worker may have done.
    fn interrupted(&self, call: &Call, observed: &[Attachment]) -> Vec<Self> {
        let mut states = vec![self.clone()];
        match call {
            Call::Attach { file, request, .. } | Call::EnsureAttached { file, request, .. } => {
                for at in self.found(*file, request.mapping.read_only) {
                    let repeats = matches!(call, Call::EnsureAttached { .. });
                    let Attachment { mapping, direct_io, .. } = self.devices[at].attachment;
                    if repeats && request.is_met_by(mapping, direct_io) {
                        let size = self.files[*file].size;
                        states.push(self.changed(at, |device| {
                            device.ensure(request, size);
                            device.discard_is_known = false;
                        }));
                    }
                }
                let inode = self.files[*file].inode;
                let is_new = |found: &&Attachment| {
                    found.inode == inode
                        && request.is_met_by(found.mapping, found.direct_io)
                        && !self.devices.iter().any(|device| device.attachment.is_same(found))
                };
                let unseen = Attachment {
                    index: UNSEEN,
                    sequence: 0,
                    inode,
                    mapping: request.mapping,
                    size: 0,
                    direct_io: request.direct_io != Some(false),
                    auto_clear: false,
                    discard: request.discard,
                };
                for new in observed.iter().filter(is_new).chain([&unseen]) {
                    for mut state in self.attached(*file, request, new, None) {
                        state.devices.last_mut().unwrap().discard_is_known = false;
                        states.push(state);
                    }
                }
            }
            Call::DetachAll { file } => {
                states.extend(self.detached(*file, false).into_iter().map(|(state, _)| state));
                states.extend(self.all_detached(*file).into_iter().map(|(state, _)| state));
            }
            Call::Detach { handle, .. } => {
                states.extend(self.with_handle(*handle, |device| device.attachment.auto_clear = true));
            }
            Call::CancelDetach { handle } => states.extend(self.with_handle(*handle, |device| {
                device.attachment.auto_clear = false;
                // Before Linux 6.9 this enables discards, and the library disables them again.
                device.discard_is_known = false;
            })),
            Call::RefreshCapacity { handle, file } => {
                let size = self.files[*file].size;
                states.extend(self.with_handle(*handle, |device| {
                    device.attachment.size = device.attachment.mapping.size(size);
                }));
            }
            Call::Find { .. } | Call::List | Call::Status { .. } | Call::Close { .. } => {}
            Call::RemoveIdle { .. } | Call::UseUpRange => {}
        }
        states
    }

    /// Returns the states with a new device of the library, if there may be one.
    fn attached(&self, file: usize, request: &Request, new: &Attachment, keep: Option<Handle>) -> Vec<Self> {
        let may_be = |at: &usize| self.may_be_overlooked(&self.devices[*at]);
        if !self.found(file, request.mapping.read_only).iter().all(may_be) {
            return Vec::new();
        }
        let size = request.mapping.size(self.files[file].size);
        let (auto_clear, discard) = (request.auto_clear, request.discard);
        let attachment = Attachment { size, auto_clear, discard, ..new.clone() };
        let mut states: Vec<Self> = self.with_new(file, attachment, false, keep).into_iter().collect();
        for state in &mut states {
            state.files[file].has_been_read_only |= request.mapping.read_only;
        }
        states
    }

    fn with_new(
        &self,
        file: usize,
        attachment: Attachment,
        foreign: bool,
        keep: Option<Handle>,
    ) -> Option<Self> {
        let is_free = attachment.index == UNSEEN
            || !self.devices.iter().any(|device| device.attachment.index == attachment.index);
        is_free.then(|| {
            let users = keep.map(User::Handle).into_iter().collect();
            let device =
                Device { file, attachment, foreign, users, discard_is_known: true, reported_detached: false };
            Self { devices: [&*self.devices, &[device]].concat(), files: self.files.clone() }
        })
    }

    /// Returns the states in which both devices that the library finds are to be detached, and the indices of these.
    fn all_detached(&self, file: usize) -> Vec<(Self, Vec<u32>)> {
        let mut states = Vec::new();
        for (writable, first) in self.detached(file, false) {
            let both = writable.detached(file, true).into_iter();
            states.extend(both.map(|(state, second)| (state, first.into_iter().chain(second).collect())));
        }
        states
    }

    /// Returns the states in which the device that the library finds is to be detached, and its index.
    fn detached(&self, file: usize, read_only: bool) -> Vec<(Self, Option<u32>)> {
        let found = self.found(file, read_only);
        let overlooks = |at: &usize| self.may_be_overlooked(&self.devices[*at]);
        let mut states = Vec::new();
        if found.iter().all(overlooks) {
            states.push((self.clone(), None));
        }
        let sees = |at: &&usize| !(overlooks(at) && self.files[file].has_been_read_only);
        states.extend(found.iter().filter(sees).map(|at| {
            let state = self.changed(*at, |device| device.attachment.auto_clear = true);
            (state, Some(self.devices[*at].attachment.index))
        }));
        states
    }

    /// Returns this state if the detach of some devices may have this reply. A call reads it after its last step, so concurrent calls
    /// may have opened a device for a moment, or have closed it as its last users.
    fn with_detach(mut self, indices: &[u32], reply: &Reply, concurrent: bool) -> Option<Self> {
        let open: Vec<&mut Device> = self
            .devices
            .iter_mut()
            .filter(|device| indices.contains(&device.attachment.index) && !device.users.is_empty())
            .collect();
        let as_ordered = open.is_empty() != matches!(reply, Reply::Deferred);
        if matches!(reply, Reply::Detached) {
            for device in open {
                device.reported_detached = true;
            }
        }
        (as_ordered || concurrent).then_some(self)
    }

    fn uses_index_of(&self, request: &Request) -> bool {
        let Index::Exact(index) = request.index else { return false };
        self.devices
            .iter()
            .any(|device| device.attachment.index == index || device.attachment.index == UNSEEN)
    }

    fn unchanged_if(&self, allowed: bool) -> Vec<Self> {
        if allowed { vec![self.clone()] } else { Vec::new() }
    }

    fn with_handle(&self, handle: Handle, change: impl FnOnce(&mut Device)) -> Vec<Self> {
        self.of_handle(handle).map(|at| self.changed(at, change)).into_iter().collect()
    }

    fn changed(&self, at: usize, change: impl FnOnce(&mut Device)) -> Self {
        let mut state = self.clone();
        change(&mut state.devices[at]);
        state
    }

    fn without_users(&self, is_gone: impl Fn(&User) -> bool) -> Self {
        let mut state = self.clone();
        for device in &mut state.devices {
            device.users.retain(|user| !is_gone(user));
        }
        state
    }
}

impl Device {
    /// Changes what `ensure_attached` changes of an attached device. `size` is that of the file.
    fn ensure(&mut self, request: &Request, size: u64) {
        self.attachment.size = self.attachment.mapping.size(size);
        if self.attachment.discard != request.discard {
            self.attachment.discard = request.discard;
            // Some kernels keep discards disabled.
            self.discard_is_known &= !request.discard;
        }
    }
}
