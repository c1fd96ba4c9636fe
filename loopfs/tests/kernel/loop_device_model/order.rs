//! The search for an order of the events of a round that the reference model allows.

use super::calls::Attachment;
use super::event::Event;
use super::reference::{Device, State};

impl State {
    /// Returns a state that the events lead to in some order and that has the devices that the kernel reports.
    pub(super) fn after(&self, events: &[&Event], observed: &[Attachment]) -> Option<Self> {
        self.after_some(events, observed, events.len() > 1)
    }

    fn after_some(&self, events: &[&Event], observed: &[Attachment], concurrent: bool) -> Option<Self> {
        if events.is_empty() {
            return self.closed().pop().and_then(|last| last.confirmed_by(observed));
        }
        self.closed().iter().find_map(|state| {
            events.iter().enumerate().filter(|(_, event)| event.may_precede(events)).find_map(
                |(at, event)| {
                    let rest = [&events[..at], &events[at + 1..]].concat();
                    let next = state.next(event, observed, concurrent);
                    next.iter().find_map(|next| next.after_some(&rest, observed, concurrent))
                },
            )
        })
    }

    /// Returns the states in which the kernel has detached none, some or all of the devices that nothing keeps open. A
    /// concurrent call, such as a listing, may have them open for a moment. The last state is the one without all of them.
    fn closed(&self) -> Vec<Self> {
        let mut states = vec![self.clone()];
        let is_closing = |device: &Device| device.attachment.auto_clear && device.users.is_empty();
        for device in self.devices.iter().filter(|device| is_closing(device)) {
            let mut without = states.clone();
            for state in &mut without {
                state.devices.retain(|other| !other.attachment.is_same(&device.attachment));
            }
            states.extend(without);
        }
        states
    }

    /// Returns this state if its devices are exactly those that the kernel reports.
    fn confirmed_by(mut self, observed: &[Attachment]) -> Option<Self> {
        let all = self.devices.len() == observed.len();
        let equal = self.devices.iter_mut().all(|device| {
            let found = observed.iter().find(|found| found.is_same(&device.attachment));
            if let Some(found) = found.filter(|_| !device.discard_is_known) {
                device.attachment.discard = found.discard;
                device.discard_is_known = true;
            }
            found == Some(&device.attachment) && !device.reported_detached
        });
        (all && equal).then_some(self)
    }
}
