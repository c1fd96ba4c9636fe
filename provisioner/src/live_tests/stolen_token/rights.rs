//! The rights of the driver's accounts and the rules of the policies that narrow them, as the cluster has them.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::admissionregistration::v1::{ExpressionWarning, ValidatingAdmissionPolicy};
use k8s_openapi::api::rbac::v1::{
    ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject,
};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use super::super::{SYSTEM, eventually};
use super::attacker::Account;
use super::request::{AttackRequest, Verdict};

/// One verb on one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Right {
    pub(super) verb: String,
    pub(super) group: String,
    /// The plural, with the subresource.
    pub(super) resource: String,
    /// `None` for all namespaces and objects without one.
    pub(super) namespace: Option<String>,
    /// `None` for objects of all names.
    pub(super) name: Option<String>,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Right { verb, group, resource, namespace, name } = self;
        write!(f, "{verb} {resource}.{group}")?;
        namespace.iter().try_for_each(|namespace| write!(f, " in {namespace}"))?;
        name.iter().try_for_each(|name| write!(f, " named {name}"))
    }
}

impl Right {
    /// Returns `true` if a request needs this right.
    pub(super) fn is_used_by(&self, request: &AttackRequest) -> bool {
        let resource = &request.resource;
        (self.verb.as_str(), self.group.as_str(), self.resource.as_str())
            == (request.verb, resource.group, resource.plural.as_str())
            && (self.namespace.is_none() || self.namespace == resource.namespace)
            && (self.name.is_none() || self.name == request.object)
    }

    pub(super) fn reads(&self) -> bool {
        ["get", "list", "watch"].contains(&self.verb.as_str())
    }
}

/// Returns every right that a binding gives to an account by its name. It omits the rights that all accounts have.
pub(super) async fn granted(admin: &Client, account: Account) -> BTreeSet<Right> {
    let all = ListParams::default();
    let mut rights = BTreeSet::new();
    for binding in Api::<ClusterRoleBinding>::all(admin.clone()).list(&all).await.unwrap() {
        if is_bound(account, binding.subjects.as_deref()) {
            rights.extend(of_role(admin, &binding.role_ref, None).await);
        }
    }
    for binding in Api::<RoleBinding>::all(admin.clone()).list(&all).await.unwrap() {
        if is_bound(account, binding.subjects.as_deref()) {
            rights.extend(of_role(admin, &binding.role_ref, binding.namespace()).await);
        }
    }
    rights
}

fn is_bound(account: Account, subjects: Option<&[Subject]>) -> bool {
    subjects.unwrap_or_default().iter().any(|subject| match subject.kind.as_str() {
        "ServiceAccount" => subject.name == account.name() && subject.namespace.as_deref() == Some(SYSTEM),
        "User" => subject.name == account.user(),
        _ => subject.name == format!("system:serviceaccounts:{SYSTEM}"),
    })
}

async fn of_role(admin: &Client, role: &RoleRef, namespace: Option<String>) -> Vec<Right> {
    let rules = match (role.kind.as_str(), &namespace) {
        ("Role", Some(namespace)) => {
            Api::<Role>::namespaced(admin.clone(), namespace).get(&role.name).await.unwrap().rules
        }
        _ => Api::<ClusterRole>::all(admin.clone()).get(&role.name).await.unwrap().rules,
    };
    rules.iter().flatten().flat_map(|rule| of_rule(rule, namespace.as_deref())).collect()
}

fn of_rule(rule: &PolicyRule, namespace: Option<&str>) -> Vec<Right> {
    let names: Vec<Option<String>> = match rule.resource_names.as_deref() {
        None | Some([]) => vec![None],
        Some(names) => names.iter().cloned().map(Some).collect(),
    };
    let mut rights = Vec::new();
    for group in rule.api_groups.iter().flatten() {
        for resource in rule.resources.iter().flatten() {
            for verb in &rule.verbs {
                assert!(
                    ![group, resource, verb].iter().any(|part| part.contains('*')),
                    "a wildcard: {rule:?}"
                );
                rights.extend(names.iter().map(|name| Right {
                    verb: verb.clone(),
                    group: group.clone(),
                    resource: resource.clone(),
                    namespace: namespace.map(str::to_owned),
                    name: name.clone(),
                }));
            }
        }
    }
    rights
}

/// Returns every policy that applies to an account of the driver.
pub(super) async fn policies(admin: &Client) -> Vec<ValidatingAdmissionPolicy> {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(admin.clone());
    // Kubernetes has looked for type errors in each.
    let policies = eventually("all policies are checked", || async {
        let all = policies.list(&ListParams::default()).await.unwrap();
        let is_checked = |policy: &ValidatingAdmissionPolicy| {
            let checked = policy.status.as_ref().and_then(|status| status.observed_generation);
            checked == policy.metadata.generation
        };
        all.items.iter().all(is_checked).then_some(all)
    })
    .await;
    let applies = |policy: &ValidatingAdmissionPolicy| {
        Account::ALL.into_iter().any(|account| applies_to(policy, account))
    };
    policies.into_iter().filter(applies).collect()
}

/// Returns `true` if a condition of the policy matches the account: an expression that ends with the name of one account, or of both.
fn applies_to(policy: &ValidatingAdmissionPolicy, account: Account) -> bool {
    let conditions = policy.spec.iter().flat_map(|spec| spec.match_conditions.iter().flatten());
    let patterns = [format!(":{}$\"", account.name()), ":loopfs-(provisioner|controller)$\"".to_owned()];
    conditions
        .into_iter()
        .any(|condition| patterns.iter().any(|pattern| condition.expression.contains(pattern)))
}

/// Returns the operations on resources that the policies narrow for an account.
pub(super) fn narrowed(policies: &[ValidatingAdmissionPolicy], account: Account) -> BTreeSet<String> {
    let specs = policies
        .iter()
        .filter(|policy| applies_to(policy, account))
        .filter_map(|policy| policy.spec.as_ref());
    let constraints = specs.filter_map(|spec| spec.match_constraints.as_ref());
    let rules = constraints.flat_map(|constraints| constraints.resource_rules.iter().flatten());
    let mut narrowed = BTreeSet::new();
    for rule in rules {
        for resource in rule.resources.iter().flatten() {
            narrowed
                .extend(rule.operations.iter().flatten().map(|operation| format!("{operation} {resource}")));
        }
    }
    narrowed
}

/// Returns every rule of a policy, as the verdict that it leads to.
pub(super) fn rules(policy: &ValidatingAdmissionPolicy) -> impl Iterator<Item = Verdict> + '_ {
    policy.spec.iter().flat_map(|spec| spec.validations.iter().flatten()).map(|rule| {
        let message = rule.message.clone().expect("a rule has a message, by which it is known");
        Verdict::Refused { policy: policy.name_any(), message }
    })
}

/// Returns the type errors that kube-controller-manager reports for a policy.
pub(super) fn warnings(policy: &ValidatingAdmissionPolicy) -> Vec<String> {
    let checked = policy.status.as_ref().and_then(|status| status.type_checking.as_ref());
    let warnings = checked.and_then(|checked| checked.expression_warnings.as_ref());
    let describe = |warning: &ExpressionWarning| {
        format!("{}: {}: {}", policy.name_any(), warning.field_ref, warning.warning)
    };
    warnings.into_iter().flatten().map(describe).collect()
}
