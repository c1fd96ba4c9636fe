//! Plans of faults: rules for the faulty API server that are the same in each run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::faulty_api_server::{Call, Fault};
use crate::api::hash::fnv1a;

/// The first requests of an object that may fail, for each verb and resource. Each plan ends, so that each story does.
const FAULTY_REQUESTS: u32 = 3;
/// The starts and events of the watch of a resource that may fail.
const FAULTY_EVENTS: u32 = 24;

const OF_LISTS: [Fault; 6] = [
    Fault::StaleList,
    Fault::StaleList,
    Fault::Gone,
    Fault::Unavailable,
    Fault::HalfBody,
    Fault::ExpiredToken,
];

/// The claims of PersistentVolumes, whose names contain random UIDs.
#[derive(Debug, Clone, Default)]
pub(super) struct Subjects(Arc<Mutex<HashMap<String, String>>>);

impl Subjects {
    pub(super) fn insert(&self, volume: String, claim: &str) {
        self.0.lock().unwrap().insert(volume, claim.to_owned());
    }

    /// Returns the claim that a call concerns. Empty for calls about other objects.
    fn of(&self, call: &Call) -> String {
        match call.resource.as_str() {
            "persistentvolumeclaims" | "persistentvolumeclaims/status" => call.name.clone(),
            _ => self.0.lock().unwrap().get(&call.name).cloned().unwrap_or_default(),
        }
    }
}

/// Numbers the calls of each verb, resource and claim from zero.
#[derive(Debug, Default)]
struct CallNumbers(Mutex<HashMap<(&'static str, String, String), u32>>);

impl CallNumbers {
    fn next(&self, call: &Call, subject: &str) -> u32 {
        let mut numbers = self.0.lock().unwrap();
        let number = numbers.entry((call.verb, call.resource.clone(), subject.to_owned())).or_default();
        *number += 1;
        *number - 1
    }
}

/// Returns a rule whose faults depend on the seed, and on the verb, the resource, the claim and the number of the call.
pub(super) fn seeded(seed: u64, subjects: Subjects) -> impl Fn(&Call) -> Option<Fault> + Send + Sync {
    let numbers = CallNumbers::default();
    move |call| {
        let subject = subjects.of(call);
        let number = numbers.next(call, &subject);
        let (faults, one_in, last): (&[Fault], u64, u32) = match call.verb {
            "watch" => (&Fault::OF_WATCHES, 6, FAULTY_EVENTS),
            "list" => (&OF_LISTS, 2, FAULTY_REQUESTS),
            "get" => (&Fault::OF_READS, 3, FAULTY_REQUESTS),
            _ => (&Fault::OF_WRITES, 3, FAULTY_REQUESTS),
        };
        let key = [&seed.to_string(), call.verb, &call.resource, &subject, &number.to_string()];
        // The upper bits of the hash are the random ones.
        let random = fnv1a(&key) >> 20;
        let index = usize::try_from(random / one_in).unwrap_or_default() % faults.len();
        (number < last && random.is_multiple_of(one_in)).then(|| faults[index])
    }
}

/// Returns a rule by which the first write of each kind about a claim has the fault after which the claim is named.
pub(super) fn of_each_write(subjects: Subjects) -> impl Fn(&Call) -> Option<Fault> + Send + Sync {
    let numbers = CallNumbers::default();
    move |call| {
        let subject = subjects.of(call);
        let fault = Fault::OF_WRITES.into_iter().find(|fault| claim_of(*fault) == subject)?;
        (call.is_write() && numbers.next(call, &subject) == 0).then_some(fault)
    }
}

/// Returns the name of the claim whose writes have a fault.
pub(super) fn claim_of(fault: Fault) -> String {
    format!("{fault:?}").to_lowercase()
}
