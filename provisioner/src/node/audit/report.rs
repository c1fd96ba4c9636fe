//! Lists the findings of one audit, for `--audit`.

use std::fmt::Write as _;

use kube::Client;

use super::compare::compare;
use super::findings::AuditFindings;
use super::named_by;
use crate::objects::identity::Identity;
use crate::store::driver::Driver;

/// Audits once and returns the list. Changes nothing.
pub(crate) async fn report(
    client: &Client,
    identity: &Identity,
    driver: &dyn Driver,
) -> anyhow::Result<String> {
    // The volumes are read before and after the PersistentVolumes: a volume that is being created or deleted in the meantime is a
    // finding in at most one of the two comparisons.
    let before = driver.list(false).await?;
    let objects = named_by::all(client, identity).await?;
    let after = driver.list(false).await?;
    let findings = compare(&before, &objects, identity).confirmed_by(compare(&after, &objects, identity));
    Ok(listed(&findings))
}

fn listed(findings: &AuditFindings) -> String {
    let mut list = String::new();
    for id in &findings.orphans {
        // Writing to a String does not fail.
        writeln!(list, "volume-without-pv\t{id}").unwrap_or_default();
    }
    for (name, why) in &findings.missing {
        writeln!(list, "pv-without-volume\t{name}\t{why}").unwrap_or_default();
    }
    list
}

#[cfg(test)]
mod tests {
    use loopfs::volume_store::VolumeId;

    use super::*;

    #[test]
    fn findings_are_listed_one_per_line() {
        let mut findings = AuditFindings::default();
        assert_eq!(listed(&findings), "");
        findings.orphans.insert(VolumeId::parse("pvc-1").unwrap());
        findings.missing.insert("pvc-2".to_owned(), "there is no volume pvc-2".to_owned());
        assert_eq!(
            listed(&findings),
            "volume-without-pv\tpvc-1\npv-without-volume\tpvc-2\tthere is no volume pvc-2\n"
        );
    }
}
