//! The judgement of what the node itself does with the loop devices of volumes, and of SELinux.

use super::check::Check;
use super::host_facts::HostFacts;

/// The largest `max_part` of the loop module that leaves loopfs only devices whose names have five digits, as the rule of udev and the
/// filter of LVM expect.
const MAX_PART: u32 = 31;

pub(super) fn judge(facts: &HostFacts, max_part: Option<u32>) -> Vec<Check> {
    vec![selinux(facts.label.as_deref()), udev_rule(facts, max_part), lvm_filter(facts)]
}

/// The policy of containers (container-selinux) confines their processes by the types `container_t` and others of such names.
fn selinux(label: Option<&str>) -> Check {
    const ID: &str = "selinux";
    let kind = label.and_then(|label| label.split(':').nth(2)).unwrap_or_default();
    if kind.starts_with("container_") && !kind.starts_with("container_runtime") {
        return Check::warning(
            ID,
            format!(
                "SELinux gives this process the type {kind}, which may not write to directories of the node"
            ),
            "give the container a type that may: seLinuxOptions.type spc_t in its securityContext, which the value seLinuxOptions of the \
             chart sets",
        );
    }
    match kind {
        "" => Check::ok(ID, "SELinux does not confine this process"),
        kind => Check::ok(ID, format!("the type of this process is {kind}, and not one of containers")),
    }
}

fn udev_rule(facts: &HostFacts, max_part: Option<u32>) -> Check {
    const ID: &str = "udev-rule";
    if !facts.held.is_empty() {
        return Check::warning(
            ID,
            format!(
                "devices are built on those of volumes: {}; they keep the loop devices after the pods have ended",
                facts.held.join(", ")
            ),
            "unless a pod has built them, install the rule that `loopfs data-dir udev-rule` prints, and remove them with `vgchange \
             --activate n VG` or `mdadm --stop /dev/mdN`",
        );
    }
    match facts.udev_rule {
        Some(true) if max_part.is_some_and(|parts| parts > MAX_PART) => Check::warning(
            ID,
            "with this max_part of the loop module, loopfs uses devices with shorter names than the rule of udev expects",
            format!("set the parameter max_part of the module to {MAX_PART} or less"),
        ),
        Some(true) => Check::ok(ID, "udev does not read the loop devices of volumes"),
        Some(false) => Check::warning(
            ID,
            "udev reads what the owners of Block volumes write, so LVM and mdadm activate what they find there",
            "run `loopfs data-dir udev-rule >/etc/udev/rules.d/59-loopfs.rules && udevadm control --reload`",
        ),
        None => {
            Check::not_checked(ID, "/run/udev does not exist: this is a container, or a node without udev")
                .with_remedy("check on the node")
        }
    }
}

fn lvm_filter(facts: &HostFacts) -> Check {
    const ID: &str = "lvm-filter";
    match facts.lvm_filter {
        Some(true) => Check::ok(ID, "LVM ignores the loop devices of volumes"),
        Some(false) => Check::warning(
            ID,
            "the commands of LVM read what the owners of Block volumes write, and find copies of the node's volume groups there",
            "append what `loopfs data-dir lvm-filter` prints to /etc/lvm/lvmlocal.conf",
        ),
        None if facts.udev_rule.is_some() => Check::ok(ID, "LVM is not installed"),
        None => Check::not_checked(ID, "/etc/lvm does not exist: this is a container, or a node without LVM")
            .with_remedy("check on the node"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::preflight::Status;
    use crate::preflight::facts::tests::host;

    #[rstest]
    #[case::confined("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:container_t:s0:c1,c2".into()), Status::Warning, "spc_t")]
    #[case::unconfined("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:spc_t:s0".into()), Status::Ok, "")]
    #[case::engine("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:container_runtime_t:s0".into()), Status::Ok, "")]
    #[case::apparmor("selinux", |f: &mut HostFacts| f.label = Some("cri-containerd.apparmor.d (enforce)".into()), Status::Ok, "")]
    #[case::no_rule("udev-rule", |f: &mut HostFacts| f.udev_rule = Some(false), Status::Warning, "loopfs data-dir udev-rule")]
    #[case::no_udev("udev-rule", |f: &mut HostFacts| f.udev_rule = None, Status::NotChecked, "on the node")]
    #[case::held("udev-rule", |f: &mut HostFacts| f.held = vec!["loop65536 (dm-0)".into()], Status::Warning, "vgchange --activate n")]
    #[case::held_in_a_container("udev-rule", |f: &mut HostFacts| {
        (f.udev_rule, f.held) = (None, vec!["loop65536 (md127)".into()]);
    }, Status::Warning, "mdadm --stop")]
    #[case::no_filter("lvm-filter", |f: &mut HostFacts| f.lvm_filter = Some(false), Status::Warning, "lvmlocal.conf")]
    #[case::no_lvm("lvm-filter", |f: &mut HostFacts| f.lvm_filter = None, Status::Ok, "")]
    #[case::unseen_lvm("lvm-filter", |f: &mut HostFacts| {
        (f.udev_rule, f.lvm_filter) = (None, None);
    }, Status::NotChecked, "on the node")]
    fn each_fact_decides_its_status(
        #[case] id: &str,
        #[case] change: fn(&mut HostFacts),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut facts = host();
        change(&mut facts);
        let checks = judge(&facts, Some(0));
        let check = checks.iter().find(|check| check.id == id).unwrap();
        assert_eq!(check.status, status, "{check:?}");
        assert_eq!(check.remedy.is_none(), remedy.is_empty(), "{check:?}");
        assert!(check.remedy.as_deref().unwrap_or_default().contains(remedy), "{check:?}");
    }

    #[test]
    fn short_names_escape_the_rule() {
        let status = |parts| judge(&host(), Some(parts))[1].status;
        assert_eq!((status(31), status(32)), (Status::Ok, Status::Warning));
    }
}
