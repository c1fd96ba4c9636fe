//! Checks that the API server's verdicts are the expected ones, and that the requests cover all rights and all rules.

use std::fmt::Write as _;

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;

use super::attacker::{Account, Attacker};
use super::attempt::AttackAttempt;
use super::request::Verdict;
use super::rights::{Right, narrowed, rules, warnings};

fn uses(right: &Right, attempt: &AttackAttempt) -> bool {
    let also = attempt
        .additional_right
        .is_some_and(|(verb, resource)| (verb, resource) == (&right.verb, &right.resource));
    also || right.is_used_by(&attempt.request)
}

/// Returns a line for each unexpected verdict, and for each right of the account that its requests do not cover.
pub(super) fn of_rights(attacker: &Attacker, verdicts: &[(AttackAttempt, Verdict)]) -> String {
    let account = attacker.account.name();
    let mut faults = String::new();
    for (attempt, verdict) in verdicts {
        if !verdict.is(&attempt.expected) {
            let AttackAttempt { title, request, expected, .. } = attempt;
            writeln!(faults, "{account}: {request}: {title}: {verdict}; expected: {expected}").unwrap();
        }
    }
    for right in &attacker.rights {
        let of_right =
            || verdicts.iter().filter(|(attempt, _)| uses(right, attempt)).map(|(_, verdict)| verdict);
        if !of_right().any(Verdict::allows) {
            writeln!(faults, "{account}: no request that is allowed needs the right to {right}").unwrap();
        }
        let is_narrowed = of_right().any(|verdict| matches!(verdict, Verdict::Refused { .. }));
        // These verbs permit no request of their own.
        let permits_requests = !["bind", "settle", "set"].contains(&right.verb.as_str());
        if !right.reads() && permits_requests && !is_narrowed {
            writeln!(faults, "{account}: no policy refuses a request that needs the right to {right}")
                .unwrap();
        }
    }
    faults
}

/// Returns a line for each rule that refuses none of the requests of both accounts, and for each operation that is narrowed only for
/// one account. With the component builtin-objects, an attacker could give the rights of one account to the other.
pub(super) fn of_policies(
    policies: &[ValidatingAdmissionPolicy],
    verdicts: &[(AttackAttempt, Verdict)],
) -> String {
    let mut faults = String::new();
    for warning in policies.iter().flat_map(warnings) {
        writeln!(faults, "{warning}").unwrap();
    }
    let rules: Vec<_> = policies.iter().flat_map(rules).collect();
    for (index, rule) in rules.iter().enumerate() {
        if rules[..index].contains(rule) {
            writeln!(faults, "two rules have one message: {rule}").unwrap();
        }
        if !verdicts.iter().any(|(_, verdict)| verdict == rule) {
            writeln!(faults, "no request is {rule}").unwrap();
        }
    }
    let [provisioner, controller] = Account::ALL.map(|account| narrowed(policies, account));
    for operation in provisioner.symmetric_difference(&controller) {
        writeln!(faults, "policies narrow {operation} for only one of the accounts").unwrap();
    }
    faults
}
